"""The record of a measurement: medians and spread of each mode, what they are compared with, and every condition."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .runs import COLD, MEASURED, Run

Record = dict[str, Any]


def summary(runs: Sequence[Run], modes: Sequence[str]) -> Record:
    """What came out of the runs: `modes`, and as `speedup` how many times as fast as "one" each other mode was."""
    counted = {mode: [run for run in runs if _counts(run, mode)] for mode in modes}
    summed = {mode: _mode([run for run in runs if run.mode == mode], counted[mode]) for mode in modes}
    one = summed.get("one", {}).get("median_s")
    speedup = {
        mode: round(one / each["median_s"], 3)
        for mode, each in summed.items()
        if mode != "one" and one and each["median_s"]
    }
    return {"modes": summed, "speedup": speedup}


def models(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The model files that were sampled, each once, with size, digest and format."""
    found: dict[str, dict[str, Any]] = {}
    for run in runs:
        for sampling in run.samplings:
            model = sampling["model"]
            if model is not None:
                found[model["digest"]] = model
    return list(found.values())


def samplings(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """What was sampled in a run: sampler, steps, sizes [rows, channels, …], dtype; the same in every run."""
    first = runs[0].samplings if runs else []
    return [{name: each[name] for name in ("sampler", "steps", "latent", "compute_dtype")} for each in first]


def _counts(run: Run, mode: str) -> bool:
    return run.mode == mode and run.kind == MEASURED and run.problem is None


def _mode(runs: Sequence[Run], counted: Sequence[Run]) -> Record:
    cold = next((run for run in runs if run.kind == COLD and not run.failed), None)
    median = _median(run.seconds for run in counted)
    last = counted[-1] if counted else None
    return {
        "runs": len(counted),
        "median_s": median,
        "spread_s": _spread(run.seconds for run in counted),
        "seconds": [round(run.seconds, 3) for run in counted],
        "sampling": {
            "median_s": _median(run.sampling_seconds for run in counted),
            "spread_s": _spread(run.sampling_seconds for run in counted),
        },
        "first_s": round(cold.seconds, 3) if cold else None,
        # Not below 0: what was measured of a load that takes nothing is noise.
        "load_s": round(max(0.0, cold.seconds - median), 3)
        if cold and not cold.cached and median is not None
        else None,
        "worker_load_s": _worker_load(cold),
        "peak_memory": {
            "driver": _most(sampling["peak_memory"] for run in counted for sampling in run.samplings),
            "worker": _most(usage for run in counted for usage in run.usage.values()),
        },
        **_split(last),
        "waiting_s": _median(sum(report["waiting"] for report in run.reports) for run in counted if run.reports),
        "difference": _difference(counted),
        "failed": not counted and any(run.failed for run in runs),
        "not_counted": [
            {
                "run": run.kind,
                "seconds": round(run.seconds, 3),
                "why": run.problem,
                "lost": bool(run.failures),
                "failed": run.failed,
            }
            for run in runs
            if run.problem
        ],
    }


def _split(run: Run | None) -> Record:
    """How a run was split, and what it moved."""
    reports = run.reports if run else []
    return {
        "split": next((report["split"] for report in reports if report["split"]), None),
        "forwards": sum(report["forwards"] for report in reports),
        "forwards_split": sum(report["forwards_split"] for report in reports),
        "bytes_sent": sum(report["bytes_sent"] for report in reports),
        "bytes_received": sum(report["bytes_received"] for report in reports),
        "lines": [report["line"] for report in reports],
    }


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return round(statistics.median(found), 3) if found else None


def _spread(values: Iterable[float]) -> list[float] | None:
    """[least, most]."""
    found = list(values)
    return [round(min(found), 3), round(max(found), 3)] if found else None


def _most(usages: Iterable[Mapping[str, int]]) -> dict[str, int] | None:
    """The largest of each kind of memory, in bytes; None if nothing is known."""
    found: dict[str, int] = {}
    for usage in usages:
        for kind in ("main", "gpu"):
            if kind in usage:
                found[kind] = max(found.get(kind, 0), usage[kind])
    return found or None


def _worker_load(cold: Run | None) -> float | None:
    """Seconds that the slowest worker took to load the models, by its own clock."""
    loads = [usage.get("load_ms", 0) for usage in cold.usage.values()] if cold else []
    return max(loads) / 1000 if loads else None


def _difference(runs: Sequence[Run]) -> dict[str, float | None] | None:
    """The largest difference of what was sampled to what one machine sampled; None if there is nothing to compare.

    Its numbers are None if the results are of other shapes, or hold NaN or infinity.
    """
    found = [run.difference for run in runs if run.difference is not None]
    if not found:
        return None
    if not all(math.isfinite(number) for each in found for number in each):
        return {"max_abs": None, "relative": None}
    return {"max_abs": max(each[0] for each in found), "relative": max(each[1] for each in found)}
