"""However a run ends, its workers are idle at once and nothing of it stays on either side. Real workers."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import torch

from monarch_split.demo.reference import ReferenceDiT
from monarch_split.distributed.recipe import Recipe
from monarch_split.tests.driving import (
    SAME,
    Stopped,
    guided,
    open_session,
    render,
    sample_once,
)
from monarch_split.tests.worker_process import Worker, until

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="workers run on Linux")


def test_an_interrupt_in_a_forward_stops_the_worker_at_once(
    workers: list[Worker], recipe: Recipe, model: ReferenceDiT
) -> None:
    worker = workers[0]
    render([worker.address], recipe, model)
    worker.behave(slow=30)
    before = _held()

    def check() -> None:
        if worker.reached("forward"):
            raise Stopped

    worker.mark()
    with pytest.raises(Stopped):
        render([worker.address], recipe, model, check=check)
    stopped = time.monotonic()
    worker.behave()
    worst, report = render([worker.address], recipe, model)
    assert time.monotonic() - stopped < 2
    assert worst <= SAME
    assert report.forwards_split == 3
    _assert_nothing_left(before)


@pytest.mark.parametrize("error", [ValueError, Stopped])
def test_a_run_that_raised_leaves_nothing_behind(
    addresses: list[str], recipe: Recipe, model: ReferenceDiT, error: type[BaseException]
) -> None:
    def raises(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if len(x) == 2:  # this machine's share; the forward that proves the workers has 5 + 1 rows
            raise error
        return model(x, *args, **kwargs)

    before = _held()
    with pytest.raises(error):
        render(addresses, recipe, raises, batch=3)
    _assert_nothing_left(before)
    worst, report = render(addresses, recipe, model, batch=3)
    assert worst <= SAME
    assert report.forwards_split == 3


def test_an_error_in_conditionings_side_by_side_leaves_nothing_behind(
    addresses: list[str], recipe: Recipe, model: ReferenceDiT
) -> None:
    with open_session(addresses, recipe) as session:
        guided(model, 3, 1, session=session)
        before = _held()

        def fails() -> torch.Tensor:
            raise Stopped

        def waits() -> torch.Tensor:
            return session.forward(model, (torch.randn(1, 16, 8, 8), torch.ones(1)), {"context": torch.ones(1, 4, 32)})

        with pytest.raises(Stopped):
            session.conditionings([fails, waits, waits], list, (1, 16, 8, 8))
        assert threading.active_count() <= before[1]
        assert session.report.split == "conditionings"


def test_twenty_runs_of_alternating_size_hold_no_more_than_three(
    workers: list[Worker], recipe: Recipe, model: ReferenceDiT
) -> None:
    addresses = [worker.address for worker in workers[:2]]
    held = []
    for run in range(20):
        with open_session(addresses, recipe) as session:
            sample_once(session, model, batch=1 + run % 3, size=64 + 64 * (run % 2), tokens=64 * (1 + run % 2))
        assert session.report.forwards_split
        if run in (7, 19):
            held.append([_held(), *(worker.resources() for worker in workers[:2])])
    for early, late in zip(*held, strict=True):
        assert late[0] <= early[0] + 2
        assert late[1] <= early[1]
        assert late[2] <= early[2] + 24e6


def _held() -> tuple[int, int, int]:
    """(open file descriptors, threads, resident bytes) of this process."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return len(os.listdir("/proc/self/fd")), threading.active_count(), pages * os.sysconf("SC_PAGE_SIZE")


def _assert_nothing_left(before: tuple[int, int, int]) -> None:
    until(lambda: _held()[0] <= before[0] and _held()[1] <= before[1], "the driver to let go of its sockets", 3)
