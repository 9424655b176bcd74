"""The swap of tokens: what one rank filled in is on the others, bit for bit; nobody waits for a rank that is gone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from monarch_split.demo.reference import ReferenceConfig
from monarch_split.demo.reference_runtime import LOADER, ReferenceRuntime, write_reference_model
from monarch_split.distributed import limits
from monarch_split.distributed.auth import ExchangeKeys
from monarch_split.distributed.doctor.patience import within
from monarch_split.distributed.exchange import probe
from monarch_split.distributed.exchange_group import available_backends
from monarch_split.distributed.exchange_link import SECRET_BYTES, ExchangeListener, join_as_driver
from monarch_split.distributed.invitation import Invitation
from monarch_split.distributed.worker_tokens import TokenRank
from monarch_split.tests.exchange_ranks import (
    CLEAR,
    HOST,
    KEYS,
    LARGE,
    SMALL,
    TWO_STREAMS,
    Operation,
    Rank,
    both,
    connect,
    meet,
)
from monarch_split.tests.worker_process import until

ENGINES = ["lanes", "lanes in the clear", "gloo"]
if torch.cuda.device_count() > 0:
    ENGINES.append("lanes cuda")
if torch.cuda.device_count() > 1:
    ENGINES.append("nccl")

# Seconds until a rank's `check` ends its wait, and within which it then has to be over.
PATIENCE, ENDED = 0.5, 2.0

OPERATIONS = {
    "two streams": SMALL,
    "several buffers": Operation(
        [((13, 3, 5), torch.bfloat16), ((13, 1, 2, 7), torch.float32), ((13, 3), torch.float8_e4m3fn)], TWO_STREAMS
    ),
    "masks": Operation([((13,), torch.bool), ((13, 1, 3), torch.bool)], TWO_STREAMS),
    "many chunks of odd size": LARGE,
    "one rank has nothing": Operation([((5, 3), torch.float32)], [[(0, 5)], []]),
    "empty spans": Operation([((5, 3), torch.float32)], [[(0, 2), (2, 2)], [(2, 5), (5, 5)]]),
    "nobody has anything": Operation([((5, 3), torch.float32)], [[], []]),
    "no tokens": Operation([((0, 3), torch.float32)], [[(0, 0)], [(0, 0)]]),
    "tokens without channels": Operation([((5, 0), torch.float32)], [[(0, 2)], [(2, 5)]]),
    "not all is exchanged": Operation([((9, 2), torch.float32)], [[(1, 3)], [(5, 8)]]),
}


@pytest.mark.parametrize("engine", ENGINES)
def test_every_rank_gets_what_the_other_filled_in_and_nothing_else_changes(
    engine: str, ranks: Callable[[int], list[Rank]]
) -> None:
    pair = ranks(2)
    connect(engine, pair)
    for forward, (name, operation) in enumerate(OPERATIONS.items(), start=1):
        both(pair, "begin", forward)
        both(pair, "agree", name)
        assert both(pair, "all_gather", operation, forward) == [True, True], name
        assert both(pair, "all_gather", operation, 100 + forward) == [True, True], name
        assert both(pair, "gather", operation, 200 + forward) == [True, True], name
    assert both(pair, "globals_changed") == [False, False]


@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine != "nccl" or torch.cuda.device_count() > 2])
def test_three_ranks_exchange_any_shares(engine: str, ranks: Callable[[int], list[Rank]]) -> None:
    three = ranks(3)
    connect(engine, three)
    shares = Operation(
        [((1001, 331), torch.bfloat16), ((1001,), torch.bool)], [[(0, 7), (900, 901)], [(7, 600)], [(600, 900)]]
    )
    for forward in (1, 2):
        both(three, "begin", forward)
        both(three, "agree", "three")
        for turn in range(4):
            assert both(three, "all_gather", shares, 10 * forward + turn) == [True] * 3
        assert both(three, "gather", shares, 77 + forward) == [True] * 3


@pytest.mark.parametrize("engine", ENGINES)
def test_the_bytes_that_travelled_are_counted(engine: str, ranks: Callable[[int], list[Rank]]) -> None:
    pair = ranks(2)
    connect(engine, pair)
    both(pair, "begin", 1)
    both(pair, "all_gather", SMALL, 1)
    row = 3 * 5 * 4
    for rank, (own, others) in zip(pair, [(6, 7), (7, 6)], strict=True):
        counts = rank.ask("counts")
        assert (counts["sent_bytes"], counts["received_bytes"]) == (own * row, others * row)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("count", [2, 3])
def test_different_plans_are_found_on_every_rank_before_data_moves(
    engine: str, count: int, ranks: Callable[[int], list[Rank]]
) -> None:
    if engine == "nccl" and torch.cuda.device_count() < count:
        pytest.skip("not enough GPUs")
    group = ranks(count)
    connect(engine, group)
    both(group, "begin", 1)
    for number, rank in enumerate(group):
        rank.start("agree", "odd" if number == count - 1 else "even")
    for rank in group:
        error = rank.outcome().error
        assert error is not None
        assert error.startswith("ExchangeFailed: the machines see different sizes")
    # Nobody is out of step: the next forward works.
    both(group, "begin", 2)
    both(group, "agree", "the same")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("end", [Rank.kill, Rank.freeze], ids=["killed", "stopped"])
@pytest.mark.parametrize("command", ["all_gather", "gather", "agree"])
def test_waiting_for_a_rank_that_is_gone_ends(
    engine: str, end: Callable[[Rank], None], command: str, ranks: Callable[[int], list[Rank]]
) -> None:
    here, peer = ranks(2)
    connect(engine, [here, peer])
    both([here, peer], "begin", 1)
    assert both([here, peer], "all_gather", SMALL, 1) == [True, True]
    end(peer)
    here.start(command, *(["plan"] if command == "agree" else [LARGE, 2]), patience=PATIENCE)
    outcome = here.outcome()
    assert outcome.seconds < ENDED
    assert outcome.error is not None
    assert outcome.error.startswith(("Gone", "ExchangeFailed"))
    here.ask("close")


@pytest.mark.parametrize("engine", ["gloo"] if "nccl" not in ENGINES else ["gloo", "nccl"])
def test_a_group_whose_wait_was_ended_is_not_used_again(engine: str, ranks: Callable[[int], list[Rank]]) -> None:
    here, peer = ranks(2)
    connect(engine, [here, peer])
    both([here, peer], "begin", 1)
    here.start("agree", "plan", patience=0.1)
    assert here.outcome().error == "Gone: "
    here.start("begin", 2)
    error = here.outcome().error
    assert error is not None
    assert error.startswith("ExchangeFailed: the machines have left the process group")
    # The other one notices, instead of waiting for its own patience to end.
    peer.start("agree", "plan")
    outcome = peer.outcome()
    assert outcome.error is not None
    assert outcome.error.startswith("ExchangeFailed")
    assert outcome.seconds < ENDED


@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine.startswith("lanes")])
def test_messages_of_an_abandoned_forward_do_not_reach_the_next(
    engine: str, ranks: Callable[[int], list[Rank]]
) -> None:
    pair = ranks(2)
    connect(engine, pair)
    both(pair, "begin", 1)
    # Rank 1 sends its part of two operations and gives up; rank 0 never takes part in them.
    for seed in (1, 2):
        pair[1].start("all_gather", LARGE, seed, patience=0.1)
        assert pair[1].outcome().error == "Gone: "
    both(pair, "begin", 2)
    both(pair, "agree", "plan")
    for seed in (3, 4, 5):
        assert both(pair, "all_gather", LARGE, seed) == [True, True]
    # And one that rank 0 has begun to read before it was abandoned.
    both(pair, "begin", 3)
    pair[0].start("agree", "plan", patience=0.1)
    assert pair[0].outcome().error == "Gone: "
    both(pair, "begin", 4)
    pair[1].start("agree", "plan")
    pair[0].ask("pause", 0.2)
    pair[0].ask("agree", "plan")
    assert pair[1].outcome().error is None
    assert both(pair, "gather", LARGE, 6) == [True, True]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_faster_rank_may_be_one_operation_ahead(engine: str, ranks: Callable[[int], list[Rank]]) -> None:
    pair = ranks(2)
    connect(engine, pair)
    both(pair, "begin", 1)
    for slow, fast in ((0, 1), (1, 0)):
        for seed in (1, 2):
            pair[fast].start("all_gather", LARGE, seed)
        pair[slow].ask("pause", 0.1)
        for seed in (1, 2):
            assert pair[slow].ask("all_gather", LARGE, seed) is True
            assert pair[fast].outcome().value is True


@pytest.mark.parametrize("engine", ENGINES)
def test_joining_ends_when_the_others_do_not_come(engine: str, ranks: Callable[[int], list[Rank]]) -> None:
    group = ranks(2)
    ports = meet(engine, group)
    group[1].start("join", engine, 1, 2, ports, os.urandom(32), patience=PATIENCE)
    outcome = group[1].outcome()
    assert outcome.error == "Gone: "
    assert outcome.seconds < ENDED


@pytest.mark.parametrize("end", [Rank.kill, Rank.freeze], ids=["killed", "stopped"])
def test_joining_ends_when_the_rank_with_the_store_is_gone(
    end: Callable[[Rank], None], ranks: Callable[[int], list[Rank]]
) -> None:
    here, host = ranks(2)
    ports = meet("gloo", [here, host])
    end(host)
    here.start("join", "gloo", 0, 2, ports, os.urandom(32), patience=PATIENCE)
    outcome = here.outcome()
    assert outcome.error is not None
    assert outcome.error.startswith(("Gone", "ExchangeFailed"))
    assert outcome.seconds < ENDED


@pytest.mark.parametrize("keys", [CLEAR, KEYS], ids=["clear", "encrypted"])
def test_a_driver_may_greet_a_worker_before_the_invitation_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: ExchangeKeys
) -> None:
    monkeypatch.setattr(limits, "EXCHANGE_JOIN_TIMEOUT", 2.0)
    file = tmp_path / "tiny.safetensors"
    write_reference_model(ReferenceConfig(), file)
    replica = ReferenceRuntime().build({"loader": LOADER}, file, "")
    rank = TokenRank([HOST], 0)
    try:
        for _ in range(2):  # the second time there is an exchange to leave
            offer = rank.open(replica, store=False, keys=keys)
            secret = os.urandom(SECRET_BYTES)
            addresses = (None, (HOST, offer["port"]))
            invitation = Invitation("lanes", 1, addresses, secret)
            driver = join_as_driver(addresses, secret, keys)
            driver.check = within(ENDED)
            try:
                with ThreadPoolExecutor() as threads:
                    probed = threads.submit(probe, driver, torch.device("cpu"))
                    time.sleep(0.1)
                    rank.join(invitation.as_dict(), replica, lambda: None, local=True)
                    assert probed.result(timeout=ENDED)
            finally:
                driver.close()
    finally:
        rank.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_joining_over_and_over_leaves_nothing_behind(engine: str, ranks: Callable[[int], list[Rank]]) -> None:
    pair = ranks(2)

    def use(turns: int) -> None:
        for turn in range(turns):
            connect(engine, pair)
            both(pair, "begin", turn)
            assert both(pair, "all_gather", SMALL, turn) == [True, True]
            both(pair, "close")

    # The first turns load libraries and fill pools. Threads end a little after what they worked for.
    use(3)
    time.sleep(0.2)
    before = [rank.ask("resources") for rank in pair]
    use(4)
    for rank, most in zip(pair, before, strict=True):
        until(lambda rank=rank, most=most: at_most(rank.ask("resources"), most), "what was used to be given back")


def at_most(used: tuple[int, int], most: tuple[int, int]) -> bool:
    return all(now <= then for now, then in zip(used, most, strict=True))


def test_backends_are_offered_for_the_devices_they_work_on() -> None:
    assert available_backends(torch.device("cpu")) == ("gloo",)
    assert available_backends(torch.device("meta")) == ()
    assert available_backends(torch.device("cuda")) == (("nccl",) if torch.distributed.is_nccl_available() else ())


def test_a_port_that_is_taken_is_replaced_by_a_free_one() -> None:
    first = ExchangeListener([HOST], 0, CLEAR)
    second = ExchangeListener([HOST], first.port, CLEAR)
    try:
        assert second.port != first.port
    finally:
        first.close()
        second.close()
