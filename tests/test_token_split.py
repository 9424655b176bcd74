"""A row split by tokens over real worker processes: exact, and a lost worker costs at most one forward."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import replace
from typing import Any

import pytest

from monarch_split.demo.reference import TINY, ReferenceConfig, ReferenceDiT, slowed
from monarch_split.demo.reference_runtime import write_reference_model
from monarch_split.distributed import limits, split_tokens, tokens
from monarch_split.distributed.addresses import parse_address
from monarch_split.distributed.auth import ExchangeKeys
from monarch_split.distributed.ledger import DRIVER
from monarch_split.distributed.peer import ExchangeOffer, Peer
from monarch_split.distributed.plan import Costs
from monarch_split.distributed.recipe import Recipe
from monarch_split.tests.driving import SAME, Stopped, guided, open_session, render, sample_once
from monarch_split.tests.worker_process import Forge, Worker, ended, until

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="workers run on Linux"),
    pytest.mark.timeout(60),
]

NOTICED = limits.HEARTBEAT_INTERVAL + limits.HEARTBEAT_TIMEOUT + 4.0
DEEP = ReferenceConfig(depth=3)


@pytest.fixture(scope="module")
def deep() -> ReferenceDiT:
    return ReferenceDiT(DEEP)


@pytest.fixture(scope="module")
def deep_recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return write_reference_model(DEEP, tmp_path_factory.mktemp("model") / "deep.safetensors")


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(("cfg", "batch", "size"), [(1.0, 1, 64), (1.0, 1, 80), (4.0, 1, 48), (1.0, 3, 112)])
def test_tokens_over_two_to_four_machines_give_the_same_latent(
    workers: list[Worker], recipe: Recipe, model: ReferenceDiT, count: int, cfg: float, batch: int, size: int
) -> None:
    addresses = [worker.address for worker in workers[:count]]
    worst, report = render(addresses, recipe, model, mode="tokens", cfg=cfg, batch=batch, size=size, steps=4)
    assert worst <= SAME
    assert (report.split, report.forwards_split, report.forwards) == ("tokens", 3, 4), report.line()
    assert len(report.tokens) == count + 1
    assert sum(report.tokens.values()) == pytest.approx(1.0)
    assert not report.events, report.line()


def test_a_slower_worker_gets_fewer_tokens(worker: Worker, recipe: Recipe) -> None:
    model = ReferenceDiT(TINY)
    slowed(model, 0.001)
    worker.behave(slow_token=0.004)
    worst, report = render([worker.address], recipe, model, mode="tokens", cfg=1.0, size=160, steps=8)
    assert worst <= SAME
    assert report.split == "tokens", report.line()
    assert 0 < report.tokens["w"] < 0.45, report.line()


def test_a_worker_that_computes_something_else_is_found_out_by_the_first_forward(
    worker: Worker, deep_recipe: Recipe, model: ReferenceDiT
) -> None:
    # The same sizes and another number of blocks: nothing but the result, or the order of what is swapped, tells.
    other = ReferenceDiT(ReferenceConfig(depth=DEEP.depth, weight_seed=5))
    worst, report = render([worker.address], deep_recipe, other, mode="tokens", cfg=1.0)
    assert worst <= SAME
    assert report.forwards_split == 0
    assert "compute something else" in report.line()


@pytest.mark.parametrize("block", [0, 1, 2])
@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_a_worker_lost_within_an_exchange_costs_one_forward_and_serves_the_next_run(
    forge: Forge, worker: Worker, deep_recipe: Recipe, deep: ReferenceDiT, how: str, block: int
) -> None:
    armed: list[bool] = []
    struck: list[float] = []

    def check() -> None:
        if armed and not struck and worker.reached(f"block {block}") and _slow(worker):
            getattr(worker, how)()
            struck.append(time.monotonic())

    def on_step(step: int) -> None:
        if step == 2:
            worker.mark()
            worker.behave(slow=20, at_block=block)
            armed.append(True)

    worst, report = render(
        [worker.address], deep_recipe, deep, mode="tokens", cfg=1.0, steps=5, check=check, on_step=on_step
    )
    assert worst <= SAME
    assert struck
    assert time.monotonic() - struck[0] < NOTICED
    assert (report.forwards, report.forwards_split) == (5, 1), report.line()
    assert worker.address in report.line()
    worker.kill()
    with ended(forge.worker(port=worker.port, cache=worker.cache)):
        worst, report = render([worker.address], deep_recipe, deep, mode="tokens", cfg=1.0)
    assert worst <= SAME
    assert report.forwards_split == 2, report.line()


def _slow(worker: Worker) -> bool:
    """Give it the moment between printing that it has reached a block and beginning to wait there."""
    time.sleep(0.05)
    return worker.exit_status is None


@pytest.mark.parametrize("block", [0, 2])
def test_an_interrupt_within_an_exchange_stops_both_sides(
    worker: Worker, deep_recipe: Recipe, deep: ReferenceDiT, block: int
) -> None:
    def check() -> None:
        if worker.reached(f"block {block}"):
            raise Stopped

    render([worker.address], deep_recipe, deep, mode="tokens", cfg=1.0)
    worker.mark()
    worker.behave(slow=20, at_block=block)
    began = time.monotonic()
    with pytest.raises(Stopped):
        render([worker.address], deep_recipe, deep, mode="tokens", cfg=1.0, check=check)
    assert time.monotonic() - began < 4
    worker.behave()
    worst, report = render([worker.address], deep_recipe, deep, mode="tokens", cfg=1.0)
    assert time.monotonic() - began < 10
    assert worst <= SAME
    assert report.forwards_split == 3, report.line()


def test_an_error_of_the_worker_within_a_forward_is_told_and_costs_one_forward(
    worker: Worker, deep_recipe: Recipe, deep: ReferenceDiT
) -> None:
    def on_step(step: int) -> None:
        if step == 2:
            worker.behave(error="no memory left", at_block=1)

    worst, report = render([worker.address], deep_recipe, deep, mode="tokens", cfg=1.0, steps=4, on_step=on_step)
    assert worst <= SAME
    assert report.forwards_split == 1
    assert "w: RuntimeError: no memory left" in report.line()


def test_of_two_workers_the_one_that_is_left_goes_on_by_tokens(
    forge: Forge, worker: Worker, deep_recipe: Recipe, deep: ReferenceDiT
) -> None:
    def on_step(step: int) -> None:
        if step == 2:
            other.kill()

    with ended(other := forge.worker("other")):
        worst, report = render(
            [worker.address, other.address], deep_recipe, deep, mode="tokens", cfg=1.0, steps=6, on_step=on_step
        )
    assert worst <= SAME
    assert set(report.tokens) == {"this machine", "w"}, report.line()
    assert report.forwards_split >= 3, report.line()


def test_over_a_slow_link_auto_does_not_even_begin(
    worker: Worker, recipe: Recipe, model: ReferenceDiT, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = split_tokens.probe

    def slow(*exchange: Any) -> tuple[float, float]:
        trip, _ = stock(*exchange)
        return trip, 1e4

    monkeypatch.setattr(split_tokens, "probe", slow)
    # `auto` does not wait for a worker that still loads.
    worst, report = render(
        [worker.address], recipe, model, mode="auto", cfg=1.0, steps=5, on_step=lambda _: time.sleep(0.3)
    )
    assert worst == 0
    assert report.forwards_split == 0
    assert "would not be faster over this link" in report.line()


def test_rows_mode_never_splits_tokens(worker: Worker, recipe: Recipe, model: ReferenceDiT) -> None:
    worst, report = render([worker.address], recipe, model, mode="rows", cfg=1.0)
    assert worst == 0
    assert report.forwards_split == 0
    assert "nothing to split by rows" in report.line()


def test_many_runs_leave_nothing_behind(worker: Worker, recipe: Recipe, model: ReferenceDiT) -> None:
    def one(size: int) -> None:
        with open_session([worker.address], recipe, mode="tokens", model=model) as session:
            sample_once(session, model, cfg=1.0, size=size)
        assert session.report.split == "tokens", session.report.line()

    for size in (64, 96):
        one(size)
    before = worker.resources()
    for turn in range(16):
        one(64 + 32 * (turn % 2))
    until(lambda: worker.resources()[0] <= before[0] + 1, "the worker to close its files")
    files, threads, _ = worker.resources()
    assert files <= before[0] + 1
    assert threads <= before[1] + 1


@pytest.mark.parametrize("count", [1, 3])
def test_attending_to_the_own_tokens_first_gives_the_same_latent(
    workers: list[Worker], recipe: Recipe, model: ReferenceDiT, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    calls: list[int] = []
    stock = tokens.merge
    monkeypatch.setattr(tokens, "merge", lambda *parts: calls.append(1) or stock(*parts))
    addresses = [worker.address for worker in workers[:count]]
    worst, report = render(addresses, recipe, model, mode="tokens", cfg=1.0, size=80, cluster={"overlap": "on"})
    assert worst <= SAME
    assert report.forwards_split == 2, report.line()
    assert calls


@pytest.mark.parametrize(
    ("trusted_link", "links", "encrypted"),
    [(False, {}, True), (False, {0: True}, True), (True, {1: False}, True), (False, {0: True, 1: True}, False)],
    ids=["no link trusted", "one trusted", "all but one trusted", "each trusted"],
)
def test_an_exchange_is_in_the_clear_only_if_every_link_of_it_is_trusted(
    workers: list[Worker],
    recipe: Recipe,
    model: ReferenceDiT,
    monkeypatch: pytest.MonkeyPatch,
    trusted_link: bool,
    links: dict[int, bool],
    encrypted: bool,
) -> None:
    told: list[bool] = []
    stock = Peer.open_exchange

    def open_exchange(peer: Peer, *, store: bool, keys: ExchangeKeys) -> ExchangeOffer:
        told.append(keys.encrypted)
        return stock(peer, store=store, keys=keys)

    monkeypatch.setattr(Peer, "open_exchange", open_exchange)
    # Workers of this user on the loopback need nobody's trust; these are to be treated like any other.
    monkeypatch.setattr(Peer, "is_own", property(lambda _: False, lambda *_: None), raising=False)
    addresses = [worker.address for worker in workers[:2]]
    own = tuple((parse_address(addresses[index]), trusted) for index, trusted in links.items())
    cluster = {"trusted_link": trusted_link, "links": own}
    worst, report = render(addresses, recipe, model, mode="tokens", cfg=1.0, cluster=cluster)
    assert worst <= SAME
    assert report.forwards_split == 2, report.line()
    assert set(told) == {encrypted}


def test_an_engine_that_a_machine_lacks_is_named_with_what_it_takes(
    addresses: list[str], recipe: Recipe, model: ReferenceDiT
) -> None:
    worst, report = render(addresses[:1], recipe, model, mode="tokens", cfg=1.0, cluster={"exchange": "nccl"})
    assert worst <= SAME
    assert report.forwards_split == 0
    expected = "an exchange over nccl takes an NVIDIA GPU and a PyTorch with NCCL on every machine, which is not so on"
    assert f"{expected} this machine and one; write exchange" in report.line()


def test_a_port_for_tokens_that_cannot_be_reached_is_named_and_costs_no_time(
    worker: Worker, recipe: Recipe, model: ReferenceDiT, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        closed = unused.getsockname()[1]
    offer = Peer.open_exchange
    monkeypatch.setattr(Peer, "open_exchange", lambda *args, **how: replace(offer(*args, **how), port=closed))
    began = time.monotonic()
    worst, report = render([worker.address], recipe, model, mode="tokens", cfg=1.0)
    assert time.monotonic() - began < 5
    assert worst == 0
    assert report.forwards_split == 0
    assert f"needs a port of its own, but nothing listens at 127.0.0.1:{closed}" in report.line()


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_a_third_machine_lost_while_joining_does_not_hold_up_the_second(
    forge: Forge,
    worker: Worker,
    deep_recipe: Recipe,
    deep: ReferenceDiT,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    stock = split_tokens.probe
    struck: list[float] = []

    def probe(*exchange: Any) -> tuple[float, float]:
        if not struck:
            getattr(third, how)()
            struck.append(time.monotonic())
        return stock(*exchange)

    monkeypatch.setattr(split_tokens, "probe", probe)
    with ended(third := forge.worker("third")):
        worst, report = render([worker.address, third.address], deep_recipe, deep, mode="tokens", cfg=1.0, steps=4)
        assert time.monotonic() - struck[0] < NOTICED + limits.EXCHANGE_JOIN_TIMEOUT
    assert worst <= SAME
    assert set(report.tokens) == {"this machine", "w"}, report.line()
    assert report.forwards_split >= 2, report.line()


def test_sizes_in_turn_keep_their_own_pace(
    worker: Worker, recipe: Recipe, model: ReferenceDiT, monkeypatch: pytest.MonkeyPatch
) -> None:
    paces: dict[int, list[float]] = {}
    stock = Costs.record_pace

    def record(costs: Costs, node: str, rows: float, seconds: float) -> None:
        if node != DRIVER:
            paces.setdefault(id(costs), []).append(rows / seconds)
        stock(costs, node, rows, seconds)

    monkeypatch.setattr(Costs, "record_pace", record)
    with open_session([worker.address], recipe, mode="tokens", model=model) as session:
        for _ in range(4):
            for size in (64, 768):
                sample_once(session, model, cfg=1.0, size=size, steps=2)
    small, large = sorted((max(found) for found in paces.values()), reverse=True)
    assert small > 3 * large


def test_a_link_that_was_too_slow_is_not_tried_again_in_the_next_run(
    worker: Worker, recipe: Recipe, model: ReferenceDiT, monkeypatch: pytest.MonkeyPatch
) -> None:
    probes: list[int] = []
    stock = split_tokens.probe

    def slow(*exchange: Any) -> tuple[float, float]:
        probes.append(1)
        return stock(*exchange)[0], 1e4

    monkeypatch.setattr(split_tokens, "probe", slow)
    for _ in range(2):
        _, report = render(
            [worker.address], recipe, model, mode="auto", cfg=1.0, steps=4, on_step=lambda _: time.sleep(0.3)
        )
        assert "would not be faster over this link" in report.line()
    assert len(probes) == 1


def test_tokens_mode_splits_tokens_of_conditionings_that_are_computed_apart(
    workers: list[Worker], recipe: Recipe, model: ReferenceDiT
) -> None:
    # A run by rows first, so that the workers are known.
    render([workers[0].address], recipe, model)
    with open_session([workers[0].address], recipe, mode="tokens", model=model) as session:
        latent = guided(model, 2, 1, session)
    assert (latent - guided(model, 2, 1)).abs().max().item() <= SAME
    assert session.report.split == "tokens", session.report.line()
