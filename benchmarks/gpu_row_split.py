"""Row split of full-size models with random BF16 weights between two processes, on two GPUs or on one.

COMFYUI_PATH=... python benchmarks/gpu_row_split.py [flux wan]     writes benchmarks/results/gpu_row_split.json
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    runpy.run_path(str(Path(__file__).resolve().parent.parent / "__main__.py"))["load_pack"]()
    from monarch_split.benchmarks.gpu_row_split import main

    main()
    sys.exit()

if "COMFYUI_PATH" in os.environ:
    sys.path.insert(0, os.environ["COMFYUI_PATH"])

import torch

from ..distributed.addresses import Address
from ..distributed.cluster import Cluster
from ..distributed.report import Report
from ..distributed.session import Session
from ..distributed.versions import own_versions
from . import random_models
from .random_models import NULL, SHAPES, RandomRuntime

ROWS = 2


def serve() -> None:
    """The worker process: prints its port, serves until it is ended."""
    from ..distributed.auth import own_identity
    from ..distributed.file_cache import FileCache
    from ..distributed.worker import Worker, ended_by_signals

    cache = FileCache(Path("unused"))
    worker = Worker(RandomRuntime(), cache, ["127.0.0.1"], 0, "worker", own=own_identity())
    print(worker.addresses[0].port, flush=True)
    with ended_by_signals(worker):
        worker.run()


class OtherProcess:
    """A worker process on GPU `gpu`, ended on leaving."""

    def __init__(self, gpu: int) -> None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7").split(",")[gpu]
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), "--serve"],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": visible},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.cluster = Cluster("bench", (Address("127.0.0.1", int(self._process.stdout.readline())),))

    def __enter__(self) -> OtherProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)


def timed(call: Any, repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return seconds


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


def session(other: OtherProcess, name: str) -> Session:
    report = Report("rows", steps=1)
    versions = own_versions(None)
    return Session(other.cluster, versions, report, lambda: random_models.recipe(name), check=lambda: None)


def measure_engine(other: OtherProcess, name: str, repeats: int) -> dict[str, Any]:
    """Seconds per forward of the engine around a model that does nothing, at this model's shapes."""
    args, kwargs = SHAPES[name].inputs(ROWS)
    model = random_models.build(NULL)
    with session(other, NULL) as run:
        run.forward(model, args, kwargs)
        run.forward(model, args, kwargs)
        seconds = timed(lambda: run.forward(model, args, kwargs), repeats)
    return {"median_s": statistics.median(seconds), "min_s": min(seconds), "max_s": max(seconds), "runs": repeats}


def measure(other: OtherProcess, name: str, repeats: int) -> dict[str, Any]:
    args, kwargs = SHAPES[name].inputs(ROWS)
    one_args = tuple(value[:1] for value in args)
    one_kwargs = {key: value[:1] if torch.is_tensor(value) else value for key, value in kwargs.items()}
    with torch.inference_mode():
        model = random_models.build(name)
        with session(other, name) as run:
            whole = model(*args, **kwargs)
            single = model(*one_args, **one_kwargs)
            split = run.forward(model, args, kwargs)  # the first one runs whole on both: the check
            split = run.forward(model, args, kwargs)
            report = run.report
            alone, shared, row, busy = [], [], [], []
            for _ in range(repeats):
                alone += timed(lambda: model(*args, **kwargs), 1)
                before = report.busy_seconds
                shared += timed(lambda: run.forward(model, args, kwargs), 1)
                busy.append(report.busy_seconds - before)
                row += timed(lambda: model(*one_args, **one_kwargs), 1)
    return {
        "model": SHAPES[name].label,
        "rows": ROWS,
        "runs": repeats,
        "alone_s": statistics.median(alone),
        "split_s": statistics.median(shared),
        "one_row_s": statistics.median(row),
        "slower_node_s": statistics.median(busy),
        "overhead_ms": 1000 * statistics.median(s - b for s, b in zip(shared, busy, strict=True)),
        "ratio": statistics.median(a / s for a, s in zip(alone, shared, strict=True)),
        "ratio_min": min(a / s for a, s in zip(alone, shared, strict=True)),
        "ratio_max": max(a / s for a, s in zip(alone, shared, strict=True)),
        "difference_split_to_batch_2": relative(split, whole),
        "difference_batch_1_to_batch_2": relative(single, whole[:1]),
        "forwards_split": report.forwards_split,
        "forwards": report.forwards,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", default=list(SHAPES))
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gpu_row_split.json")
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return
    gpus = torch.cuda.device_count()
    record: dict[str, Any] = {
        "what": "row split of cond + uncond between two processes over ZeroMQ on the loopback; random BF16 weights",
        "date": time.strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(),
        "gpus": gpus,
        "torch": torch.__version__,
        "results": [],
    }
    for placement, gpu in (("two GPUs", 1), ("one GPU for both processes", 0)):
        if gpu >= gpus:
            continue
        with OtherProcess(gpu) as other:
            for name in arguments.models:
                if placement.startswith("one") and name != "flux" and gpus > 1:
                    continue
                engine = measure_engine(other, name, 50)
                result = measure(other, name, arguments.repeats if name == "flux" else max(3, arguments.repeats // 3))
                record["results"].append({"placement": placement, **result, "engine_per_forward": engine})
                print(json.dumps(record["results"][-1]), flush=True)
                torch.cuda.empty_cache()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
