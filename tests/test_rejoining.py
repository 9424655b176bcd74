"""A worker that was lost takes part again as soon as it is there, in the same run, and is looked for without delay."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from monarch_split.demo.reference import ReferenceDiT
from monarch_split.distributed import limits
from monarch_split.distributed.recipe import Recipe
from monarch_split.distributed.session import Session
from monarch_split.tests.driving import SAME, difference, open_session, render, sample_once
from monarch_split.tests.network_proxy import network_to
from monarch_split.tests.worker_process import Forge, Worker, ended, until

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="workers run on Linux"),
    pytest.mark.timeout(60),
    pytest.mark.usefixtures("even_shares"),
]

SILENCE = limits.HEARTBEAT_INTERVAL + limits.HEARTBEAT_TIMEOUT
BOUND = 20.0
SPLITS = pytest.mark.parametrize(("mode", "cfg"), [("rows", 4.0), ("tokens", 1.0)], ids=["rows", "tokens"])


class LongRun:
    """One run of as many forwards as it takes, each of which is compared with the same one computed here."""

    def __init__(self, session: Session, model: ReferenceDiT, cfg: float) -> None:
        self._session, self._model, self._cfg = session, model, cfg
        self._expected = sample_once(None, model, cfg=cfg, steps=1)
        self.report = session.report
        self.slowest = 0.0

    def step(self) -> None:
        began = time.monotonic()
        latent = sample_once(self._session, self._model, cfg=self._cfg, steps=1)
        self.slowest = max(self.slowest, time.monotonic() - began)
        assert difference(latent, self._expected) <= SAME

    def until(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + BOUND
        while not condition():
            assert time.monotonic() < deadline, self.report.as_dict()
            self.step()
            time.sleep(0.02)

    def until_split(self) -> None:
        before = self.report.forwards_split
        self.until(lambda: self.report.forwards_split > before)

    def until_said(self, words: str) -> None:
        self.until(lambda: any(words in event for event in self.report.events))


@SPLITS
def test_a_worker_that_is_started_again_rejoins_the_running_render(
    forge: Forge, worker: Worker, recipe: Recipe, model: ReferenceDiT, mode: str, cfg: float
) -> None:
    with open_session([worker.address], recipe, mode=mode, model=model) as session:
        run = LongRun(session, model, cfg)
        run.until_split()
        worker.kill()
        run.until_said("was lost")
        with ended(forge.worker(port=worker.port, cache=worker.cache)):
            run.until_said("w is back")
            run.until_split()
    assert run.report.events == [f"w: the connection to the worker at {worker.address} was lost", "w is back"]


def test_a_worker_that_thaws_rejoins_the_running_render(worker: Worker, recipe: Recipe, model: ReferenceDiT) -> None:
    with open_session([worker.address], recipe) as session:
        run = LongRun(session, model, 4.0)
        run.until_split()
        worker.freeze()
        run.until_said("was lost")
        run.slowest = 0.0
        # Meanwhile an attempt to connect is under way, which takes longer than this to fail.
        lost = time.monotonic()
        run.until(lambda: time.monotonic() - lost > 1.2)
        assert run.slowest < 0.8
        worker.thaw()
        run.until_said("w is back")
        run.until_split()
    assert len(run.report.events) == 2, run.report.events


def test_a_worker_that_is_started_late_joins_in_the_middle(
    forge: Forge, worker: Worker, recipe: Recipe, model: ReferenceDiT
) -> None:
    worker.kill()
    with open_session([worker.address], recipe) as session:
        run = LongRun(session, model, 4.0)
        run.step()
        assert "start the worker there" in run.report.line()
        with ended(forge.worker(port=worker.port, cache=worker.cache)):
            run.until_said("w joined in the middle of the run")
            run.until_split()


def test_of_two_workers_one_is_back_and_all_three_machines_share_again(
    forge: Forge, worker: Worker, recipe: Recipe, model: ReferenceDiT
) -> None:
    with ended(other := forge.worker("other")), open_session([worker.address, other.address], recipe) as session:

        def step() -> None:
            sample_once(session, model, batch=3, steps=1)
            time.sleep(0.02)

        def until_shared_by(*names: str) -> None:
            deadline = time.monotonic() + BOUND
            while set(session.report.rows) != {"this machine", *names}:
                assert time.monotonic() < deadline, session.report.line()
                step()

        until_shared_by("w", "other")
        worker.freeze()
        until_shared_by("other")
        worker.thaw()
        until_shared_by("w", "other")


def test_an_error_in_a_forward_gets_one_more_chance(
    worker: Worker, recipe: Recipe, model: ReferenceDiT, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "REJOIN_FAILED_SECONDS", 0.1)
    with open_session([worker.address], recipe) as session:
        run = LongRun(session, model, 4.0)
        run.until_split()
        worker.behave(error="no memory")
        run.until_said("no memory")
        worker.behave()
        run.until_said("w is back")
        run.until_split()
        worker.behave(error="no memory again")
        run.until_said("no memory again")
        worker.behave()
        split = run.report.forwards_split
        lost = time.monotonic()
        run.until(lambda: time.monotonic() - lost > 0.5)
        assert run.report.forwards_split == split


def test_a_worker_that_computes_something_else_is_not_asked_again(
    worker: Worker, recipe: Recipe, model: ReferenceDiT, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "REJOIN_FAILED_SECONDS", 0.05)
    worker.behave(noise=1.0)
    with open_session([worker.address], recipe) as session:
        run = LongRun(session, model, 4.0)
        run.until_said("computes something else")
        worker.behave()
        began = time.monotonic()
        run.until(lambda: time.monotonic() - began > 0.5)
    assert run.report.forwards_split == 0


def test_silent_addresses_cost_the_first_run_only_and_several_no_more_than_one(
    forge: Forge, worker: Worker, recipe: Recipe, model: ReferenceDiT, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ABSENT_GRACE_SECONDS", 0.1)
    with ended(other := forge.worker("other")):
        for each in (worker, other):
            each.freeze()
        seconds = []
        for _ in range(4):
            with open_session([worker.address, other.address], recipe) as session:
                began = time.monotonic()
                session.start()
                seconds.append(time.monotonic() - began)
                LongRun(session, model, 4.0).step()
            assert session.report.line().count("does not answer") == 2
    assert 1.0 < seconds[0] < 1.5 * limits.CONNECT_TIMEOUT
    assert sum(seconds[1:]) < seconds[0] / 2
    worker.thaw()
    with open_session([worker.address], recipe) as session:
        LongRun(session, model, 4.0).until_split()
    worst, report = render([worker.address], recipe, model)
    assert worst <= SAME
    assert report.forwards_split == 3
    assert not report.events


def test_looking_for_a_worker_ends_with_the_run(worker: Worker, recipe: Recipe, model: ReferenceDiT) -> None:
    def looking() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("monarch-join")]

    with network_to(worker.port) as network:
        render([network.address], recipe, model)
        network.pull_the_cable()
        for _ in range(4):
            render([network.address], recipe, model)
        assert len(looking()) <= 4
        until(lambda: not looking(), "the threads to end", limits.CONNECT_TIMEOUT + 2)
    assert threading.active_count() < 20


def test_two_names_of_one_worker_are_told_and_it_takes_one_share(
    worker: Worker, recipe: Recipe, model: ReferenceDiT
) -> None:
    with network_to(worker.port) as network:
        worst, report = render([worker.address, network.address], recipe, model, batch=2)
    assert worst <= SAME
    assert set(report.rows) == {"this machine", "w"}
    assert len(report.events) == 1
    assert "are one and the same worker; name it once" in report.events[0]


def test_a_run_that_ends_while_a_worker_rejoins_leaves_it_idle(
    worker: Worker, recipe: Recipe, model: ReferenceDiT
) -> None:
    with open_session([worker.address], recipe) as session:
        run = LongRun(session, model, 4.0)
        run.until_split()
        worker.freeze()
        run.until_said("was lost")
        worker.thaw()
        time.sleep(0.2)
    worst, report = render([worker.address], recipe, model)
    assert worst <= SAME
    assert report.forwards_split == 3, report.line()
    assert worker.end(signal.SIGTERM) == 0
