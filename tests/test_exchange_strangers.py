"""Whoever comes to the port of an exchange without being a rank: nothing of theirs is kept, and the ranks go on."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections.abc import Callable

import pytest
import zmq

from monarch_split.distributed import limits
from monarch_split.distributed.auth import ChannelKeys, KeyPair
from monarch_split.distributed.channel import show_key
from monarch_split.tests.exchange_ranks import HOST, LARGE, PAIR, SMALL, Rank, both, meet

LANES = ["lanes", "lanes in the clear"]
# Seconds until a rank's `check` ends its wait, and within which it then has to be over.
PATIENCE, ENDED = 0.5, 2.0
# What a stranger sends at most, and what a rank may have more in memory afterwards.
POURED, KEPT = 512 * limits.MIB, 96 * limits.MIB


def join(engine: str, pair: list[Rank], ports: list[int | None]) -> None:
    secret = os.urandom(32)
    for number, rank in enumerate(pair):
        rank.start("join", engine, number, 2, ports, secret)
    assert [rank.outcome().error for rank in pair] == [None, None]


def nothing(stranger: zmq.Socket[bytes]) -> None:
    """Come without any key."""


def another_pair(stranger: zmq.Socket[bytes]) -> None:
    pair = KeyPair.new()
    show_key(stranger, ChannelKeys(pair, pair.public))


def only_the_public_key(stranger: zmq.Socket[bytes]) -> None:
    show_key(stranger, ChannelKeys(KeyPair.new(), PAIR.public))


def another_password(stranger: zmq.Socket[bytes]) -> None:
    stranger.set(zmq.PLAIN_USERNAME, b"rank")
    stranger.set(zmq.PLAIN_PASSWORD, KeyPair.new().secret)


@pytest.mark.parametrize("shown", [nothing, another_pair, only_the_public_key, another_password])
@pytest.mark.parametrize("engine", LANES)
def test_nothing_of_a_stranger_that_pours_data_into_the_port_is_kept(
    engine: str, shown: Callable[[zmq.Socket[bytes]], None], ranks: Callable[[int], list[Rank]]
) -> None:
    pair = ranks(2)
    ports = meet(engine, pair)
    join(engine, pair, ports)
    both(pair, "begin", 1)
    assert both(pair, "all_gather", LARGE, 1) == [True, True]
    before = pair[1].ask("resident")
    piece = bytes(4 * limits.MIB)
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.set(zmq.LINGER, 0)
        # Only who is let in can send more than one.
        stranger.set(zmq.SNDHWM, 1)
        stranger.set(zmq.SNDTIMEO, 300)
        shown(stranger)
        stranger.connect(f"tcp://{HOST}:{ports[1]}")
        # Nobody reads at the other end meanwhile.
        with contextlib.suppress(zmq.Again):
            for _ in range(POURED // len(piece)):
                stranger.send(piece, copy=False)
        assert pair[1].ask("resident") - before < KEPT
        assert both(pair, "all_gather", LARGE, 2) == [True, True]
    assert both(pair, "all_gather", LARGE, 3) == [True, True]


GARBAGE = [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", random.Random(5).randbytes(100_000), b""]


@pytest.mark.parametrize("engine", [*LANES, "gloo"])
def test_garbage_at_the_port_changes_nothing(engine: str, ranks: Callable[[int], list[Rank]]) -> None:
    pair = ranks(2)
    ports = meet(engine, pair)
    strangers = [socket.create_connection((HOST, ports[1] or 0)) for _ in range(6)]
    for stranger, data in zip(strangers, 2 * GARBAGE, strict=True):
        stranger.sendall(data)
    join(engine, pair, ports)
    both(pair, "begin", 1)
    assert both(pair, "all_gather", LARGE, 1) == [True, True]
    for stranger in strangers:
        stranger.close()
    assert both(pair, "all_gather", LARGE, 2) == [True, True]


def test_messages_of_a_stranger_are_not_taken_for_a_rank_s(ranks: Callable[[int], list[Rank]]) -> None:
    pair = ranks(2)
    ports = meet("lanes", pair)
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.set(zmq.LINGER, 0)
        stranger.set(zmq.IDENTITY, b"X" + bytes(31))
        show_key(stranger, ChannelKeys(PAIR, PAIR.public))
        stranger.connect(f"tcp://{HOST}:{ports[1]}")

        def intrude() -> None:
            for forward, operation, chunk in ((1, 1, 0), (1, 2, 0), (2, 1, 0)):
                header = forward.to_bytes(8, "little") + operation.to_bytes(4, "little") + chunk.to_bytes(4, "little")
                stranger.send_multipart([header, bytes(6 * 60)])
            stranger.send(b"exchange")
            stranger.send_multipart([b""] * 5)

        intrude()
        join("lanes", pair, ports)
        both(pair, "begin", 1)
        for seed in (1, 2, 3):
            intrude()
            assert both(pair, "all_gather", SMALL, seed) == [True, True]


def test_a_flood_of_a_stranger_s_messages_does_not_keep_a_rank_from_looking_at_check(
    ranks: Callable[[int], list[Rank]],
) -> None:
    pair = ranks(2)
    ports = meet("lanes", pair)
    join("lanes", pair, ports)
    both(pair, "begin", 1)
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.set(zmq.LINGER, 0)
        show_key(stranger, ChannelKeys(PAIR, PAIR.public))
        stranger.connect(f"tcp://{HOST}:{ports[1]}")
        pair[1].start("all_gather", SMALL, 1, patience=PATIENCE)
        flooding = True
        while flooding:
            stranger.send_multipart([bytes(16), b"x"])
            flooding = not pair[1].answered()
    outcome = pair[1].outcome()
    assert outcome.error == "Gone: "
    assert outcome.seconds < ENDED
