"""A real ComfyUI on a GPU, driver and worker process beside each other: what a split changes, per dtype and with LoRA.

python benchmarks/gpu_comfyui.py COMFYUI MODELS [ComfyUI flags]     MODELS: a folder for the tiny models
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    runpy.run_path(str(Path(__file__).resolve().parent.parent / "__main__.py"))["load_pack"]()
    from monarch_split.benchmarks.gpu_comfyui import main

    main()
    sys.exit()

import torch

from ..demo import tiny_loras, tiny_models
from ..demo.worker_process import WorkerProcess
from ..distributed.model_store import ComfyRuntime

# name, family, loader options, LoRA, batch, tokens of the negative prompt
CASES: tuple[tuple[str, str, dict[str, Any], bool, int, int], ...] = (
    ("Flux", "flux_schnell", {}, False, 1, 8),
    ("Flux, batch 3", "flux_schnell", {}, False, 3, 8),
    ("Flux, prompts of unequal length", "flux_schnell", {}, False, 1, 13),
    ("Wan", "wan", {}, False, 1, 8),
    ("Flux FP8", "flux_schnell", {"dtype": torch.float8_e4m3fn}, False, 1, 8),
    ("Flux FP8 fast", "flux_schnell", {"dtype": torch.float8_e4m3fn, "fp8_optimizations": True}, False, 1, 8),
    ("Flux with LoRA", "flux_schnell", {}, True, 1, 8),
    ("Flux FP8 with LoRA", "flux_schnell", {"dtype": torch.float8_e4m3fn}, True, 1, 8),
)


def render(model: Any, family: str, batch: int, negative_tokens: int) -> torch.Tensor:
    import comfy.sample

    latent = tiny_models.empty_latent(family, batch)
    positive, negative = (tiny_models.conditioning(family, *how) for how in ((1, 8), (2, negative_tokens)))
    noise = comfy.sample.prepare_noise(latent, 0)
    with torch.inference_mode():
        return comfy.sample.sample(
            model, noise, 4, 4.0, "euler", "simple", positive, negative, latent, seed=0, disable_pbar=True
        )


def measure(case: tuple[str, str, dict[str, Any], bool, int, int], models: Path) -> dict[str, Any]:
    import comfy.sd
    import comfy.utils

    from ..nodes.attach import attach

    name, family, options, with_lora, batch, negative_tokens = case
    model = comfy.sd.load_diffusion_model(str(models / f"{family}.safetensors"), model_options=options)
    if with_lora:
        lora = comfy.utils.load_torch_file(str(next(models.glob(f"{family}_lora*"))))
        model = comfy.sd.load_lora_for_models(model, None, lora, 0.7, 0)[0]
    reports: list[Any] = []
    stock, again = (render(model, family, batch, negative_tokens) for _ in range(2))
    split = [render(attach(model, "rows", reports.append), family, batch, negative_tokens) for _ in range(2)][-1]
    return {
        "case": name,
        "dtype": str(model.model.get_dtype()),
        "largest_latent": stock.abs().max().item(),
        "difference_repeated": (stock - again).abs().max().item(),
        "difference_split": (stock - split).abs().max().item(),
        "forwards": reports[-1].forwards,
        "forwards_split": reports[-1].forwards_split,
        "events": reports[-1].events,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("comfyui", type=Path)
    parser.add_argument("models", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gpu_comfyui.json")
    arguments, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        runtime = ComfyRuntime(arguments.comfyui, ["--base-directory", folder, *flags])
        import comfy.model_patcher

        if not arguments.models.exists():
            for family in ("flux_schnell", "wan"):
                tiny_models.write_model(family, arguments.models)
            tiny_loras.write_lora("flux_schnell", arguments.models)
        os.environ["MONARCH_CONFIG_DIR"] = folder
        passed_on = ["--comfyui", str(arguments.comfyui), "--", "--base-directory", folder, *flags]
        with WorkerProcess(runtime="comfyui", cache=Path(folder) / "cache", arguments=passed_on) as worker:
            (Path(folder) / "monarch.toml").write_text(f'[clusters.default]\nworkers = ["{worker.address}"]\n')
            results = [measure(case, arguments.models) for case in CASES]
    record = {
        "what": "largest difference of the latent after 4 steps at CFG 4, stock sampler against the split; tiny models",
        "date": time.strftime("%Y-%m-%d"),
        "device": runtime.describe()["device"],
        "comfyui": runtime.versions.comfyui,
        "torch": torch.__version__,
        "model_patcher": comfy.model_patcher.CoreModelPatcher.__name__,
        "flags": flags,
        "results": results,
    }
    arguments.out.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
