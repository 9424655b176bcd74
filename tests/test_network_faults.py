"""A network that is cut, half cut, slow or reset: the render is right, and silence is noticed within two seconds.

Real workers behind a proxy that breaks what goes through it, at each point of a run and between runs. Lost packets are
test_lossy_network's business, workers that die or freeze test_losing_a_worker's.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from monarch_split.demo.reference import ReferenceDiT
from monarch_split.distributed import limits
from monarch_split.distributed.recipe import Recipe
from monarch_split.distributed.report import Report
from monarch_split.tests.driving import SAME, equal_shares, forget, open_session, render, sample_once
from monarch_split.tests.faults import POINTS, STEPS, Point
from monarch_split.tests.network_proxy import TO_DRIVER, TO_WORKER, NetworkProxy, network_to, port_with_a_neighbour
from monarch_split.tests.worker_process import Forge, Worker, ended

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="workers run on Linux"),
    pytest.mark.timeout(60),
    pytest.mark.usefixtures("even_shares", "small_chunks"),
]

# Silence is noticed within two seconds; the rest is for a busy machine.
NOTICED = limits.HEARTBEAT_INTERVAL + limits.HEARTBEAT_TIMEOUT + 4.0
SPLITS = pytest.mark.parametrize(("mode", "cfg"), [("rows", 4.0), ("tokens", 1.0)], ids=["rows", "tokens"])


@pytest.fixture
def network(worker: Worker) -> Iterator[NetworkProxy]:
    with network_to(worker.port) as made:
        yield made


FAULTS = {
    "cable pulled": NetworkProxy.pull_the_cable,
    "nothing to the worker": lambda network: network.drop(TO_WORKER),
    "nothing from the worker": lambda network: network.drop(TO_DRIVER),
    "reset": NetworkProxy.reset,
}


@pytest.mark.parametrize("at", ["file", "load", "forward", "between steps"])
def test_faults_in_a_run_are_noticed_and_cost_one_forward(
    forge: Forge, worker: Worker, recipe: Recipe, model: ReferenceDiT, at: str
) -> None:
    struck: list[float] = []
    with contextlib.ExitStack() as stack:
        # A worker for each fault, and all faults at once: what takes time is silence.
        workers = [stack.enter_context(_ended(forge.worker(fault, port=port_with_a_neighbour()))) for fault in FAULTS]
        networks = {
            fault: stack.enter_context(network_to(each.port)) for fault, each in zip(FAULTS, workers, strict=True)
        }

        def strike(now: str) -> None:
            if now == at and not struck:
                for fault, network in networks.items():
                    FAULTS[fault](network)
                struck.append(time.monotonic())
                # One whose connection was only reset may be back at once.
                for each in workers:
                    each.behave()

        def check() -> None:
            if all(each.reached({"load": "build", "forward": "forward"}.get(at, "never")) for each in workers):
                strike(at)

        for each in workers:
            each.behave(build=20 if at == "load" else 0, slow=20 if at == "forward" else 0)
        worst, report = render(
            [network.address for network in networks.values()],
            recipe,
            model,
            batch=3,
            steps=4,
            check=check,
            progress=lambda *_: strike("file"),
            on_step=lambda step: strike("between steps") if step == 2 else None,
        )
        assert worst <= SAME
        assert struck, "the run never got there"
        assert time.monotonic() - struck[0] < NOTICED
        for network in networks.values():
            assert f"the connection to the worker at {network.address} was lost" in report.line()
        # Then all of them serve this driver again once the network is whole.
        for network in networks.values():
            network.heal()
        _all_share_again([network.address for network in networks.values()], recipe, model)


@pytest.mark.parametrize("at", ["connect", "between runs"])
def test_faults_before_a_run_has_its_workers_leave_it_to_this_machine(
    forge: Forge, recipe: Recipe, model: ReferenceDiT, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    forget(monkeypatch)
    with contextlib.ExitStack() as stack:
        networks = {}
        for fault in FAULTS:
            each = stack.enter_context(_ended(forge.worker(fault, port=port_with_a_neighbour())))
            networks[fault] = stack.enter_context(network_to(each.port))
        addresses = [network.address for network in networks.values()]
        struck: list[float] = []

        def strike() -> None:
            if not struck:
                for fault, network in networks.items():
                    FAULTS[fault](network)
                struck.append(time.monotonic())

        if at == "between runs":
            assert render(addresses, recipe, model, batch=3)[1].forwards_split == 2
            strike()
        began = time.monotonic()
        worst, report = render(addresses, recipe, model, batch=3, check=strike)
        # An answer to the first word is waited for a little longer than for a sign of life.
        assert time.monotonic() - began < max(NOTICED, limits.HELLO_TIMEOUT + 3)
        assert worst <= SAME
        assert struck
        for fault, network in networks.items():
            # Nothing keeps one from being reached whose connections were reset.
            said = [event for event in report.events if network.address in event and "the render went on" not in event]
            assert len(said) == 1 or (fault == "reset" and not said), report.events
            network.heal()
        _all_share_again(addresses, recipe, model)


@contextlib.contextmanager
def _ended(worker: Worker) -> Iterator[Worker]:
    with ended(worker):
        yield worker


def _all_share_again(addresses: list[str], recipe: Recipe, model: ReferenceDiT) -> None:
    """The next run is split over all of them, at once or after its first steps."""
    with open_session(addresses, recipe) as session:
        deadline = time.monotonic() + NOTICED
        while len(session.report.rows) < 1 + len(addresses):
            assert time.monotonic() < deadline, session.report.line()
            sample_once(session, model, batch=3, steps=1)
            time.sleep(0.02)


def test_a_cable_that_is_out_before_a_run_is_one_sentence(
    network: NetworkProxy, recipe: Recipe, model: ReferenceDiT
) -> None:
    render([network.address], recipe, model)
    network.pull_the_cable()
    began = time.monotonic()
    worst, report = render([network.address], recipe, model)
    assert time.monotonic() - began < NOTICED
    assert worst <= SAME
    assert report.line().startswith("One machine")
    assert len(report.events) == 1
    assert network.address in report.events[0]
    network.heal()
    _all_share_again([network.address], recipe, model)


def test_a_cable_that_is_pulled_and_put_back_brings_the_worker_back(
    network: NetworkProxy, recipe: Recipe, model: ReferenceDiT
) -> None:
    with open_session([network.address], recipe, mode="tokens", model=model) as session:
        deadline = time.monotonic() + 20

        def step_until_split(forwards: int) -> None:
            while session.report.forwards_split < forwards:
                assert time.monotonic() < deadline, session.report.line()
                sample_once(session, model, cfg=1.0, steps=1)
                time.sleep(0.02)

        step_until_split(1)
        network.pull_the_cable()
        pulled = time.monotonic()
        while not session.report.events:
            sample_once(session, model, cfg=1.0, steps=1)
            assert time.monotonic() - pulled < NOTICED
        network.heal()
        step_until_split(session.report.forwards_split + 1)
    assert session.report.events == [
        f"w: the connection to the worker at {network.address} was lost",
        "w is back",
    ]


def test_tokens_that_stop_on_their_way_are_noticed(
    worker: Worker, network: NetworkProxy, recipe: Recipe, model: ReferenceDiT
) -> None:
    struck: list[float] = []

    def check() -> None:
        if armed and not struck and worker.reached("block 1"):
            network.drop(TO_DRIVER)
            struck.append(time.monotonic())

    def on_step(step: int) -> None:
        if step == 2:
            worker.mark()
            worker.behave(slow=20, at_block=1)
            armed.append(True)

    armed: list[bool] = []
    worst, report = render(
        [network.address], recipe, model, mode="tokens", cfg=1.0, steps=4, check=check, on_step=on_step
    )
    assert worst <= SAME
    assert struck
    assert time.monotonic() - struck[0] < NOTICED
    assert report.forwards_split == 1


def test_a_worker_whose_driver_vanished_serves_the_next(
    worker: Worker, network: NetworkProxy, recipe: Recipe, model: ReferenceDiT
) -> None:
    with open_session([network.address], recipe) as session:
        sample_once(session, model)
        network.pull_the_cable()
        deadline = time.monotonic() + NOTICED
        split = 0
        # Another way to the same worker, as another driver has.
        while not split:
            assert time.monotonic() < deadline
            split = render([worker.address], recipe, model)[1].forwards_split


@pytest.fixture(scope="module")
def delayed_runs(forge: Forge, recipe: Recipe, model: ReferenceDiT) -> dict[str, tuple[float, Report]]:
    """{point: (largest difference, report)} of runs in which half a second is added there and back from that point on.

    All at once: what takes time is the delay.
    """

    def run(at: str, worker: Worker) -> tuple[float, Report]:
        with ended(worker), network_to(worker.port) as network:
            if at in POINTS:
                point = Point(at, worker, lambda: network.delay(0.5))
                return point.run(recipe, model, address=network.address, busy=0.5)
            render([network.address], recipe, model)
            network.delay(0.5)
            return render([network.address], recipe, model, steps=STEPS)

    with pytest.MonkeyPatch.context() as monkeypatch, ThreadPoolExecutor(len(POINTS) + 1) as threads:
        forget(monkeypatch)
        equal_shares(monkeypatch)
        monkeypatch.setattr(limits, "FILE_CHUNK_BYTES", 64 * 1024)
        workers = {at: forge.worker(at, port=port_with_a_neighbour()) for at in (*POINTS, "between runs")}
        runs = {at: threads.submit(run, at, worker) for at, worker in workers.items()}
        return {at: each.result(timeout=60) for at, each in runs.items()}


@pytest.mark.parametrize("at", [*POINTS, "between runs"])
def test_half_a_second_more_from_any_point_on_is_no_loss(
    delayed_runs: dict[str, tuple[float, Report]], at: str
) -> None:
    worst, report = delayed_runs[at]
    assert worst <= SAME
    assert report.forwards_split >= STEPS - 1, report.line()
    assert not report.events


@SPLITS
def test_half_a_second_more_is_no_loss(
    network: NetworkProxy, recipe: Recipe, model: ReferenceDiT, mode: str, cfg: float
) -> None:
    def on_step(step: int) -> None:
        network.delay(0.5 if step == 2 else 0)

    worst, report = render([network.address], recipe, model, mode=mode, cfg=cfg, steps=4, on_step=on_step)
    assert worst <= SAME
    assert report.forwards_split == 3, report.line()
    assert not report.events


def test_a_slow_network_is_no_loss(
    network: NetworkProxy, recipe: Recipe, model: ReferenceDiT, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The file in one message, which takes longer than silence may last.
    monkeypatch.setattr(limits, "FILE_CHUNK_BYTES", 4 * limits.MIB)
    network.throttle(1e6)
    began = time.monotonic()
    worst, report = render([network.address], recipe, model)
    assert time.monotonic() - began > limits.HEARTBEAT_INTERVAL + limits.HEARTBEAT_TIMEOUT
    assert worst <= SAME
    assert report.forwards_split == 2, report.line()
    assert not report.events


def test_over_a_link_far_too_slow_for_tokens_auto_says_so_and_goes_on(
    network: NetworkProxy, recipe: Recipe, model: ReferenceDiT
) -> None:
    network.throttle(12e6)
    # `auto` does not wait for a worker that still loads.
    worst, report = render(
        [network.address], recipe, model, mode="auto", cfg=1.0, steps=6, on_step=lambda _: time.sleep(0.3)
    )
    assert worst == 0
    assert report.forwards_split == 0
    assert "would not be faster over this link" in report.line()


def test_connections_for_tokens_that_break_alone_cost_one_forward(
    network: NetworkProxy, recipe: Recipe, model: ReferenceDiT
) -> None:
    def on_step(step: int) -> None:
        if step == 2:
            network.reset_tokens()

    worst, report = render([network.address], recipe, model, mode="tokens", cfg=1.0, steps=6, on_step=on_step)
    assert worst <= SAME
    assert 1 <= report.forwards_split < 5, report.line()
    assert "a connection for the exchange of tokens broke" in report.line()


def test_a_link_that_drops_between_runs_is_made_anew(
    network: NetworkProxy, recipe: Recipe, model: ReferenceDiT
) -> None:
    for _ in range(3):
        worst, report = render([network.address], recipe, model)
        assert worst <= SAME
        assert report.forwards_split >= 2
        assert not report.events
        network.reset()


def test_a_port_for_tokens_that_is_cut_leaves_rows(network: NetworkProxy, recipe: Recipe, model: ReferenceDiT) -> None:
    network.close_token_port()
    worst, report = render([network.address], recipe, model, mode="tokens", cfg=1.0)
    assert worst <= SAME
    assert report.forwards_split == 0
    assert "needs a port of its own" in report.line() or "did not find each other" in report.line(), report.line()
    worst, report = render([network.address], recipe, model)
    assert worst <= SAME
    assert report.forwards_split == 2
