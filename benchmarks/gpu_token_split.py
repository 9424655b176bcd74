"""Token split of full-size models with random BF16 weights between two processes, on two GPUs of one host.

COMFYUI_PATH=... python benchmarks/gpu_token_split.py [flux wan] [--engines nccl lanes] [--label "NVLink"]
writes benchmarks/results/gpu_token_split.json; runs with other labels are added to it. NCCL over TCP:
NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_IB_DISABLE=1 NCCL_SOCKET_IFNAME=lo
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import runpy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    runpy.run_path(str(Path(__file__).resolve().parent.parent / "__main__.py"))["load_pack"]()
    from monarch_split.benchmarks.gpu_token_split import main

    main()
    sys.exit()

if "COMFYUI_PATH" in os.environ:
    sys.path.insert(0, os.environ["COMFYUI_PATH"])

import torch

from ..distributed.families import find_family
from ..distributed.report import Report
from ..distributed.session import Session
from ..distributed.versions import own_versions
from ..distributed.volume import measure as measure_volume
from . import random_models
from .gpu_row_split import OtherProcess, relative, timed
from .random_models import SHAPES

RESULT = Path(__file__).parent / "results" / "gpu_token_split.json"


def measure(other: OtherProcess, name: str, engine: str, overlap: str, repeats: int) -> dict[str, Any]:
    """One row of `name` on one GPU and by tokens on two, in turns."""
    args, kwargs = SHAPES[name].inputs(1)
    cluster = dataclasses.replace(other.cluster, exchange=engine, overlap=overlap)
    with torch.inference_mode():
        model = random_models.build(name)
        family = find_family(model)
        assert family is not None
        report = Report("tokens", steps=1)
        describe = lambda: random_models.recipe(name)  # noqa: E731
        with Session(
            cluster, own_versions(None), report, describe, check=lambda: None, model=model, family=family
        ) as run:
            run.forward(model, args, kwargs)  # runs here alone, and then by tokens: the check
            split = run.forward(model, args, kwargs)
            whole = model(*args, **kwargs)
            two_args, two_kwargs = SHAPES[name].inputs(2)
            first_of_two = model(*two_args, **two_kwargs)[:1]
            first_args = tuple(value[:1] for value in two_args)
            first_kwargs = {key: v[:1] if torch.is_tensor(v) else v for key, v in two_kwargs.items()}
            noise = relative(first_of_two, model(*first_args, **first_kwargs))
            _, volume = measure_volume(family, model, model, args, kwargs)
            alone, shared, waiting = [], [], []
            for _ in range(repeats):
                alone += timed(lambda: model(*args, **kwargs), 1)
                before = report.waiting
                shared += timed(lambda: run.forward(model, args, kwargs), 1)
                waiting.append(report.waiting - before)
            link = run.link
            kernels = {
                "alone": kernel_seconds(lambda: model(*args, **kwargs)),
                "split": kernel_seconds(lambda: run.forward(model, args, kwargs)),
            }
    ratios = [a / s for a, s in zip(alone, shared, strict=True)]
    return {
        "model": SHAPES[name].label,
        "engine": engine,
        "overlap": overlap,
        "runs": repeats,
        "alone_s": statistics.median(alone),
        "split_s": statistics.median(shared),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "waiting_s": statistics.median(waiting),
        "kernel_s": kernels,
        "exchanges": volume.operations,
        "exchanged_bytes": volume.bytes,
        "link": None if link is None else dataclasses.asdict(link),
        "difference_to_one_gpu": relative(split, whole),
        "difference_batch_1_to_batch_2": noise,
        "forwards_split": report.forwards_split,
        "forwards": report.forwards,
        "parts": report.tokens,
        "notes": report.events + report.reasons,
    }


# What GPU kernels are for, by what their names hold, the first that fits.
KERNELS = {
    "exchange": ("nccl",),
    "attention": ("flash", "fmha", "attention"),
    "matrix products": ("nvjet", "gemm", "xmma", "cutlass"),
    "copies": ("memcpy", "copy", "Cat"),
}


def kernel_seconds(forward: Callable[[], Any]) -> dict[str, float]:
    """Seconds that this GPU's kernels took in one forward, by what they are for."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        forward()
        torch.cuda.synchronize()
    seconds = dict.fromkeys((*KERNELS, "all else"), 0.0)
    for event in profile.key_averages():
        purpose = next((p for p, names in KERNELS.items() if any(name in event.key for name in names)), "all else")
        seconds[purpose] += event.self_device_time_total / 1e6
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", default=list(SHAPES))
    parser.add_argument("--engines", nargs="+", default=["nccl", "lanes"])
    parser.add_argument("--overlap", default="off")
    parser.add_argument("--label", default="NVLink")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    record: dict[str, Any] = {
        "what": "token split of one row between two processes on two GPUs of one host; random BF16 weights",
        "date": time.strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "results": [],
    }
    if arguments.out.exists():
        record["results"] = json.loads(arguments.out.read_text())["results"]
    for name in arguments.models:
        for engine in arguments.engines:
            with OtherProcess(1) as other:
                repeats = arguments.repeats if name == "flux" else max(3, arguments.repeats // 4)
                result = {"link_label": arguments.label, **measure(other, name, engine, arguments.overlap, repeats)}
            print(json.dumps(result), flush=True)
            same = ("link_label", "model", "engine", "overlap")
            kept = [old for old in record["results"] if any(old.get(key) != result[key] for key in same)]
            record["results"] = [*kept, result]
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(record, indent=2) + "\n")
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
