"""Shares follow the pace of each machine, and a split that does not pay is dropped. Real workers."""

from __future__ import annotations

import itertools
import os
import time
from typing import Any

import pytest
import torch

from monarch_split.demo.reference import TINY, ReferenceDiT, slowed
from monarch_split.distributed import limits
from monarch_split.distributed.recipe import Recipe
from monarch_split.tests.driving import SAME, open_session, render, sample_once, three_workers
from monarch_split.tests.worker_process import Worker

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="workers run on Linux"),
    pytest.mark.usefixtures("one_thread"),
]


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> list[Worker]:
    return three_workers(monkeypatch)


def test_a_slow_worker_gets_fewer_rows_and_is_waited_for(
    workers: list[Worker], recipe: Recipe, model: ReferenceDiT
) -> None:
    def at_pace(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        time.sleep(0.02 * len(x))
        return model(x, *args, **kwargs)

    workers[0].behave(slow=0.2)
    worst, report = render([workers[0].address], recipe, at_pace, batch=5, steps=6)
    assert worst <= SAME
    assert 0 < report.rows["one"] < report.rows["this machine"]
    # Longer than any limit on silence.
    workers[0].behave(slow=2.5)
    worst, report = render([workers[0].address], recipe, at_pace, batch=5, steps=1)
    assert worst <= SAME
    assert report.forwards_split == 1
    assert report.waiting > 2
    assert not report.events


@pytest.mark.parametrize(
    ("mode", "how"),
    [("auto", {"batch": 6}), ("rows", {"batch": 6}), ("auto", {"size": 128}), ("tokens", {"size": 128})],
    ids=["auto, rows", "rows", "auto, tokens", "tokens"],
)
def test_a_machine_that_slows_down_in_the_middle_of_a_run_gets_less_within_a_few_steps(
    workers: list[Worker], recipe: Recipe, mode: str, how: dict[str, Any]
) -> None:
    # Of a single image, so much that what else the machine does is little beside it.
    model, slow, seen = ReferenceDiT(TINY), 0.004 if "size" in how else 0.002, []
    slowed(model, slow)
    workers[0].behave(slow_token=slow)
    render([workers[0].address], recipe, model, mode=mode, steps=6, cfg=1.0, **how)

    def on_step(step: int) -> None:
        given = session.report.rows or session.report.tokens
        seen.append(given["one"] / sum(given.values()))
        if step == 1:
            workers[0].behave(slow_token=2 * slow)

    with open_session([workers[0].address], recipe, mode=mode, model=model) as session:
        sample_once(session, model, steps=7, cfg=1.0, on_step=on_step, **how)
    assert seen[0] == pytest.approx(1 / 2, abs=0.07)
    assert seen[-1] == pytest.approx(1 / 3, abs=0.07), session.report.line()


@pytest.mark.parametrize("cold", [0.0, 0.4])
def test_auto_stops_a_split_that_does_not_pay_and_says_so(
    workers: list[Worker], recipe: Recipe, model: ReferenceDiT, cold: float
) -> None:
    pauses = itertools.chain([cold], itertools.repeat(0.01))

    def warms_up(*args: Any, **kwargs: Any) -> torch.Tensor:
        time.sleep(next(pauses))
        return model(*args, **kwargs)

    workers[0].behave(slow=0.4)
    _, report = render([workers[0].address], recipe, warms_up, mode="auto", steps=12)
    assert report.forwards_split <= 3
    assert "splitting is not faster here" in report.line()
    _, report = render([workers[0].address], recipe, warms_up, mode="auto", steps=4)
    assert report.forwards_split == 0
    assert report.line().startswith("One machine")
    assert "splitting is not faster here" in report.line()


def test_auto_goes_on_with_a_split_that_pays(addresses: list[str], recipe: Recipe, model: ReferenceDiT) -> None:
    def slow(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        time.sleep(0.12 * len(x))
        return model(x, *args, **kwargs)

    _, report = render(addresses[:1], recipe, slow, mode="auto", steps=12, batch=2)
    assert report.forwards_split >= 6
    assert report.speedup is not None
    assert report.speedup > 1.2
    assert "x predicted): " in report.line()


def test_auto_gives_no_rows_to_a_worker_that_is_far_too_slow(
    workers: list[Worker], recipe: Recipe, model: ReferenceDiT, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The verdict on the whole split would come first.
    monkeypatch.setattr(limits, "WORTHWHILE_RATIO", float("inf"))
    # So slow that a busy driver is still much faster.
    workers[0].behave(slow=1.5)
    _, report = render([workers[0].address], recipe, model, mode="auto", steps=40)
    assert 2 <= report.forwards_split <= 4
    assert "too slow" in report.line()


def test_rows_mode_splits_even_with_a_worker_that_is_far_too_slow(
    workers: list[Worker], recipe: Recipe, model: ReferenceDiT
) -> None:
    workers[0].behave(slow=0.3)
    worst, report = render([workers[0].address], recipe, model, steps=6)
    assert worst <= SAME
    assert report.forwards_split == 5
