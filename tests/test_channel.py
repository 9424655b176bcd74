"""Messages over real sockets: whole, in order, bit for bit; hostile neighbours and slow readers change nothing.

Losing the other side is in test_channel_loss.
"""

from __future__ import annotations

import gc
import random
import socket
import struct
import threading
import time
from typing import Any

import pytest
import torch
import zmq

from monarch_split.distributed import limits
from monarch_split.distributed.channel import Assembler
from monarch_split.distributed.codec import ProtocolError, encode
from monarch_split.distributed.driver_channel import DriverChannel
from monarch_split.distributed.messages import FROM_DRIVER, Kind, Message
from monarch_split.distributed.worker_channel import WorkerChannel
from monarch_split.tests.channel_peer import ask, echo_thread, greeted, next_messages

BIG = limits.INLINE_BYTES + 1000


def noise(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


# --- order and content ------------------------------------------------------------------------------------------------


def test_messages_of_any_size_arrive_in_order_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CHUNK_BYTES", 1 << 16)
    sizes = [random.Random(1).choice([0, 1, 1000, BIG, 3 * BIG]) for _ in range(150)]
    with echo_thread() as echo, greeted(echo.port) as channel:
        for i, size in enumerate(sizes):
            channel.send(Kind.FORWARD, {"i": i, "x": noise(size, i)})
        answers: list[Message] = []
        while len(answers) < len(sizes):
            answers += next_messages(channel)
    assert [answer.body["i"] for answer in answers] == list(range(len(sizes)))
    for i, answer in enumerate(answers):
        assert torch.equal(answer.body["x"], noise(sizes[i], i))


@pytest.mark.parametrize("lanes", [1, 2, 5])
def test_large_tensors_are_striped_over_every_lane(lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[int, int] = {}
    stock = WorkerChannel._accept

    def accept(self: Any, identity: bytes, frames: list[memoryview], user: str) -> bytes | None:
        seen[identity[-1]] = seen.get(identity[-1], 0) + sum(frame.nbytes for frame in frames)
        return stock(self, identity, frames, user)

    monkeypatch.setattr(WorkerChannel, "_accept", accept)
    big = noise(20 * limits.CHUNK_BYTES + 17)
    with echo_thread() as echo, greeted(echo.port, lanes=lanes) as channel:
        answer = ask(channel, x=big, small=torch.ones(3))
    assert torch.equal(answer["x"], big)
    assert sorted(seen) == list(range(lanes + 1))
    assert seen[0] < limits.INLINE_BYTES
    assert min(seen[lane] for lane in range(1, lanes + 1)) >= 20 // lanes * limits.CHUNK_BYTES


def test_what_was_sent_may_be_freed_and_its_memory_reused_at_once() -> None:
    with echo_thread() as echo, greeted(echo.port) as channel:
        echo.paused.set()
        for i in range(8):
            channel.send(Kind.FORWARD, {"x": noise(4 << 20, i)})
        gc.collect()
        overwritten = [torch.full((4 << 20,), 255, dtype=torch.uint8) for _ in range(8)]
        echo.paused.clear()
        answers: list[Message] = []
        while len(answers) < 8:
            answers += next_messages(channel)
        del overwritten
    assert all(torch.equal(answer.body["x"], noise(4 << 20, i)) for i, answer in enumerate(answers))


@pytest.mark.parametrize("nbytes", [4, 1000, limits.INLINE_BYTES, 32 << 20])
def test_a_snapshot_may_be_written_into_at_once(nbytes: int) -> None:
    with echo_thread() as echo, greeted(echo.port) as channel:
        x = noise(nbytes)
        channel.send(Kind.FORWARD, {"x": x}, snapshot=True)
        x.zero_()
        assert torch.equal(next_messages(channel)[0].body["x"], noise(nbytes))


def test_two_drivers_do_not_see_each_others_messages() -> None:
    with echo_thread() as echo, greeted(echo.port) as one, greeted(echo.port) as two:
        for i in range(10):
            one.send(Kind.FORWARD, {"who": 1, "x": noise(BIG, i)})
            two.send(Kind.FORWARD, {"who": 2, "x": noise(BIG, i)})
        for channel, who in ((one, 1), (two, 2)):
            answers: list[Message] = []
            while len(answers) < 10:
                answers += next_messages(channel)
            assert {answer.body["who"] for answer in answers} == {who}


def test_a_channel_may_be_handed_from_thread_to_thread() -> None:
    with echo_thread() as echo, greeted(echo.port) as channel:
        for i in range(5):
            sender = threading.Thread(target=channel.send, args=(Kind.FORWARD, {"x": noise(BIG, i)}))
            sender.start()
            sender.join()
            assert torch.equal(next_messages(channel)[0].body["x"], noise(BIG, i))


def test_a_name_whose_first_address_does_not_answer_is_reached_at_its_second(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = socket.getaddrinfo

    def both(host: str, port: int, *rest: Any) -> list[Any]:
        if host != "worker.lan":
            return stock(host, port, *rest)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port)) for ip in ("127.0.0.2", "127.0.0.1")]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    with echo_thread() as echo, greeted(echo.port, host="worker.lan") as channel:
        assert ask(channel, a=1) == {"a": 1}


def test_a_reader_that_is_busy_while_much_arrives_is_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LANE_QUEUE_MESSAGES", 8)
    monkeypatch.setattr(limits, "CHUNK_BYTES", 1 << 16)
    with echo_thread() as echo, greeted(echo.port) as channel:
        echo.paused.set()
        channel.send(Kind.FORWARD, {"x": noise(64 << 20)})
        deadline = time.monotonic() + 2.5
        while time.monotonic() < deadline:
            assert channel.receive(0.05) == []
        echo.paused.clear()
        assert torch.equal(next_messages(channel)[0].body["x"], noise(64 << 20))


def test_a_driver_that_does_not_read_for_long_keeps_its_worker() -> None:
    with echo_thread() as echo, greeted(echo.port) as channel:
        (session,) = echo.channel._sessions
        echo.paused.set()
        time.sleep(0.1)
        for _ in range(4 * limits.LANE_QUEUE_MESSAGES):
            echo.channel.send(session, Kind.PROBE, {})
        echo.paused.clear()
        time.sleep(2)
        assert ask(channel, still="here") == {"still": "here"}


# --- chunks and headers out of step -----------------------------------------------------------------------------------


def _parts(number: int, nbytes: int = BIG) -> tuple[list[memoryview], list[list[memoryview]]]:
    encoded = encode(Message(Kind.FORWARD, number, {"x": noise(nbytes, number)}))
    chunks = [
        [
            memoryview(struct.pack("<4sBxHIQQ", b"MNRC", 1, 0, index, number, offset)),
            view[offset : offset + limits.CHUNK_BYTES],
        ]
        for index, view in encoded.chunked
        for offset in range(0, view.nbytes, limits.CHUNK_BYTES)
    ]
    return [memoryview(bytes(frame)) for frame in encoded.control], chunks


def test_chunks_that_overtake_their_header_wait_for_it() -> None:
    assembler = Assembler(FROM_DRIVER)
    parts = {number: _parts(number, 3 << 20) for number in (1, 2, 3)}
    for number in (3, 1, 2):
        for chunk in reversed(parts[number][1][1:]):
            assembler.data(chunk)
    for number in (1, 2, 3):
        assembler.control(parts[number][0])
    assert list(assembler.take()) == []
    assembler.data(parts[2][1][0])
    assert list(assembler.take()) == []
    assembler.data(parts[1][1][0])
    assert [message.number for message in assembler.take()] == [1, 2]
    assembler.data(parts[3][1][0])
    (last,) = assembler.take()
    assert torch.equal(last.body["x"], noise(3 << 20, 3))


@pytest.mark.parametrize("nbytes", [0, 1, 1000])
def test_early_chunks_are_bounded_however_small_they_are(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_EARLY_CHUNK_BYTES", 1 << 20)
    assembler = Assembler(FROM_DRIVER)

    def flood() -> None:
        for number in range(1, 1000):
            prefix = struct.pack("<4sBxHIQQ", b"MNRC", 1, 0, 0, number, 0)
            assembler.data([memoryview(prefix), memoryview(bytes(nbytes))])

    with pytest.raises(ProtocolError, match="without their message"):
        flood()


def test_headers_whose_chunks_never_come_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_PENDING_BYTES", 4 * BIG)
    assembler = Assembler(FROM_DRIVER)
    for number in (1, 2, 3):
        assembler.control(_parts(number)[0])
    with pytest.raises(ProtocolError):
        assembler.control(_parts(4)[0])


def test_what_is_complete_makes_room_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_PENDING_BYTES", 2 * BIG)
    monkeypatch.setattr(limits, "MAX_EARLY_CHUNK_BYTES", 2 * BIG)
    assembler = Assembler(FROM_DRIVER)
    for number in range(1, 50):
        control, chunks = _parts(number)
        for chunk in chunks:
            assembler.data(chunk)
        assembler.control(control)
        assert len(list(assembler.take())) == 1


@pytest.mark.parametrize("numbers", [(1, 1), (2, 1)], ids=str)
def test_numbers_that_do_not_rise_are_refused(numbers: tuple[int, int]) -> None:
    assembler = Assembler(FROM_DRIVER)
    assembler.control(_parts(numbers[0])[0])
    with pytest.raises(ProtocolError, match="out of order"):
        assembler.control(_parts(numbers[1])[0])


def test_a_chunk_of_a_finished_message_is_refused() -> None:
    assembler = Assembler(FROM_DRIVER)
    control, chunks = _parts(1)
    assembler.control(control)
    for chunk in chunks:
        assembler.data(chunk)
    list(assembler.take())
    with pytest.raises(ProtocolError, match="complete"):
        assembler.data(chunks[0])


# --- several threads at the worker's end ------------------------------------------------------------------------------


def test_what_came_before_another_thread_sent_is_not_left_waiting() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    worker = WorkerChannel(context, ["127.0.0.1"], 0, own=None)
    driver = DriverChannel("127.0.0.1", worker.port, lanes=1, keys=None)
    try:
        driver.send(Kind.HELLO, {"lanes": 1})
        deadline = time.monotonic() + 10
        while not (messages := worker.receive()):
            assert time.monotonic() < deadline
            worker.wait(0.05)
        session = messages[0][0]
        worker.admit(session)
        for i in range(5):
            driver.send(Kind.FORWARD, {"i": i})
            time.sleep(0.1)
            sender = threading.Thread(target=worker.send, args=(session, Kind.PROBE, {}))
            sender.start()
            sender.join()
            began = time.monotonic()
            worker.wait(10)
            assert time.monotonic() - began < 5
            assert [message.body["i"] for _, message in worker.receive()] == [i]
    finally:
        driver.close()
        worker.close()
        context.term()
