"""What ComfyUI here does not hold any more, a worker lets go of, too; what only makes room here it keeps."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytestmark = [pytest.mark.comfyui, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def worker(start_worker: Callable[..., Any]) -> Iterator[Any]:
    """A worker that hears of no other test's models."""
    with start_worker(name="second") as running:
        yield running


@pytest.fixture
def let_go(worker: Any) -> Callable[[], int]:
    """How many models the worker has let go of in this test."""
    before = worker.output.count("Let go of 1 model")
    return lambda: worker.output.count("Let go of 1 model") - before


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        gc.collect()
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def test_a_model_that_is_forgotten_here_is_let_go_of_and_others_are_kept(
    idle_driver: Any, worker: Any, let_go: Callable[[], int], tiny: Callable[..., Any]
) -> None:
    idle_driver.use(worker.address)
    kept = tiny("sd3")
    kept.sample(idle_driver.split(kept.model), cfg=4.0)
    idle_driver.assert_split()
    # The same file twice: the worker has it once, and needs it as long as one of the two is here.
    twice = [tiny("flux_schnell"), tiny("flux_schnell")]
    for index in range(2):
        twice[index].sample(idle_driver.split(twice[index].model), cfg=4.0)
        idle_driver.assert_split()
    twice.pop()
    gc.collect()
    time.sleep(0.5)
    assert let_go() == 0
    twice.clear()
    wait_until(lambda: let_go() == 1)
    kept.sample(idle_driver.split(kept.model), cfg=4.0)
    idle_driver.assert_split()
    assert let_go() == 1
    del kept
    wait_until(lambda: let_go() == 2)


def test_unloading_within_a_prompt_makes_room_here_only(
    idle_driver: Any, worker: Any, let_go: Callable[[], int], tiny: Callable[..., Any]
) -> None:
    import comfy.model_management as model_management
    from comfy_execution.utils import CurrentNodeContext

    idle_driver.use(worker.address)
    it = tiny("flux_schnell")
    split = idle_driver.split(it.model)
    it.sample(split, cfg=4.0)
    with CurrentNodeContext("prompt", "node"):
        model_management.unload_all_models()
    time.sleep(0.5)
    assert let_go() == 0
    it.sample(split, cfg=4.0)
    # The clone that was sampled is gone, as the one of a Monarch Sampler is.
    del split
    gc.collect()
    model_management.unload_all_models()
    wait_until(lambda: let_go() == 1)
