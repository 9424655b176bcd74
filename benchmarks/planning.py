"""What `auto` costs where splitting does not pay, and what it gains with a worker half as fast; needs no ComfyUI.

python benchmarks/planning.py [--steps 200]     writes benchmarks/results/planning.json
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    os.environ["OMP_NUM_THREADS"] = "1"
    runpy.run_path(str(Path(__file__).resolve().parent.parent / "__main__.py"))["load_pack"]()
    from monarch_split.benchmarks.planning import main

    sys.exit(main())

import torch

from ..demo.reference import PIXELS_PER_LATENT, TINY, ReferenceDiT, slowed
from ..demo.reference_runtime import FAMILY, load_reference_model, write_reference_model
from ..demo.worker_process import WorkerProcess
from ..distributed.addresses import parse_address
from ..distributed.cluster import Cluster
from ..distributed.ledger import DRIVER
from ..distributed.recipe import Recipe
from ..distributed.report import Report
from ..distributed.session import Session
from ..distributed.versions import own_versions
from ..tests.network_proxy import network_to, port_with_a_neighbour
from .machine import machine
from .row_split import inputs, seconds

ROUND_TRIP, BYTES_PER_SECOND = 0.05, 125e6
# Forwards in which `auto` may find out what pays: one that proves the worker, trials, one alone, other shares.
DECIDED_AFTER = 10
# Of a block, for each token: what a forward takes is what its machine sleeps, not what two processes share here.
SLOW = 0.001
# Pixels of an edge, and rows: one image with CFG, one without, a batch of six without.
FAR, NEAR, SIX_EACH, ONE_ALONE = 256, 64, 128, 256
CFG, ONE, SIX = 2, 1, 6


def measure(address: str, recipe: Recipe, model: ReferenceDiT, rows: int, pixels: int, steps: int) -> dict[str, Any]:
    """Forwards of one machine and of `auto` once it has decided, in turn, so that drift does not favour either."""
    args, kwargs = inputs(rows, TINY, pixels // PIXELS_PER_LATENT)
    report = Report("auto")
    cluster = Cluster("benchmark", (parse_address(address),))
    session = Session(
        cluster, own_versions(None), report, lambda: recipe, check=lambda: None, model=model, family=FAMILY
    )
    off, auto = [], []
    with session, torch.inference_mode():
        for _ in range(DECIDED_AFTER):
            session.forward(model, args, kwargs)
        tried = report.forwards_split
        for step in range(steps):
            calls = [(off, lambda: model(*args, **kwargs)), (auto, lambda: session.forward(model, args, kwargs))]
            # Neither always follows the other.
            for taken, call in calls if step % 2 else reversed(calls):
                taken.append(seconds(call))
    paired = sorted(a / b for a, b in zip(auto, off, strict=True))
    given = report.rows or report.tokens
    return {
        "rows": rows,
        "pixels": pixels,
        "steps": steps,
        "off_s": statistics.median(off),
        "auto_s": statistics.median(auto),
        "auto_over_off": statistics.median(paired),
        "auto_over_off_quartiles": [paired[len(paired) // 4], paired[-1 - len(paired) // 4]],
        "auto_minus_off_ms": 1000 * statistics.median(a - b for a, b in zip(auto, off, strict=True)),
        "speedup": 1 / statistics.median(paired),
        "predicted": report.predicted,
        "forwards_split_before": tried,
        "forwards_split_after": report.forwards_split - tried,
        "split": report.split,
        "worker_share": 1 - given[DRIVER] / sum(given.values()) if given else 0.0,
        "reasons": report.reasons,
    }


@contextmanager
def worker(folder: Path, *, far: bool = False, slow: float = 0.0) -> Iterator[str]:
    """The address of a worker with a cache of its own."""
    launcher = [str(Path(__file__).with_name("slow_worker.py")), str(slow)]
    with (
        tempfile.TemporaryDirectory(dir=folder) as cache,
        WorkerProcess(cache=Path(cache), port=port_with_a_neighbour(), launcher=launcher) as process,
        network_to(int(process.address.rpartition(":")[2])) if far else nullcontext() as network,
    ):
        if network is not None:
            network.delay(ROUND_TRIP)
            network.throttle(BYTES_PER_SECOND)
        yield process.address if network is None else network.address


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=200, help="of each measurement; a tenth where machines are slow")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "planning.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    steps, results = arguments.steps, {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["MONARCH_CONFIG_DIR"] = name
        recipe = write_reference_model(TINY, folder / "reference.safetensors")
        model = load_reference_model(recipe.path)
        for place, far, pixels in (("far_link", True, FAR), ("tiny_renders", False, NEAR)):
            with worker(folder, far=far) as address:
                for kind, rows in (("rows", CFG), ("tokens", ONE)):
                    results[f"{place}_{kind}"] = measure(address, recipe, model, rows, pixels, steps)
        slowed(model, SLOW)
        with worker(folder, slow=2 * SLOW) as address:
            for kind, rows, pixels in (("rows", SIX, SIX_EACH), ("tokens", ONE, ONE_ALONE)):
                results[f"half_as_fast_{kind}"] = measure(address, recipe, model, rows, pixels, max(steps // 10, 5))
    record = {
        "what": "forwards with split = auto, once it has decided, against the same model alone, in turn; far_link: a "
        "worker behind a proxy that shapes the link, tiny_renders: on the loopback, half_as_fast: machines that sleep "
        "for each token in each block, the worker twice as long",
        "auto_over_off, speedup": "median of the ratios of neighbouring forwards, and what that is the other way round",
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "torch": torch.__version__,
        "far_link": {"round_trip_ms": 1000 * ROUND_TRIP, "mb_per_s": BYTES_PER_SECOND / 1e6},
        "seconds_per_token_and_block": SLOW,
        "results": results,
    }
    arguments.out.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(results, indent=2))
    return 0
