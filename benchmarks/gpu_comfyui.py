"""A real ComfyUI on a GPU, driver and worker process beside each other: what a split changes, per dtype and with LoRA.

python benchmarks/gpu_comfyui.py COMFYUI MODELS [ComfyUI flags]     MODELS: a folder for the tiny models
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    runpy.run_path(str(Path(__file__).resolve().parent.parent / "__main__.py"))["load_pack"]()
    from monarch_split.benchmarks.gpu_comfyui import main

    main()
    sys.exit()

import torch

from ..demo import tiny_formats, tiny_loras, tiny_models
from ..demo.worker_process import WorkerProcess
from ..distributed.model_store import ComfyRuntime


@dataclass(frozen=True)
class Case:
    """One model and one way to render it; file: a format of tiny_formats, "" for the family as it is."""

    name: str
    family: str = "flux_schnell"
    file: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    lora: bool = False
    batch: int = 1
    negative_tokens: int = 8
    split: str = "rows"
    cfg: float = 4.0


_FP8: dict[str, Any] = {"dtype": torch.float8_e4m3fn}
CASES: tuple[Case, ...] = (
    Case("Flux"),
    Case("Flux, batch 3", batch=3),
    Case("Flux, prompts of unequal length", negative_tokens=13),
    Case("Wan", "wan"),
    Case("Flux FP8", options=_FP8),
    Case("Flux FP8 fast", options={**_FP8, "fp8_optimizations": True}),
    Case("Flux with LoRA", lora=True),
    Case("Flux FP8 with LoRA", options=_FP8, lora=True),
    *(Case(f"Flux {name}", file=name) for name in tiny_formats.FORMATS),
    *(
        Case(f"Flux {name} with LoRA", file=name, lora=True)
        for name in ("layered_fp8_e4m3", "nvfp4", "int8_rowwise", "mxfp8")
    ),
    Case("Flux, one row by tokens", split="tokens", cfg=1.0),
    Case("Wan, one row by tokens", "wan", split="tokens", cfg=1.0),
    Case("Flux, two rows by tokens", split="tokens"),
    Case("Flux layered_fp8_e4m3, one row by tokens", file="layered_fp8_e4m3", split="tokens", cfg=1.0),
    Case("Flux nvfp4, one row by tokens", file="nvfp4", split="tokens", cfg=1.0),
    Case("Flux int8_rowwise, one row by tokens", file="int8_rowwise", split="tokens", cfg=1.0),
)


def render(model: Any, case: Case) -> tuple[torch.Tensor, float]:
    """(latent, seconds of sampling)"""
    import comfy.sample

    latent = tiny_models.empty_latent(case.family, case.batch)
    positive, negative = (tiny_models.conditioning(case.family, *how) for how in ((1, 8), (2, case.negative_tokens)))
    noise = comfy.sample.prepare_noise(latent, 0)
    began = time.perf_counter()
    with torch.inference_mode():
        result = comfy.sample.sample(
            model, noise, 4, case.cfg, "euler", "simple", positive, negative, latent, seed=0, disable_pbar=True
        )
    return result, time.perf_counter() - began


def measure(case: Case, models: Path) -> dict[str, Any]:
    import comfy.sd
    import comfy.utils

    from ..nodes.attach import attach

    written = tiny_formats.write_format(case.file, models) if case.file else models / f"{case.family}.safetensors"
    model = comfy.sd.load_diffusion_model(str(written), model_options=dict(case.options))
    if case.lora:
        lora = comfy.utils.load_torch_file(str(next(models.glob(f"{case.family}_lora*"))))
        model = comfy.sd.load_lora_for_models(model, None, lora, 0.7, 0)[0]
    reports: list[Any] = []
    (stock, _), (again, seconds) = (render(model, case) for _ in range(2))
    split, seconds_split = [render(attach(model, case.split, reports.append), case) for _ in range(2)][-1]
    return {
        "case": case.name,
        "dtype": str(model.model.get_dtype()),
        "largest_latent": stock.abs().max().item(),
        "difference_repeated": (stock - again).abs().max().item(),
        "difference_split": (stock - split).abs().max().item(),
        "seconds_stock": seconds,
        "seconds_split_on_the_same_gpu": seconds_split,
        "forwards": reports[-1].forwards,
        "forwards_split": reports[-1].forwards_split,
        "split": reports[-1].split,
        "events": reports[-1].events + reports[-1].reasons,
    }


def write_models(comfyui: Path, models: Path) -> None:
    ComfyRuntime(comfyui, ["--cpu"])
    for family in ("flux_schnell", "wan"):
        tiny_models.write_model(family, models)
    tiny_loras.write_lora("flux_schnell", models)
    for name in tiny_formats.FORMATS:
        tiny_formats.write_format(name, models)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("comfyui", type=Path)
    parser.add_argument("models", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gpu_comfyui.json")
    parser.add_argument("--write", action="store_true", help="only write the models that are missing")
    arguments, flags = parser.parse_known_args()
    if arguments.write:
        write_models(arguments.comfyui, arguments.models)
        return
    # In a process without a GPU: with dynamic VRAM, ComfyUI's layers have no weights of their own to write.
    subprocess.run([sys.executable, __file__, str(arguments.comfyui), str(arguments.models), "--write"], check=True)
    with tempfile.TemporaryDirectory() as folder:
        runtime = ComfyRuntime(arguments.comfyui, ["--base-directory", folder, *flags])
        import comfy.model_patcher

        os.environ["MONARCH_CONFIG_DIR"] = folder
        passed_on = ["--comfyui", str(arguments.comfyui), "--", "--base-directory", folder, *flags]
        with WorkerProcess(runtime="comfyui", cache=Path(folder) / "cache", arguments=passed_on) as worker:
            (Path(folder) / "monarch.toml").write_text(f'[clusters.default]\nworkers = ["{worker.address}"]\n')
            results = []
            for case in CASES:
                try:
                    results.append(measure(case, arguments.models))
                except (LookupError, RuntimeError, ValueError) as error:
                    # Not every GPU and torch computes every format; stock ComfyUI fails then, too.
                    results.append({"case": case.name, "error": f"{type(error).__name__}: {error}"[:300]})
                print(json.dumps(results[-1]), flush=True)
    record = {
        "what": "largest difference of the latent after 4 steps, stock sampler against the split; tiny models, driver "
        "and worker on the same GPU",
        "date": time.strftime("%Y-%m-%d"),
        "device": runtime.describe()["device"],
        "comfyui": runtime.versions.comfyui,
        "torch": torch.__version__,
        "model_patcher": comfy.model_patcher.CoreModelPatcher.__name__,
        "flags": flags,
        "results": results,
    }
    arguments.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
