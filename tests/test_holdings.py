"""Workers are told what this process does not need any more, soon and without holding anything up. Real workers."""

from __future__ import annotations

import gc
import os
import time

import pytest

from monarch_split.demo.reference import ReferenceDiT
from monarch_split.distributed import holdings, peers
from monarch_split.distributed.holdings import Holdings
from monarch_split.distributed.recipe import Recipe
from monarch_split.tests.driving import open_session, render, sample_once
from monarch_split.tests.worker_process import Forge, Worker, ended, until

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="workers run on Linux")


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Holdings:
    """What workers hold of this process, as long as the test runs."""
    fresh = Holdings()
    for module in (holdings, peers):
        monkeypatch.setattr(module, "holdings", fresh)
    monkeypatch.setattr(holdings, "_PAUSES", (0.2, 0.2, 0.2))
    return fresh


class Model:
    """Stands for a MODEL of ComfyUI: only whether it is still there counts. In a cycle, as those are."""

    def __init__(self) -> None:
        self.itself = self


def releases(worker: Worker, recipe: Recipe) -> int:
    return worker.log.splitlines().count(f"release {recipe.file.digest}")


def test_a_worker_hears_once_the_last_model_of_a_file_is_gone(
    worker: Worker, held: Holdings, recipe: Recipe, model: ReferenceDiT
) -> None:
    models = [Model(), Model()]
    held.follow(models[0], recipe.file.digest)
    held.follow(models[1], recipe.file.digest)
    render([worker.address], recipe, model)
    models.pop()
    gc.collect()
    time.sleep(0.5)
    assert releases(worker, recipe) == 0
    models.clear()
    gc.collect()
    until(lambda: releases(worker, recipe) == 1, "the worker to be told")
    assert render([worker.address], recipe, model)[1].forwards_split
    assert releases(worker, recipe) == 1


def test_a_run_is_told_of_before_it_loads_and_nobody_is_told_twice(
    worker: Worker, held: Holdings, recipe: Recipe, model: ReferenceDiT
) -> None:
    render([worker.address], recipe, model)
    worker.mark()
    # Nothing follows a model, so there is no thread that tells: the next run does.
    held.release()
    for _ in range(2):
        assert render([worker.address], recipe, model)[1].forwards_split
    said = [line for line in worker.log.splitlines() if line.startswith(("build", "release"))]
    assert said[1:] == [f"release {recipe.file.digest}", "build", "build"]


def test_a_busy_worker_is_told_when_it_is_idle(
    worker: Worker, held: Holdings, recipe: Recipe, model: ReferenceDiT
) -> None:
    kept = Model()
    held.follow(kept, recipe.file.digest)
    with open_session([worker.address], recipe) as session:
        sample_once(session, model)
        held.release()
        time.sleep(0.5)
        sample_once(session, model)
        assert releases(worker, recipe) == 0
        assert not session.report.events
    until(lambda: releases(worker, recipe) == 1, "the worker to be told")


def test_a_silent_worker_holds_nobody_up_and_is_told_when_it_is_back(
    worker: Worker, held: Holdings, recipe: Recipe, model: ReferenceDiT
) -> None:
    kept = Model()
    held.follow(kept, recipe.file.digest)
    render([worker.address], recipe, model)
    worker.freeze()
    began = time.monotonic()
    held.release()
    assert time.monotonic() - began < 0.5
    time.sleep(0.5)
    worker.thaw()
    until(lambda: releases(worker, recipe) == 1, "the worker to be told")


def test_workers_that_are_gone_are_no_error(
    forge: Forge, worker: Worker, held: Holdings, recipe: Recipe, model: ReferenceDiT
) -> None:
    kept = Model()
    held.follow(kept, recipe.file.digest)
    render([worker.address], recipe, model)
    worker.kill()
    held.release()
    time.sleep(0.5)
    with ended(successor := forge.worker(port=worker.port, cache=worker.cache)):
        assert render([successor.address], recipe, model)[1].forwards_split
