"""The exchange engine over ZeroMQ lanes. exchange_link joins them."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import zmq
from zmq.utils.monitor import recv_monitor_message

from . import limits
from .exchange import Exchange, ExchangeFailed
from .layout import Span

# forward number, operation within the forward, chunk within the operation
_HEADER = struct.Struct("<QII")


@dataclass(frozen=True)
class Lane:
    """A way to one rank: a socket, and what it wants in front of each message (the identity, if it is a ROUTER).

    monitor: tells when the connection broke; the rank that connected has one.
    """

    socket: zmq.Socket[bytes]
    prefix: tuple[bytes, ...] = ()
    monitor: zmq.Socket[bytes] | None = None


class LaneExchange(Exchange):
    """An exchange over ZeroMQ sockets that are connected already; exchange_link makes them."""

    def __init__(
        self,
        rank: int,
        lanes: dict[int, list[Lane]],
        sources: dict[bytes, int],
        close: Callable[[], None],
        arrived: Sequence[list[zmq.Frame]] = (),
    ) -> None:
        """lanes: to every other rank. sources: rank by identity, for messages that come through a ROUTER.

        arrived: messages that a ROUTER received before this exchange was there to read them.
        """
        super().__init__(rank, len(lanes) + 1)
        self._lanes = lanes
        self._sources = sources
        self._close = close
        self._poller = zmq.Poller()
        self._rank_of: dict[zmq.Socket[bytes], int | None] = {}
        for peer, ways in lanes.items():
            for lane in ways:
                self._rank_of[lane.socket] = None if lane.prefix else peer
        for sock in self._rank_of:
            self._poller.register(sock, zmq.POLLIN)
        self._forward = 0
        self._operation = 0
        # What a faster rank has sent ahead, by (forward, operation).
        self._early: dict[tuple[int, int], list[tuple[int, int, memoryview]]] = {}
        self._early_bytes = 0
        self._staging: dict[tuple[int, str], torch.Tensor] = {}
        self._monitors = [lane.monitor for ways in lanes.values() for lane in ways if lane.monitor is not None]
        self._broken = False
        for frames in arrived:
            for message in self._parse(None, frames):
                self._keep(*message)

    def begin(self, forward: int) -> None:
        self._forward, self._operation = forward, 0
        for key in [key for key in self._early if key[0] < forward]:
            self._early_bytes -= sum(payload.nbytes for _, _, payload in self._early.pop(key))

    def settle(self) -> None:
        """Nothing here waits for another machine any more once an operation is over."""

    def close(self) -> None:
        self._close()

    # --- one operation --------------------------------------------------------------------------------------------

    def _start(
        self, buffers: Sequence[torch.Tensor], regions: Sequence[Sequence[Span]], to: list[int], of: list[int]
    ) -> Callable[[], None]:
        self._operation += 1
        memories = [self._memory(index, buffer) for index, buffer in enumerate(buffers)]
        if to:
            self._send(self._chunks(memories, regions[self.rank]), to)

        def finish() -> None:
            device = buffers[0].device
            computing = _event(device) if device.type == "cuda" else None
            began = time.perf_counter()
            self._receive({rank: self._chunks(memories, regions[rank]) for rank in of})
            # Nobody waited as long as the GPU had something to compute.
            if computing is None or computing.query():
                self.waiting += time.perf_counter() - began

        return finish

    def _memory(self, index: int, buffer: torch.Tensor) -> _Memory:
        """The memory that the network reads and writes for a buffer: its own on a CPU, else a staging buffer.

        Two of these take turns: what was sent from one has been received everywhere once the next operation is over.
        """
        own = buffer.view(torch.uint8).view(-1)
        row = own.numel() // max(1, buffer.shape[0])
        if buffer.device.type == "cpu":
            return _Memory(own.numpy().data, row)
        key = (index, "even" if self._operation % 2 else "odd")
        held = self._staging.get(key)
        if held is None or held.numel() < own.numel():
            held = torch.empty(own.numel(), dtype=torch.uint8, pin_memory=buffer.device.type == "cuda")
            self._staging[key] = held
        return _Memory(held.numpy().data, row, held, own)

    def _chunks(self, memories: list[_Memory], spans: Sequence[Span]) -> list[_Chunk]:
        """What one rank gives, cut alike on every rank: a part for each lane, unless they would be so small that
        messages cost more than they save, or so large that nobody copies one while the next is on its way.
        """
        total = sum((last - first) * memory.row for memory in memories for first, last in spans)
        lanes = len(next(iter(self._lanes.values())))
        parts = max(1, min(lanes, total // limits.EXCHANGE_MIN_CHUNK_BYTES))
        size = max(1, min(-(-total // parts), limits.EXCHANGE_CHUNK_BYTES))
        return [
            _Chunk(memory, start, min(start + size, last * memory.row))
            for memory in memories
            for first, last in spans
            for start in range(first * memory.row, last * memory.row, size)
        ]

    def _send(self, chunks: list[_Chunk], to: list[int]) -> None:
        copied = [chunk.memory.copy_out(chunk.start, chunk.stop) for chunk in chunks]
        for number, (chunk, done) in enumerate(zip(chunks, copied, strict=True)):
            if done is not None:
                done.synchronize()
            header = _HEADER.pack(self._forward, self._operation, number)
            payload = chunk.memory.host[chunk.start : chunk.stop]
            for rank in to:
                ways = self._lanes[rank]
                lane = ways[number % len(ways)]
                lane.socket.send_multipart([*lane.prefix, header, payload], copy=False)
                self.sent_bytes += payload.nbytes

    def _receive(self, expected: dict[int, list[_Chunk]]) -> None:
        missing = {(rank, number): chunk for rank, chunks in expected.items() for number, chunk in enumerate(chunks)}
        key = (self._forward, self._operation)

        def place(rank: int, number: int, payload: memoryview) -> None:
            chunk = missing.pop((rank, number), None)
            if chunk is None:
                raise ExchangeFailed("a machine sent a part that was not asked for")
            if payload.nbytes != chunk.stop - chunk.start:
                raise ExchangeFailed("a machine sent a part of another size than was agreed")
            chunk.memory.host[chunk.start : chunk.stop] = payload
            chunk.memory.copy_in(chunk.start, chunk.stop)
            self.received_bytes += payload.nbytes

        for rank, number, payload in self._early.pop(key, []):
            self._early_bytes -= payload.nbytes
            place(rank, number, payload)
        next_check = time.monotonic() + limits.POLL_SECONDS
        broken_at: float | None = None
        while missing:
            ready = self._poller.poll(int(limits.POLL_SECONDS * 1000))
            if not ready and self._is_broken():
                broken_at = broken_at or time.monotonic()
                # If it is the whole machine that is gone, `check` tells.
                if time.monotonic() > broken_at + limits.HEARTBEAT_TIMEOUT:
                    raise ExchangeFailed(
                        "a connection for the exchange of tokens broke; a firewall or tunnel may have closed the port "
                        "after the worker's own"
                    )
            # Not only when nothing came: a stranger may send without end.
            if time.monotonic() >= next_check:
                self.check()
                next_check = time.monotonic() + limits.POLL_SECONDS
            for sock, _ in ready:
                for rank, forward, operation, number, payload in self._read(sock):
                    if (forward, operation) == key:
                        place(rank, number, payload)
                    elif (forward, operation) > key:
                        self._keep(rank, forward, operation, number, payload)

    def _is_broken(self) -> bool:
        for monitor in self._monitors:
            while monitor.poll(0):
                self._broken |= recv_monitor_message(monitor)["event"] == zmq.EVENT_DISCONNECTED
        return self._broken

    def _read(self, sock: zmq.Socket[bytes]) -> Iterator[tuple[int, int, int, int, memoryview]]:
        for _ in range(limits.LANE_QUEUE_MESSAGES):
            try:
                frames = sock.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            yield from self._parse(self._rank_of[sock], frames)

    def _parse(self, rank: int | None, frames: list[zmq.Frame]) -> Iterator[tuple[int, int, int, int, memoryview]]:
        """(rank, forward, operation, chunk, bytes) of a message; nothing if it is a stranger's."""
        if rank is None:
            rank = self._sources.get(frames.pop(0).bytes)
        if rank is not None and len(frames) == 2 and len(frames[0]) == _HEADER.size:
            yield (rank, *_HEADER.unpack(frames[0].bytes), frames[1].buffer)

    def _keep(self, rank: int, forward: int, operation: int, number: int, payload: memoryview) -> None:
        self._early_bytes += payload.nbytes
        if self._early_bytes > limits.MAX_EARLY_CHUNK_BYTES:
            raise ExchangeFailed("a machine is too far ahead of this one")
        self._early.setdefault((forward, operation), []).append((rank, number, payload))


@dataclass(frozen=True)
class _Memory:
    """The bytes of one buffer in host memory, `row` of them a token; `staged` and `own` if the buffer is elsewhere."""

    host: memoryview
    row: int
    staged: torch.Tensor | None = None
    own: torch.Tensor | None = None

    def copy_out(self, start: int, stop: int) -> torch.cuda.Event | None:
        """Start copying bytes to the host; the event tells when they are there. None if they are."""
        if self.staged is None or self.own is None:
            return None
        self.staged[start:stop].copy_(self.own[start:stop], non_blocking=True)
        if self.own.device.type != "cuda":
            return None
        return _event(self.own.device)

    def copy_in(self, start: int, stop: int) -> None:
        """Start copying bytes from the host."""
        if self.staged is not None and self.own is not None:
            self.own[start:stop].copy_(self.staged[start:stop], non_blocking=True)


def _event(device: torch.device) -> torch.cuda.Event:
    """An event that comes when the device has done what was asked of it so far."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


class _Chunk(NamedTuple):
    """Bytes [start, stop) of a buffer."""

    memory: _Memory
    start: int
    stop: int
