"""`auto` is never slower than one machine for longer than it takes to find out, and unlike machines gain, too.

Real workers; forwards that sleep for each token take the same time whatever else this machine is doing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from monarch_split.demo.reference import TINY, ReferenceDiT, slowed
from monarch_split.distributed import limits
from monarch_split.distributed.recipe import Recipe
from monarch_split.distributed.report import Report
from monarch_split.tests.driving import SAME, forget, open_session, render, sample_once, three_workers
from monarch_split.tests.network_proxy import NetworkProxy, network_to
from monarch_split.tests.worker_process import Forge, Worker, ended, until

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="workers run on Linux"),
    pytest.mark.timeout(60),
    pytest.mark.usefixtures("one_thread"),
]

# A row of 16 tokens takes 32 ms: half a forward of two is less than the way to the worker and back.
_SLOW = 0.001
_ROUND_TRIP = 0.05
_BYTES_PER_SECOND = 125e6

ROWS = {"cfg": 4.0}
TOKENS = {"cfg": 1.0}


@pytest.fixture
def slow_model() -> ReferenceDiT:
    return _slow_model(_SLOW)


def _slow_model(seconds: float) -> ReferenceDiT:
    model = ReferenceDiT(TINY)
    slowed(model, seconds)
    return model


@pytest.fixture
def far_worker(worker: Worker, recipe: Recipe) -> Iterator[tuple[Worker, NetworkProxy]]:
    """A worker that holds the model, and the way to it: a gigabit link over 50 ms."""
    # Forwards of a kind of their own, so that nothing is known of what others cost.
    render([worker.address], recipe, ReferenceDiT(TINY), steps=1, batch=3)
    worker.behave(slow_token=_SLOW)
    with network_to(worker.port) as network:
        network.delay(_ROUND_TRIP)
        network.throttle(_BYTES_PER_SECOND)
        yield worker, network


def auto(address: str, recipe: Recipe, model: ReferenceDiT, **how: Any) -> Report:
    worst, report = render([address], recipe, model, mode="auto", **how)
    assert worst <= SAME
    assert not report.events, report.line()
    return report


def test_rows_of_short_forwards_are_not_split_over_a_far_link_for_more_than_the_trial(
    far_worker: tuple[Worker, NetworkProxy], recipe: Recipe, slow_model: ReferenceDiT
) -> None:
    worker, network = far_worker
    report = auto(network.address, recipe, slow_model, steps=8, **ROWS)
    assert report.forwards_split == limits.TRIAL_FORWARDS
    assert "splitting is not faster here" in report.line()
    worker.mark()
    report = auto(network.address, recipe, slow_model, steps=3, **ROWS)
    assert report.forwards_split == 0
    assert "splitting is not faster here" in report.line()
    assert not worker.reached("forward")


def test_tokens_of_short_forwards_are_not_sent_over_a_far_link_at_all(
    far_worker: tuple[Worker, NetworkProxy], recipe: Recipe, slow_model: ReferenceDiT
) -> None:
    worker, network = far_worker
    worker.mark()
    for steps in (8, 3):
        report = auto(network.address, recipe, slow_model, steps=steps, **TOKENS)
        assert report.forwards_split == 0
        assert "a token split would not be faster over this link" in report.line()
    assert not worker.reached("forward")


def test_what_was_found_of_one_link_is_not_held_against_another(
    far_worker: tuple[Worker, NetworkProxy], recipe: Recipe, slow_model: ReferenceDiT
) -> None:
    worker, network = far_worker
    auto(network.address, recipe, slow_model, steps=6, **ROWS)
    report = auto(worker.address, recipe, slow_model, steps=8, **ROWS)
    assert report.forwards_split > limits.TRIAL_FORWARDS
    assert "not faster" not in report.line()
    report = auto(network.address, recipe, slow_model, steps=2, **ROWS)
    assert report.forwards_split == 0


@pytest.mark.parametrize("how", [ROWS, TOKENS], ids=["rows", "tokens"])
def test_tiny_renders_are_not_split_even_on_this_machine_for_more_than_the_trial(
    worker: Worker, recipe: Recipe, model: ReferenceDiT, how: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    render([worker.address], recipe, model, steps=1)
    report = auto(worker.address, recipe, model, steps=12, size=32, **how)
    for _ in range(2):
        if report.forwards_split > limits.TRIAL_FORWARDS:
            # Other work on this machine came upon the one forward that it computed alone.
            forget(monkeypatch)
            report = auto(worker.address, recipe, model, steps=12, size=32, **how)
    assert report.forwards_split <= limits.TRIAL_FORWARDS, report.line()
    assert "faster" in report.line()
    worker.mark()
    report = auto(worker.address, recipe, model, steps=3, size=32, **how)
    assert report.forwards_split == 0
    assert "faster" in report.line()
    assert not worker.reached("forward")


def test_a_worker_that_joins_later_is_tried_though_the_others_did_not_pay(
    forge: Forge, worker: Worker, recipe: Recipe, slow_model: ReferenceDiT
) -> None:
    worker.kill()
    with ended(far_too_slow := forge.worker("slow")):
        far_too_slow.behave(slow=0.3)
        addresses = [far_too_slow.address, worker.address]
        with open_session(addresses, recipe, mode="auto", model=slow_model) as session:
            sample_once(session, slow_model, steps=8)
            split = session.report.forwards_split
            assert split <= limits.TRIAL_FORWARDS
            assert "splitting is not faster here" in session.report.line()
            with ended(forge.worker(port=worker.port, cache=worker.cache)):

                def is_tried() -> bool:
                    sample_once(session, slow_model, steps=1)
                    return session.report.forwards_split > split

                until(is_tried, "a forward that is split again")
            assert "joined in the middle of the run" in session.report.line()


# So that what these machines compute besides does not count, nor what else they do.
_SLOWER = 0.002


@pytest.fixture
def half_as_fast(monkeypatch: pytest.MonkeyPatch) -> Worker:
    worker = three_workers(monkeypatch)[0]
    worker.behave(slow_token=2 * _SLOWER)
    return worker


def _is_predicted_and_measured(report: Report) -> None:
    assert report.speedup is not None
    assert report.predicted is not None
    assert report.speedup >= 1.3, report.line()
    assert report.predicted == pytest.approx(1.5, abs=0.25)
    assert report.line().startswith(f"{report.speedup:.2f}x on 2 machines by ")
    assert f"({report.predicted:.2f}x predicted)" in report.line()


def test_a_machine_half_as_fast_gets_two_rows_of_six(half_as_fast: Worker, recipe: Recipe) -> None:
    model, six = _slow_model(_SLOWER), {"cfg": 1.0, "batch": 6}
    report = auto(half_as_fast.address, recipe, model, steps=8, **six)
    assert report.rows == {"this machine": 4, "one": 2}
    # As if the machines were alike.
    assert report.predicted == 2.0
    report = auto(half_as_fast.address, recipe, model, steps=4, **six)
    assert report.rows == {"this machine": 4, "one": 2}
    assert report.forwards_split == report.forwards
    _is_predicted_and_measured(report)


def test_a_machine_half_as_fast_gets_a_third_of_the_tokens(half_as_fast: Worker, recipe: Recipe) -> None:
    model, large = _slow_model(_SLOWER), {"cfg": 1.0, "size": 128}
    report = auto(half_as_fast.address, recipe, model, steps=8, **large)
    assert report.tokens["one"] == pytest.approx(1 / 3, abs=0.06), report.line()
    assert report.predicted == pytest.approx(2.0, abs=0.25)
    report = auto(half_as_fast.address, recipe, model, steps=4, **large)
    assert report.tokens["one"] == pytest.approx(1 / 3, abs=0.06), report.line()
    assert report.forwards_split == report.forwards
    _is_predicted_and_measured(report)
