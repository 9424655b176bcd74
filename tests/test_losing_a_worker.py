"""A worker that dies or freezes, at whatever point, costs a run at most one forward; the next run is right again."""

from __future__ import annotations

import dataclasses
import os
import time

import pytest
import torch

from monarch_split.demo.reference import ReferenceDiT
from monarch_split.distributed import limits
from monarch_split.distributed.recipe import Recipe
from monarch_split.distributed.report import Report
from monarch_split.tests.driving import SAME, Stopped, open_session, render
from monarch_split.tests.faults import POINTS, Point
from monarch_split.tests.worker_process import Forge, Worker, ended

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="workers run on Linux"),
    pytest.mark.usefixtures("even_shares", "small_chunks"),
]

# Silence is noticed within two seconds; the rest is for a busy machine.
NOTICED = limits.HEARTBEAT_INTERVAL + limits.HEARTBEAT_TIMEOUT + 4.0


def _struck_run(point: Point, recipe: Recipe, model: ReferenceDiT) -> tuple[float, Report]:
    """A run that is struck at its point: (seconds from there to its end, report)."""
    worst, report = point.run(recipe, model)
    assert worst <= SAME
    assert point.struck_at is not None
    return time.monotonic() - point.struck_at, report


@pytest.mark.parametrize("at", POINTS)
def test_a_worker_killed_in_a_run_costs_one_forward(
    forge: Forge, worker: Worker, recipe: Recipe, model: ReferenceDiT, at: str
) -> None:
    point = Point(at, worker, worker.kill)
    seconds, report = _struck_run(point, recipe, model)
    assert seconds < NOTICED
    assert report.forwards_split == (1 if at == "between forwards" else 0)
    # While it is being connected to, a worker that dies is no different from another program.
    assert at == "connect" or f"the connection to the worker at {worker.address} was lost" in report.line()
    assert worker.address in report.line()
    if at != "connect":
        assert f"the render went on without it; have the worker at {worker.address} running again" in report.line()
    with ended(forge.worker(port=worker.port, cache=worker.cache)):
        worst, report = render([worker.address], recipe, model)
    assert worst <= SAME
    assert report.forwards_split == 2
    assert not report.events


@pytest.mark.parametrize("at", POINTS)
def test_a_worker_frozen_in_a_run_costs_one_forward_and_serves_again_once_it_thaws(
    worker: Worker, recipe: Recipe, model: ReferenceDiT, at: str
) -> None:
    point = Point(at, worker, worker.freeze)
    seconds, report = _struck_run(point, recipe, model)
    assert seconds < NOTICED
    assert report.forwards_split == (1 if at == "between forwards" else 0)
    assert worker.address in report.line()
    assert "lost" in report.line() or (at == "connect" and "does not answer" in report.line())
    worker.behave()
    worker.thaw()
    worst, report = render([worker.address], recipe, model)
    assert worst <= SAME
    assert report.forwards_split >= 2
    assert not report.events


def test_a_worker_frozen_before_a_run_is_named_as_one_that_does_not_answer(
    worker: Worker, recipe: Recipe, model: ReferenceDiT
) -> None:
    worker.freeze()
    began = time.monotonic()
    worst, report = render([worker.address], recipe, model)
    assert time.monotonic() - began < limits.HELLO_TIMEOUT + 1
    assert worst <= SAME
    assert "does not answer" in report.line()
    worker.thaw()
    worst, report = render([worker.address], recipe, model)
    assert worst <= SAME
    assert report.forwards_split == 2


def test_between_runs_a_worker_may_go_and_come_back(
    forge: Forge, worker: Worker, recipe: Recipe, model: ReferenceDiT
) -> None:
    render([worker.address], recipe, model)
    worker.kill()
    worst, report = render([worker.address], recipe, model)
    assert worst <= SAME
    assert report.line().startswith("One machine")
    assert f"nothing listens at {worker.address}; start the worker there" in report.line()
    with ended(forge.worker(port=worker.port, cache=worker.cache)):
        worst, report = render([worker.address], recipe, model)
    assert worst <= SAME
    assert report.forwards_split == 2


def test_one_of_three_lost_leaves_the_split_to_the_others(
    forge: Forge, worker: Worker, recipe: Recipe, model: ReferenceDiT
) -> None:
    others = [forge.worker("left"), forge.worker("right")]
    with ended(*others):
        point = Point("between forwards", worker, worker.kill)
        addresses = [worker.address, *(other.address for other in others)]
        worst, report = render(addresses, recipe, model, batch=3, steps=5, on_step=point.on_step)
    assert worst <= SAME
    assert report.forwards_split == 4
    assert set(report.rows) == {"this machine", "left", "right"}


def test_an_error_of_the_worker_is_named_and_its_share_computed_here(
    worker: Worker, recipe: Recipe, model: ReferenceDiT
) -> None:
    worker.behave(error="out of memory, or so")
    worst, report = render([worker.address], recipe, model)
    assert worst <= SAME
    assert report.line().startswith("One machine")
    assert "w: RuntimeError: out of memory, or so" in report.line()
    # In a forward that was split, too.
    worker.behave()
    worst, report = render(
        [worker.address],
        recipe,
        model,
        steps=4,
        on_step=lambda step: worker.behave(error="gone bad") if step == 2 else None,
    )
    assert worst <= SAME
    assert report.forwards_split == 1
    assert "w: RuntimeError: gone bad" in report.line()


@pytest.mark.parametrize(("mode", "cfg"), [("rows", 4.0), ("tokens", 1.0)], ids=["rows", "tokens"])
def test_a_worker_without_memory_for_the_model_says_so_once_and_is_asked_again_in_the_next_run(
    worker: Worker, recipe: Recipe, model: ReferenceDiT, mode: str, cfg: float
) -> None:
    worker.behave(build_error="tiny needs 9.9 GB of memory and 1.0 GB are available on the worker")
    worst, report = render([worker.address], recipe, model, mode=mode, cfg=cfg)
    assert worst <= SAME
    assert report.events == [
        "w: MemoryError: tiny needs 9.9 GB of memory and 1.0 GB are available on the worker",
    ]
    assert report.forwards_split == 0
    worker.behave()
    worst, report = render([worker.address], recipe, model, mode=mode, cfg=cfg)
    assert worst <= SAME
    assert report.forwards_split == 2
    assert not report.events


def test_an_interrupt_while_the_file_is_sent_leaves_nothing_half_written(
    worker: Worker, recipe: Recipe, model: ReferenceDiT
) -> None:
    def stop(done: int, total: int) -> None:
        if 0 < done < total:
            raise Stopped

    with pytest.raises(Stopped):
        render([worker.address], recipe, model, progress=stop)
    worst, report = render([worker.address], recipe, model)
    assert worst <= SAME
    assert report.forwards_split == 2
    assert [path.name for path in worker.cache.glob("*.part")] == []


def test_an_interrupt_in_the_middle_of_a_send_frees_the_worker(
    worker: Worker, recipe: Recipe, model: ReferenceDiT, monkeypatch: pytest.MonkeyPatch
) -> None:
    render([worker.address], recipe, model)
    big = torch.zeros(2, 64 * limits.MIB // 4)
    # Queues that are full at once, towards a worker that reads nothing for a moment.
    monkeypatch.setattr(limits, "LANE_QUEUE_MESSAGES", 1)
    monkeypatch.setattr(limits, "RUN_TENSOR_CACHE_BYTES", 0)
    frozen = []

    def check() -> None:
        if frozen:
            raise Stopped

    def interrupted() -> None:
        with open_session([worker.address], recipe, check=check) as session:
            session.forward(model, (torch.zeros(2, 16, 8, 8), torch.ones(2)), {"context": torch.zeros(2, 4, 32)})
            worker.freeze()
            frozen.append(True)
            session.forward(model, (big, torch.ones(2)), {"context": torch.zeros(2, 4, 32)})

    with pytest.raises(Stopped):
        interrupted()
    worker.thaw()
    began = time.monotonic()
    worst, report = render([worker.address], recipe, model)
    assert time.monotonic() - began < 2
    assert worst <= SAME
    assert report.forwards_split == 3


def test_a_recipe_whose_file_changed_meanwhile_is_not_computed_with(
    worker: Worker, recipe: Recipe, model: ReferenceDiT
) -> None:
    wrong = dataclasses.replace(recipe, file=dataclasses.replace(recipe.file, digest="0" * 40))
    worst, report = render([worker.address], wrong, model)
    assert worst <= SAME
    assert report.forwards_split == 0
    assert "changed while it was sent; render again" in report.line()
    assert list(worker.cache.glob("*.safetensors")) == []
