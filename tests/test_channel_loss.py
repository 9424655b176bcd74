"""The other side dies, freezes, was never there, or is only busy: told apart, in bounded time, in one clear sentence.

Bounds are 2 s of silence and a margin for a machine that does other things too.
"""

from __future__ import annotations

import contextlib
import gc
import http.server
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import zmq

from monarch_split.distributed import limits
from monarch_split.distributed.addresses import Address
from monarch_split.distributed.auth import own_identity
from monarch_split.distributed.channel import ChannelLost
from monarch_split.distributed.driver_channel import DriverChannel, _reachable
from monarch_split.distributed.messages import Kind
from monarch_split.tests.channel_peer import Nursery, ask, echo_thread, greeted, next_messages, own_keys

BIG = limits.INLINE_BYTES + 1000
SILENCE = 2.0
MARGIN = 3.0


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture
def process(nursery: Nursery) -> Iterator[tuple[int, int]]:
    pid, port = nursery.echo()
    yield pid, port
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_peer_that_is_gone_is_noticed_while_waiting(process: tuple[int, int], number: int) -> None:
    pid, port = process
    with greeted(port) as channel:
        assert ask(channel, a=1) == {"a": 1}
        os.kill(pid, number)
        began = time.monotonic()
        with pytest.raises(ChannelLost, match=f"127.0.0.1:{port} was lost"):
            next_messages(channel)
        assert time.monotonic() - began < SILENCE + MARGIN
        with pytest.raises(ChannelLost):
            channel.send(Kind.FORWARD, {})
    assert time.monotonic() - began < SILENCE + MARGIN + 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
@pytest.mark.parametrize("small", [0, 400], ids=["data_lanes_full", "every_lane_full"])
def test_a_peer_that_goes_while_much_is_on_its_way_is_noticed(
    process: tuple[int, int], number: int, small: int
) -> None:
    pid, port = process
    body = {"big": torch.zeros(32 << 20), "small": [torch.zeros(15_000)] * small}
    gone_at = 0.0

    def go() -> None:
        nonlocal gone_at
        os.kill(pid, number)
        gone_at = time.monotonic()

    def stuck() -> None:
        assert not gone_at or time.monotonic() - gone_at < SILENCE + MARGIN

    def send_without_end(channel: DriverChannel) -> None:
        while True:
            channel.send(Kind.FORWARD, body, while_full=stuck)
            channel.receive(0)
            stuck()

    timer = threading.Timer(0.5, go)
    with greeted(port) as channel:
        timer.start()
        with pytest.raises(ChannelLost):
            send_without_end(channel)
        assert gone_at
        assert time.monotonic() - gone_at < SILENCE + MARGIN


def test_a_peer_that_holds_the_gil_is_not_lost(process: tuple[int, int]) -> None:
    with greeted(process[1]) as channel:
        channel.send(Kind.FORWARD, {"hold": 2.5 * SILENCE})
        time.sleep(0.1)
        channel.send(Kind.FORWARD, {"x": torch.zeros(16 << 20)})
        began = time.monotonic()
        answers = next_messages(channel)
        assert time.monotonic() - began > 2 * SILENCE
        if len(answers) == 1:
            answers += next_messages(channel)
        assert [answer.body["for"] for answer in answers] == [2, 3]


def test_a_lost_connection_is_not_mended_behind_our_back() -> None:
    with contextlib.ExitStack() as stack:
        with echo_thread() as first:
            channel = stack.enter_context(greeted(first.port))
            port = first.port
        context = stack.enter_context(zmq.Context())
        successor = stack.enter_context(context.socket(zmq.ROUTER))
        successor.bind(f"tcp://127.0.0.1:{port}")
        with pytest.raises(ChannelLost, match="was lost"):
            next_messages(channel)
        assert successor.poll(500) == 0


def test_a_worker_notices_that_its_driver_is_gone_and_serves_the_next() -> None:
    with echo_thread() as echo:
        with greeted(echo.port) as channel:
            (session,) = echo.channel._sessions
        deadline = time.monotonic() + SILENCE + MARGIN
        while session in echo.channel._sessions:
            assert time.monotonic() < deadline
            with contextlib.suppress(ChannelLost):
                echo.channel.send(session, Kind.PROBE, {})
            time.sleep(0.05)
        with pytest.raises(ChannelLost, match="no longer connected"):
            echo.channel.send(session, Kind.PROBE, {})
        with greeted(echo.port) as channel:
            assert ask(channel, a=1) == {"a": 1}


# --- nobody there -----------------------------------------------------------------------------------------------------


def _greet(host: str, port: int) -> None:
    with contextlib.closing(DriverChannel(host, port, keys=own_keys())) as channel:
        channel.send(Kind.HELLO, {"lanes": 2})
        next_messages(channel)


def _fails(host: str, port: int, match: str, *, within: float) -> None:
    began = time.monotonic()
    with pytest.raises(ChannelLost, match=match) as caught:
        _greet(host, port)
    assert time.monotonic() - began < within + MARGIN
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 150


def test_nothing_listens() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        _fails("127.0.0.1", bound.getsockname()[1], "nothing listens at 127.0.0.1:.*start the worker", within=1)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "x" * 64, "a..b", "with space", ""], ids=repr)
def test_a_host_that_is_no_host(host: str) -> None:
    _fails(host, limits.DEFAULT_PORT, "is not known|nothing listens", within=10)


def test_an_address_whose_queue_is_full_does_not_answer() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        fill = [socket.socket() for _ in range(4)]
        for sock in fill:
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
        time.sleep(0.1)
        port = listener.getsockname()[1]
        _fails("127.0.0.1", port, "does not answer; check the address", within=limits.CONNECT_TIMEOUT)
        for sock in fill:
            sock.close()


def test_an_address_that_accepts_and_says_nothing() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(20)
        _fails("127.0.0.1", listener.getsockname()[1], "not a Monarch worker", within=limits.CONNECT_TIMEOUT)


def test_a_web_server_is_not_a_worker() -> None:
    class Quiet(http.server.BaseHTTPRequestHandler):
        timeout = 1

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    _fails("127.0.0.1", server.server_port, "not a Monarch worker", within=limits.CONNECT_TIMEOUT)
    server.shutdown()
    thread.join()
    server.server_close()


# --- closing ----------------------------------------------------------------------------------------------------------


def _resources() -> tuple[int, int]:
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _settles_at(expected: tuple[int, int]) -> bool:
    deadline = time.monotonic() + 5
    while (now := _resources()) > expected and time.monotonic() < deadline:
        time.sleep(0.05)
    return now[0] <= expected[0] and now[1] <= expected[1]


def test_fifty_channels_leave_no_thread_and_no_file_open() -> None:
    with echo_thread() as echo:
        with greeted(echo.port) as channel:
            ask(channel, x=torch.zeros(BIG))
        time.sleep(0.2)
        before = _resources()
        for i in range(50):
            channel = DriverChannel("127.0.0.1", echo.port, keys=own_keys())
            channel.send(Kind.HELLO, {"lanes": 2})
            if i % 2:
                next_messages(channel)
                channel.send(Kind.FORWARD, {"x": torch.zeros(BIG)})
            channel.close()
            channel.close()
        assert _settles_at(before)


def test_failed_connections_leave_nothing_open() -> None:
    before = _resources()
    for _ in range(20):
        with pytest.raises(ChannelLost):
            DriverChannel("127.0.0.1", 1, keys=own_keys())
    assert _settles_at(before)


def test_closing_does_not_wait_for_a_peer_that_takes_nothing(process: tuple[int, int]) -> None:
    pid, port = process
    with greeted(port) as channel:
        os.kill(pid, signal.SIGSTOP)
        channel.send(Kind.FORWARD, {"x": torch.zeros(32 << 20)})
        began = time.monotonic()
    assert time.monotonic() - began < limits.CLOSE_LINGER_SECONDS + MARGIN


def test_a_closed_channel_says_that_it_is_closed() -> None:
    with echo_thread() as echo:
        with greeted(echo.port) as channel:
            pass
        with pytest.raises(ChannelLost, match="closed"):
            channel.send(Kind.FORWARD, {})
        with pytest.raises(ChannelLost, match="closed"):
            channel.receive(0)


class _Interrupt(BaseException):
    pass


def test_a_message_that_was_given_up_halfway_ends_the_channel(
    monkeypatch: pytest.MonkeyPatch, process: tuple[int, int]
) -> None:
    monkeypatch.setattr(limits, "LANE_QUEUE_MESSAGES", 2)

    def interrupt() -> None:
        raise _Interrupt

    with greeted(process[1]) as channel:
        os.kill(process[0], signal.SIGSTOP)
        with pytest.raises(_Interrupt):
            channel.send(Kind.FORWARD, {"x": torch.zeros(64 << 20)}, while_full=interrupt)
        with pytest.raises(ChannelLost, match="given up"):
            channel.send(Kind.CANCEL, {})


def test_a_taken_port_is_an_error_and_leaves_nothing_open() -> None:
    with echo_thread() as echo:
        before = _resources()
        context = zmq.Context()
        with pytest.raises(zmq.ZMQError):
            type(echo.channel)(context, ["127.0.0.1"], echo.port, own=own_identity())
        context.term()
        assert _settles_at(before)


def test_an_address_that_is_silent_does_not_hold_up_those_that_answer() -> None:
    """As when one half of a cable is unplugged; the same for each greeting."""
    with socket.create_server(("127.0.0.1", 0)) as answers, socket.socket() as silent:
        silent.bind(("127.0.0.3", 0))
        silent.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                each.connect(silent.getsockname())
        time.sleep(0.2)
        began = time.monotonic()
        ways = _reachable([Address(*silent.getsockname()), Address(*answers.getsockname())])
        assert time.monotonic() - began < limits.CONNECT_TIMEOUT - 0.5
        assert [way for way, _ in ways] == [f"tcp://127.0.0.1:{answers.getsockname()[1]}"]
        for each in waiting:
            each.close()
