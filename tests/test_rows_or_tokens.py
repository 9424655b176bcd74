"""`auto` splits several rows by tokens where rows do not divide evenly and tokens are faster, and by rows elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from monarch_split.demo.reference import TINY, ReferenceDiT, slowed
from monarch_split.distributed import limits, split_tokens
from monarch_split.distributed.ledger import DRIVER
from monarch_split.distributed.plan import Costs
from monarch_split.distributed.recipe import Recipe
from monarch_split.distributed.report import Report
from monarch_split.tests.driving import SAME, difference, open_session, sample_once, three_workers
from monarch_split.tests.worker_process import Worker

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="workers run on Linux"),
    pytest.mark.timeout(60),
]

# Of a row with 64 tokens: 0.13 s on a machine that is left alone.
_SLOW = 0.001


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> list[Worker]:
    workers = three_workers(monkeypatch)
    for worker in workers:
        worker.behave(slow_token=_SLOW)
    return workers


@pytest.fixture
def slow_model() -> ReferenceDiT:
    """One whose forwards take as long as there are tokens in them, whatever else this machine is doing."""
    model = ReferenceDiT(TINY)
    slowed(model, _SLOW)
    return model


@pytest.fixture
def paces(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """paces(rows, worker=1.0): of a forward of so many rows, known exactly, whatever else this machine is doing."""
    stock = Costs.record_pace

    def fix(rows: int, worker: float = 1.0) -> None:
        def record(costs: Costs, node: str, size: float, _: float) -> None:
            pace = (1.0 if node == DRIVER else worker) / (1 if costs.proportional else rows)
            stock(costs, node, size, size / pace)

        monkeypatch.setattr(Costs, "record_pace", record)

    return fix


@pytest.fixture
def joins(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for each time that machines were joined for tokens."""
    calls: list[int] = []
    stock = split_tokens.probe
    monkeypatch.setattr(split_tokens, "probe", lambda *exchange: calls.append(1) or stock(*exchange))
    return calls


def auto(
    workers: list[Worker],
    recipe: Recipe,
    model: ReferenceDiT,
    *,
    steps: int = 8,
    cluster: Mapping[str, str] | None = None,
    **how: Any,
) -> tuple[list[str | None], Report]:
    """(what each step was split by, report) of a run whose latent is the right one."""
    by: list[str | None] = []
    addresses = [worker.address for worker in workers]
    with open_session(addresses, recipe, mode="auto", model=model, cluster=cluster) as session:
        latent = sample_once(
            session, model, steps=steps, size=128, on_step=lambda _: by.append(session.report.split), **how
        )
    assert difference(latent, sample_once(None, ReferenceDiT(TINY), steps=steps, size=128, **how)) <= SAME
    assert not session.report.events, session.report.line()
    return by, session.report


def test_three_rows_on_two_machines_are_split_by_tokens_after_rows_were_tried(
    workers: list[Worker], recipe: Recipe, slow_model: ReferenceDiT, paces: Callable[..., None], joins: list[int]
) -> None:
    paces(3)
    by, report = auto(workers[:1], recipe, slow_model, cfg=1.0, batch=3)
    # The first step proves the worker, the fourth measures this machine alone, the fifth proves the tokens.
    assert by[:5] == [None, "rows", "rows", "rows", "tokens"], report.line()
    assert report.split == "tokens"
    assert report.speedup is not None
    assert report.speedup > 1.2, report.line()
    by, report = auto(workers[:1], recipe, slow_model, cfg=1.0, batch=3, steps=2)
    assert by[0] == "tokens", report.line()
    assert len(joins) == 2


def test_two_rows_on_three_machines_are_split_by_tokens(
    workers: list[Worker], recipe: Recipe, slow_model: ReferenceDiT, paces: Callable[..., None]
) -> None:
    paces(2)
    by, report = auto(workers[:2], recipe, slow_model, cfg=4.0)
    assert "tokens" in by, report.line()
    assert len(report.tokens) == 3


def test_a_machine_too_slow_for_a_row_gets_tokens(
    workers: list[Worker], recipe: Recipe, slow_model: ReferenceDiT, paces: Callable[..., None]
) -> None:
    paces(2, worker=1 / 3)
    workers[0].behave(slow_token=3 * _SLOW)
    by, report = auto(workers[:1], recipe, slow_model, cfg=4.0)
    assert "tokens" in by, report.line()
    assert report.tokens["one"] < 0.35, report.line()


def test_rows_that_divide_evenly_are_never_tried_by_tokens(
    workers: list[Worker], recipe: Recipe, slow_model: ReferenceDiT, paces: Callable[..., None], joins: list[int]
) -> None:
    paces(2)
    by, _ = auto(workers[:1], recipe, slow_model, cfg=4.0)
    assert set(by[1:]) == {"rows"}
    assert not joins


def test_where_the_link_is_too_slow_for_tokens_rows_go_on_and_it_is_not_tried_again(
    workers: list[Worker],
    recipe: Recipe,
    slow_model: ReferenceDiT,
    paces: Callable[..., None],
    joins: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paces(3)
    stock = split_tokens.probe
    monkeypatch.setattr(split_tokens, "probe", lambda *exchange: (stock(*exchange)[0], 1e5))
    by, report = auto(workers[:1], recipe, slow_model, cfg=1.0, batch=3)
    assert set(by[1:]) == {"rows"}
    assert "would not be faster over this link" in report.line()
    by, _ = auto(workers[:1], recipe, slow_model, cfg=1.0, batch=3, steps=3)
    assert "tokens" not in by
    assert len(joins) == 1


def test_tokens_that_turn_out_slower_than_rows_are_given_up(
    workers: list[Worker],
    recipe: Recipe,
    slow_model: ReferenceDiT,
    paces: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paces(3)
    stock = split_tokens.TokenRun.forward
    calls: list[int] = []

    def slow(*args: Any, **how: Any) -> Any:
        calls.append(1)
        done = stock(*args, **how)
        return split_tokens.TokenForward(done.output, done.parts, 9.0, done.busy, done.waiting)

    monkeypatch.setattr(split_tokens.TokenRun, "forward", slow)
    _, report = auto(workers[:1], recipe, slow_model, cfg=1.0, batch=3, steps=10)
    # The first is the proof.
    assert len(calls) == 1 + limits.TRIAL_FORWARDS, report.line()


def test_three_rows_of_a_family_that_is_not_known_are_split_by_rows(
    workers: list[Worker],
    recipe: Recipe,
    slow_model: ReferenceDiT,
    paces: Callable[..., None],
    joins: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paces(3)
    monkeypatch.setattr("monarch_split.tests.driving.FAMILY", None)
    by, report = auto(workers[:1], recipe, slow_model, cfg=1.0, batch=3, steps=6)
    assert set(by[1:]) == {"rows"}
    assert "token" not in report.line()
    assert not joins


def test_an_approximate_split_does_not_take_the_place_of_an_exact_one(
    workers: list[Worker], recipe: Recipe, slow_model: ReferenceDiT, paces: Callable[..., None], joins: list[int]
) -> None:
    paces(3)
    by, report = auto(workers[:1], recipe, slow_model, cfg=1.0, batch=3, steps=6, cluster={"compress": "fp8"})
    assert set(by[1:]) == {"rows"}
    assert "approximate" not in report.line()
    assert not joins
