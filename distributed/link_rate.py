"""Measures the link to a worker: round trip, rate of the channel's lanes, and what plain TCP carries beside it.

The driver's side; the worker answers ECHO messages and takes the TCP connections (see link_sink).
"""

from __future__ import annotations

import secrets
import socket
import statistics
import threading
import time
from collections import deque
from dataclasses import dataclass

import torch

from . import limits
from .link_sink import SECRET_BYTES
from .messages import Kind
from .peer import Peer, PeerFailed

_TRIPS = 50
_FIRST_BYTES = 256 * 1024
_WINDOW = 2
# Bytes per second below which a connection's usual buffer would take seconds to empty.
_SLOW_RATE = 50e6
_SLOW_BUFFER_BYTES = 64 * 1024


@dataclass(frozen=True)
class LinkRate:
    """rtt: seconds of a round trip (median). rate: bytes per second over all lanes, in the slower direction.

    tcp_rate: bytes per second to the worker over plain TCP connections; None, with the reason, if they did not work.
    """

    rtt: float
    lanes: int
    rate: float
    tcp_rate: float | None
    tcp_problem: str = ""


def measure_link(peer: Peer) -> LinkRate:
    """Measure the link to a worker that was greeted, in about two seconds. Raises PeerFailed."""
    rtt = _round_trip(peer)
    rate = min(_rate(peer, there=True), _rate(peer, there=False))
    tcp_rate, problem = None, ""
    try:
        tcp_rate = _tcp_rate(peer, slow=rate < _SLOW_RATE)
    except OSError as error:
        problem = f"plain TCP to it did not work ({error.strerror or error})"
    return LinkRate(rtt, peer.lanes, rate, tcp_rate, problem)


def _echo(peer: Peer, there: int, back: int) -> int:
    return peer.ask(Kind.ECHO, {"data": torch.zeros(there, dtype=torch.uint8), "bytes": back})


def _arrived(peer: Peer, ticket: int, back: int) -> None:
    data = peer.answer(ticket, Kind.ECHO).get("data")
    if not isinstance(data, torch.Tensor) or data.nbytes != back:
        raise PeerFailed(f"{peer.name} gave an answer that makes no sense")


def _round_trip(peer: Peer) -> float:
    _arrived(peer, _echo(peer, 0, 0), 0)
    trips: list[float] = []
    until = time.perf_counter() + limits.LINK_TEST_SECONDS
    while len(trips) < _TRIPS and (not trips or time.perf_counter() < until):
        began = time.perf_counter()
        _arrived(peer, _echo(peer, 0, 0), 0)
        trips.append(time.perf_counter() - began)
    return statistics.median(trips)


def _rate(peer: Peer, *, there: bool) -> float:
    """Bytes per second one way. Messages grow, so that a slow link is not waited for and a fast one is filled."""
    size, moved = _FIRST_BYTES, 0
    pending: deque[tuple[int, int]] = deque()
    began = time.perf_counter()
    while True:
        going_on = time.perf_counter() < began + limits.LINK_TEST_SECONDS
        while going_on and len(pending) < _WINDOW:
            pending.append((_echo(peer, size if there else 0, 0 if there else size), size))
        if not pending:
            return moved / (time.perf_counter() - began)
        ticket, sent = pending.popleft()
        _arrived(peer, ticket, 0 if there else sent)
        moved += sent
        size = min(2 * size, limits.ECHO_BYTES)


def _tcp_rate(peer: Peer, *, slow: bool) -> float:
    """Bytes per second to the worker over several plain TCP connections. Raises OSError if they do not work."""
    secret = secrets.token_bytes(SECRET_BYTES)
    port = peer.answer(peer.ask(Kind.SINK, {"secret": secret.hex()}), Kind.SINK).get("port")
    if type(port) is not int or not 0 < port < 65536:
        raise PeerFailed(f"{peer.name} gave an answer that makes no sense")
    ways = [address.host for address in peer.addresses]
    streams: list[_Stream] = []
    try:
        while len(streams) < limits.SINK_STREAMS:
            host = ways[len(streams) % len(ways)]
            try:
                streams.append(_Stream(host, port, secret, slow=slow))
            except OSError:
                ways.remove(host)
                if not ways:
                    raise
        began = time.perf_counter()
        for stream in streams:
            stream.start()
        for stream in streams:
            stream.join()
        seconds = time.perf_counter() - began
    finally:
        for stream in streams:
            stream.socket.close()
    for stream in streams:
        if stream.error is not None:
            raise stream.error
    return sum(stream.sent for stream in streams) / seconds


class _Stream(threading.Thread):
    """One connection that sends for LINK_TEST_SECONDS and waits until all of that was taken."""

    def __init__(self, host: str, port: int, secret: bytes, *, slow: bool) -> None:
        super().__init__(name="monarch-link-test", daemon=True)
        self.socket = socket.create_connection((host, port), timeout=limits.CONNECT_TIMEOUT)
        if slow:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SLOW_BUFFER_BYTES)
        self.sent = 0
        self.error: OSError | None = None
        self._secret = secret

    def run(self) -> None:
        block = bytes(limits.CHUNK_BYTES)
        try:
            self.socket.sendall(self._secret)
            until = time.perf_counter() + limits.LINK_TEST_SECONDS
            while time.perf_counter() < until:
                self.sent += self.socket.send(block)
            self.socket.shutdown(socket.SHUT_WR)
            self.socket.settimeout(limits.SINK_SECONDS)
            if self.socket.recv(1):
                raise OSError("something else answers at that port")
        except OSError as error:
            self.error = error
