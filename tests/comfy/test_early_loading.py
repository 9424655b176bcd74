"""A worker begins to load when the loader node runs, and the render that follows never waits longer for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from monarch_split.tests.worker_process import until

pytestmark = [pytest.mark.comfyui, pytest.mark.timeout(120)]

SAMPLES = {"9": {"class_type": "MonarchSampler", "inputs": {"split": "auto"}}}
THREAD = "monarch-early-loading"


@pytest.fixture
def worker(start_worker: Callable[..., Any]) -> Iterator[Any]:
    """A worker that has no file yet."""
    with start_worker(name="second") as running:
        yield running


def under_way() -> bool:
    return any(thread.name == THREAD for thread in threading.enumerate())


def test_a_worker_has_loaded_before_the_first_step(idle_driver: Any, worker: Any, tiny: Callable[..., Any]) -> None:
    from monarch_split.nodes.early_loading import load_early

    idle_driver.use(worker.address)
    it = tiny("flux_schnell")
    load_early(it.model, SAMPLES)
    until(lambda: "is ready after" in worker.output, "the early load")
    until(lambda: not under_way(), "the end of the early load")
    it.sample(idle_driver.split(it.model), cfg=4.0)
    idle_driver.assert_split()
    assert worker.output.count("Receiving") == 1


def test_a_render_goes_on_with_what_has_arrived_of_a_file(
    idle_driver: Any, worker: Any, tiny: Callable[..., Any]
) -> None:
    from monarch_split.nodes.early_loading import load_early
    from monarch_split.tests.network_proxy import network_to

    it = tiny("flux_schnell", scale="deep")
    with network_to(int(worker.address.rpartition(":")[2])) as network:
        idle_driver.use(network.address)
        size = it.path.stat().st_size
        network.throttle(size / 4)
        load_early(it.model, SAMPLES)
        until(lambda: "Receiving" in worker.output, "the sending")
        time.sleep(1.0)
        assert under_way(), "the file was sent too soon for this test"
        network.throttle(20 * size)
        it.sample(idle_driver.split(it.model), cfg=4.0)
    idle_driver.assert_split()
    assert worker.output.count("Receiving") == 2
    assert "are here" in worker.output
    assert not under_way()


def test_a_worker_that_is_not_there_delays_neither_the_node_nor_the_render_twice(
    idle_driver: Any, tiny: Callable[..., Any]
) -> None:
    from monarch_split.nodes.early_loading import load_early

    idle_driver.use("127.0.0.1:9")
    it = tiny("flux_schnell")
    load_early(it.model, SAMPLES)
    it.sample(idle_driver.split(it.model), cfg=4.0)
    assert not idle_driver.report.forwards_split
    assert any("127.0.0.1:9" in event for event in idle_driver.report.events), idle_driver.report.line()
    until(lambda: not under_way(), "the end of the early load")


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        {"1": {"class_type": "KSampler", "inputs": {}}},
        {"1": {"class_type": "MonarchSampler", "inputs": {"split": "off"}}},
    ],
)
def test_nothing_is_loaded_for_a_prompt_that_splits_nothing(
    idle_driver: Any, worker: Any, tiny: Callable[..., Any], prompt: Any
) -> None:
    from monarch_split.nodes.early_loading import load_early

    idle_driver.use(worker.address)
    load_early(tiny("flux_schnell").model, prompt)
    assert not under_way()
