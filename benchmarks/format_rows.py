"""What a row split of each weight format is equal to: a batch of two, or the same two rows one at a time. On the CPU.

python benchmarks/format_rows.py COMFYUI     in ComfyUI's Python; writes benchmarks/results/format_rows.json
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
    # Without it, MKL adds up a matrix product in another order for another number of rows on some CPUs.
    os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")
    runpy.run_path(str(Path(__file__).resolve().parent.parent / "__main__.py"))["load_pack"]()
    from monarch_split.benchmarks.format_rows import main

    main()
    sys.exit()

import torch

from ..demo import tiny_formats, tiny_models
from ..demo.worker_process import WorkerProcess
from ..distributed.model_store import ComfyRuntime
from ..distributed.rows import Call, cut
from .machine import machine

STEPS, CFG = 4, 4.0


def rows_one_by_one(model: Any) -> Any:
    """A clone of a MODEL whose diffusion model is given one row after the other, on this machine."""
    forward = model.model.diffusion_model.forward

    def by_rows(*args: Any, **kwargs: Any) -> Any:
        call = Call(args, kwargs)
        parts = [cut(call, row, row + 1) for row in range(call.rows)]
        return torch.cat([forward(*part.args, **part.kwargs) for part in parts])

    model = model.clone()
    model.add_object_patch("diffusion_model.forward", by_rows)
    return model


def render(model: Any) -> torch.Tensor:
    """The latent of a render in which each step is one forward of two rows: with and without the prompt."""
    import comfy.sample

    latent = tiny_models.empty_latent(tiny_formats.FAMILY, 1)
    positive, negative = (tiny_models.conditioning(tiny_formats.FAMILY, seed, 8) for seed in (1, 2))
    noise = comfy.sample.prepare_noise(latent, 0)
    return comfy.sample.sample(
        model, noise, STEPS, CFG, "euler", "simple", positive, negative, latent, seed=0, disable_pbar=True
    ).clone()


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    """Norm of the difference over the norm of `other`."""
    return ((one - other).norm() / other.norm()).item()


def measure(name: str, models: Path, exact: torch.Tensor) -> dict[str, Any]:
    import comfy.sd

    from ..nodes.attach import attach

    model = comfy.sd.load_diffusion_model(str(tiny_formats.write_format(name, models)))
    reports: list[Any] = []
    batch, rows = render(model), render(rows_one_by_one(model))
    split = render(attach(model, "rows", reports.append))
    return {
        "format": name,
        "split_vs_rows_max_abs": (split - rows).abs().max().item(),
        "split_vs_batch_max_abs": (split - batch).abs().max().item(),
        "split_vs_rows": relative(split, rows),
        "split_vs_batch": relative(split, batch),
        "rows_vs_batch": relative(rows, batch),
        "format_vs_fp32": relative(batch, exact),
        "forwards_split": reports[-1].forwards_split,
        "forwards": reports[-1].forwards,
        "events": reports[-1].events + reports[-1].reasons,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("comfyui", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "format_rows.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--cpu", "--base-directory", folder]
        runtime = ComfyRuntime(arguments.comfyui, flags)
        import comfy.sd

        os.environ["MONARCH_CONFIG_DIR"] = folder
        passed_on = ["--comfyui", str(arguments.comfyui), "--", *flags]
        with WorkerProcess(runtime="comfyui", cache=Path(folder) / "cache", arguments=passed_on) as worker:
            (Path(folder) / "monarch.toml").write_text(f'[clusters.default]\nworkers = ["{worker.address}"]\n')
            results = []
            for inference_mode in (True, False):
                with torch.inference_mode(inference_mode):
                    source = tiny_models.write_model(tiny_formats.FAMILY, Path(folder))
                    exact = render(comfy.sd.load_diffusion_model(str(source)))
                    for name in tiny_formats.FORMATS:
                        results.append({"inference_mode": inference_mode, **measure(name, Path(folder), exact)})
                        print(json.dumps(results[-1]), flush=True)
    record = {
        "what": "a tiny Flux after 4 steps of two rows, on the CPU: the split (one row here, one on a worker) against "
        "stock ComfyUI with a batch of two, and with the same two rows one at a time",
        "max_abs": "largest difference of the latents; the others: norm of the difference over the norm",
        "inference_mode": "true: as ComfyUI runs a prompt; false: as a script may, where torch takes the layers behind "
        "attention apart for a batch and comfy-kitchen multiplies them with dequantised weights",
        "format_vs_fp32": "what storing the weights in the format changes, the batch of two against the FP32 file's",
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "comfyui": runtime.versions.comfyui,
        "torch": torch.__version__,
        "results": results,
    }
    arguments.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
