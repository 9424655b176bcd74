"""The points of a run at which a fault may strike, and runs that are struck at one of them, once.

Each fault is tried at each point and between runs: a kill and a freeze in test_losing_a_worker; a cut, half a cut, a
reset and 500 ms in test_network_faults; lost packets in test_lossy_network. Memory and disk run out where they are
needed: test_losing_a_worker, test_worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from monarch_split.distributed.recipe import Recipe
from monarch_split.distributed.report import Report
from monarch_split.tests.driving import render
from monarch_split.tests.worker_process import Worker

# While a worker is greeted, while it is sent the model's file, while it loads that, in a forward, and after the second.
POINTS = ["connect", "file", "build", "forward", "between forwards"]
STEPS = 4


class Point:
    """Strikes once, when a run with `worker` gets to a point of POINTS. `struck_at` is when, None before."""

    def __init__(self, at: str, worker: Worker, strike: Callable[[], Any]) -> None:
        assert at in POINTS
        self._at, self._worker, self._strike = at, worker, strike
        self.struck_at: float | None = None

    def _now(self, at: str) -> None:
        if at == self._at and self.struck_at is None:
            self._strike()
            self.struck_at = time.monotonic()

    def check(self) -> None:
        """Called in every wait for the worker; the first is for its greeting."""
        self._now("connect")
        for at in ("build", "forward"):
            if self._at == at and self._worker.reached(at):
                self._now(at)

    def progress(self, done: int, total: int) -> None:
        assert 0 <= done <= total
        self._now("file")

    def on_step(self, step: int) -> None:
        if step == 2:
            self._now("between forwards")

    def run(
        self, recipe: Recipe, model: Any, *, address: str | None = None, busy: float = 20.0
    ) -> tuple[float, Report]:
        """render() of STEPS forwards with the worker, or through `address`. It is `busy` so long where it is struck."""
        if self._at in ("build", "forward"):
            self._worker.behave(**{"build" if self._at == "build" else "slow": busy})
        if self._at != "file":
            # Once the worker has the file, the points are what the run waits for most.
            with_file = self._worker.cache / f"{recipe.file.digest}.safetensors"
            with_file.write_bytes(recipe.path.read_bytes())
        how = {"check": self.check, "progress": self.progress, "on_step": self.on_step}
        worst, report = render([address or self._worker.address], recipe, model, steps=STEPS, **how)
        assert report.forwards == STEPS
        assert self.struck_at is not None, f"the run never got to {self._at}"
        return worst, report
