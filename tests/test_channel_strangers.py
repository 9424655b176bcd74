"""What strangers and broken drivers do to a worker's port does not reach the session that is running."""

from __future__ import annotations

import os
import pickle
import random
import socket
import struct
import time
from typing import Any

import pytest
import torch
import zmq

from monarch_split.distributed import limits
from monarch_split.distributed.channel import ChannelLost, show_key
from monarch_split.distributed.codec import encode
from monarch_split.distributed.driver_channel import DriverChannel
from monarch_split.distributed.messages import Kind, Message
from monarch_split.tests.channel_peer import ask, echo_thread, greeted, next_messages, own_keys

BIG = limits.INLINE_BYTES + 1000
ZMTP_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)


class _Exit:
    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (3,)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        bytes.fromhex("16030100f4010000f00303") + bytes(236),
        pickle.dumps(_Exit()),
        random.Random(5).randbytes(100_000),
        ZMTP_GREETING[:10],
        ZMTP_GREETING + b"\x06" + (1 << 62).to_bytes(8, "big") + bytes(1000),
        ZMTP_GREETING + b"\x04\xff\xff\xff",
        b"",
    ],
    ids=["http", "tls", "pickle", "random", "half_a_greeting", "huge_frame", "bad_command", "nothing"],
)
def test_garbage_at_the_port_does_not_disturb_a_session(data: bytes) -> None:
    with echo_thread() as echo, greeted(echo.port) as channel:
        channel.send(Kind.FORWARD, {"x": torch.ones(BIG)})
        strangers = [socket.create_connection(("127.0.0.1", echo.port)) for _ in range(5)]
        for stranger in strangers:
            stranger.sendall(data)
        assert bool((next_messages(channel)[0].body["x"] == 1).all())
        for stranger in strangers:
            stranger.close()
        assert ask(channel, still="here") == {"still": "here"}
        assert list(echo.channel._sessions) == [next(iter(echo.channel._sessions))]


@pytest.fixture
def stranger_socket() -> Any:
    context = zmq.Context()
    opened = []

    def connect(port: int, identity: bytes) -> zmq.Socket[bytes]:
        sock = context.socket(zmq.DEALER)
        opened.append(sock)
        sock.set(zmq.IDENTITY, identity)
        show_key(sock, own_keys())
        sock.connect(f"tcp://127.0.0.1:{port}")
        return sock

    yield connect
    for sock in opened:
        sock.close(linger=0)
    context.term()


def _large(kind: Kind = Kind.FORWARD) -> list[Any]:
    return encode(Message(kind, 1, {"x": torch.zeros(BIG)})).control


def test_nothing_is_allocated_for_a_stranger(stranger_socket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    with echo_thread() as echo, greeted(echo.port) as channel:
        monkeypatch.setattr("torch.empty", lambda size, **options: sizes.append(size))
        sock = stranger_socket(echo.port, b"M1234567\0")
        lane = stranger_socket(echo.port, b"M1234567\1")
        for kind in (Kind.FORWARD, Kind.HELLO, Kind.PREPARE, Kind.RESULT):
            sock.send_multipart(_large(kind))
        for number in range(200):
            lane.send_multipart([struct.pack("<4sBxHIQQ", b"MNRC", 1, 0, 0, number, 0), bytes(1000 * (number % 2))])
        long_hello = encode(Message(Kind.HELLO, 1, {"lanes": 1, "x": "y" * limits.MAX_HELLO_BYTES}))
        sock.send_multipart(long_hello.control)
        for _ in range(10):
            assert ask(channel, still="here") == {"still": "here"}
        held = [state.assembler for state in echo.channel._sessions.values() if not state.admitted]
    assert sizes == []
    assert all(not assembler._early and not assembler._pending for assembler in held)


def test_strangers_are_forgotten_when_there_are_many(stranger_socket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_STRANGERS", 5)
    hello = encode(Message(Kind.HELLO, 1, {"lanes": 3})).control
    with echo_thread() as echo, greeted(echo.port) as channel:
        for i in range(30):
            stranger_socket(echo.port, b"M" + i.to_bytes(7, "big") + b"\0").send_multipart(hello)
        for odd in (b"x", b"M", b"M" * 9, b"X1234567\0", b"M1234567\xff", b"M" * 200):
            stranger_socket(echo.port, odd).send_multipart(hello)
        deadline = time.monotonic() + 10
        while len(echo._waiting) < 5:
            assert time.monotonic() < deadline
            assert ask(channel, still="here") == {"still": "here"}
            assert len(echo.channel._sessions) <= 5 + 1


def test_a_driver_that_breaks_the_protocol_is_told_so_and_others_go_on() -> None:
    with echo_thread() as echo, greeted(echo.port) as good, greeted(echo.port) as bad:
        bad._sockets[0].send_multipart([b"nonsense"])
        with pytest.raises(ChannelLost, match="ended the run: a message header has an impossible size"):
            next_messages(bad)
        with pytest.raises(ChannelLost, match="ended the run"):
            bad.send(Kind.FORWARD, {})
        assert ask(good, still="here") == {"still": "here"}


def test_a_worker_of_another_protocol_is_named_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    with echo_thread() as echo:
        channel = DriverChannel("127.0.0.1", echo.port, keys=own_keys())
        hello = bytearray(encode(Message(Kind.HELLO, 1, {"lanes": 2})).control[0])
        hello[4] = 77
        channel._sockets[0].send(hello)
        with pytest.raises(ChannelLost, match="protocol 77"):
            next_messages(channel)
        channel.close()


@pytest.mark.parametrize("kind", [Kind.PROBE, Kind.WELCOME, Kind.RESULT, Kind.READY])
def test_a_driver_may_not_send_what_only_workers_send(kind: Kind) -> None:
    with echo_thread() as echo, greeted(echo.port) as channel:
        channel.send(kind, {})
        with pytest.raises(ChannelLost, match="not allowed"):
            next_messages(channel)
        assert echo.received == []


def test_a_worker_that_breaks_the_protocol_is_left() -> None:
    with echo_thread() as echo, greeted(echo.port) as channel:
        echo.paused.set()
        time.sleep(0.1)
        (session,) = echo.channel._sessions
        echo.channel._sock.send_multipart([session + b"\0", b"nonsense"])
        with pytest.raises(ChannelLost, match=r"127\.0\.0\.1.*broke the protocol"):
            next_messages(channel)
        echo.paused.clear()
