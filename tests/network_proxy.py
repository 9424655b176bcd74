"""A network between a driver and a worker that breaks as its test says: a TCP proxy on a loopback address of its own.

It stands at the worker's port and at the next one, which token splits use, so that nothing gets past it.
"""

from __future__ import annotations

import contextlib
import random
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

_READ_BYTES = 64 * 1024
_TICK = 0.002
# What a connection sends before it is the next one's turn, where they share a rate.
_TURN_BYTES = 1500
_TURNS = 4
# What is on its way at most, as in a real network: then the sender has to wait.
_WINDOW_BYTES = 1 << 20
_CLOSE_WITH_RESET = struct.pack("ii", 1, 0)
TO_WORKER, TO_DRIVER = "to the worker", "to the driver"


@dataclass(eq=False)
class _Way:
    """One direction of a connection."""

    name: str
    source: socket.socket
    target: socket.socket
    # (when it may arrive, bytes)
    queue: deque[tuple[float, bytes]] = field(default_factory=deque)
    size: int = 0
    ended: bool = False


class NetworkProxy:
    """Forwards what comes to `address` to a worker on 127.0.0.1, until told otherwise."""

    def __init__(self, port: int, host: str) -> None:
        self.address = f"{host}:{port}"
        self._lock = threading.Lock()
        self._dropped: set[str] = set()
        self._delay = 0.0
        # All that passes, in both directions, if somebody listens.
        self.captured: bytearray | None = None
        self._rate = float("inf")
        self._allowance = {TO_WORKER: 0.0, TO_DRIVER: 0.0}
        self._ways: list[_Way] = []
        self._selector = selectors.DefaultSelector()
        self._stopping = False
        self._port = port
        self._listeners = {at: socket.create_server((host, at), backlog=64) for at in (port, port + 1)}
        for at, listener in self._listeners.items():
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, at)
        self._thread = threading.Thread(target=self._run, name="network-proxy")
        self._thread.start()

    # --- how the network is ---------------------------------------------------------------------------------------

    def heal(self) -> None:
        """Let everything pass; what was held back arrives now, as TCP would have it."""
        with self._lock:
            self._dropped, self._delay, self._rate = set(), 0.0, float("inf")

    def pull_the_cable(self) -> None:
        """Nothing arrives any more in either direction, and nobody is told."""
        self.drop(TO_WORKER, TO_DRIVER)

    def drop(self, *directions: str) -> None:
        """Nothing arrives any more in these directions, and nobody is told."""
        with self._lock:
            self._dropped = set(directions)

    def delay(self, seconds: float) -> None:
        """Everything takes so much longer, there and back together."""
        with self._lock:
            self._delay = seconds / 2

    def throttle(self, bytes_per_second: float) -> None:
        """Each direction carries no more than this, over all connections."""
        with self._lock:
            self._rate = bytes_per_second

    def close_token_port(self) -> None:
        """Nothing listens at the port of token splits any more."""
        with self._lock:
            for key in list(self._selector.get_map().values()):
                if key.data != self._port:
                    self._selector.unregister(key.fileobj)
                    self._listeners[key.data].close()

    def reset(self) -> None:
        """Break every connection with a RST, as a router does that has forgotten them."""
        with self._lock:
            for way in self._ways:
                way.source.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _CLOSE_WITH_RESET)
            while self._ways:
                self._close(self._ways[0])

    def reset_tokens(self) -> None:
        """Break the connections to the port of token splits, and no others."""
        with self._lock:
            for way in [way for way in self._ways if self._port not in _ports(way)]:
                if way in self._ways:
                    way.source.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _CLOSE_WITH_RESET)
                    self._close(way)

    def close(self) -> None:
        self._stopping = True
        self._thread.join(10)
        assert not self._thread.is_alive()
        for each in (*self._listeners.values(), *(way.source for way in self._ways)):
            each.close()
        self._selector.close()

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        last = time.monotonic()
        while not self._stopping:
            # Only new connections end the wait: a way that is full or cut would be ready all the time.
            ready = self._selector.select(_TICK)
            with self._lock:
                now = time.monotonic()
                for name in self._allowance:
                    self._allowance[name] = min(self._allowance[name] + self._rate * (now - last), self._rate / 20)
                last = now
                for key, _ in ready:
                    self._accept(key.data)
                for _ in range(_TURNS):
                    for way in list(self._ways):
                        if way in self._ways:
                            self._move(way, now)

    def _accept(self, port: int) -> None:
        # Closed since, or the driver has gone again.
        with contextlib.suppress(OSError):
            driver, _ = self._listeners[port].accept()
            worker = socket.socket()
            try:
                worker.connect(("127.0.0.1", port))
            except OSError:
                driver.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _CLOSE_WITH_RESET)
                driver.close()
                worker.close()
                return
            for each in (driver, worker):
                each.setblocking(False)
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._ways += [_Way(TO_WORKER, driver, worker), _Way(TO_DRIVER, worker, driver)]

    def _move(self, way: _Way, now: float) -> None:
        if way.name in self._dropped:
            return
        try:
            while not way.ended and way.size < _WINDOW_BYTES:
                data = way.source.recv(_READ_BYTES)
                if self.captured is not None:
                    self.captured += data
                way.ended = not data
                way.queue.append((now + self._delay, data))
                way.size += len(data)
        except BlockingIOError:
            pass
        except OSError:
            self._close(way)
            return
        try:
            self._send(way, now)
        except BlockingIOError:
            pass
        except OSError:
            self._close(way)
            return
        if way.ended and not way.queue and all(each.ended and not each.queue for each in self._both(way)):
            self._close(way)

    def _send(self, way: _Way, now: float) -> None:
        # Short turns could not fill a fast link.
        budget = int(min(max(_TURN_BYTES, self._rate * _TICK / 2), _WINDOW_BYTES))
        while way.queue and way.queue[0][0] <= now and self._allowance[way.name] > 0 and budget > 0:
            due, data = way.queue[0]
            if not data:
                way.target.shutdown(socket.SHUT_WR)
                way.queue.popleft()
                continue
            sent = way.target.send(data[:budget])
            budget -= sent
            way.size -= sent
            self._allowance[way.name] -= sent
            if sent == len(data):
                way.queue.popleft()
            else:
                way.queue[0] = (due, data[sent:])

    def _both(self, way: _Way) -> list[_Way]:
        return [each for each in self._ways if each is way or each.source is way.target]

    def _close(self, way: _Way) -> None:
        """Close a connection, both directions of it."""
        for each in self._both(way):
            self._ways.remove(each)
        way.source.close()
        way.target.close()


def _ports(way: _Way) -> set[int]:
    return {end for sock in (way.source, way.target) for end in (sock.getsockname()[1], sock.getpeername()[1])}


def port_with_a_neighbour() -> int:
    """A port that is free together with the next one, outside of the range from which connections take theirs."""
    dice = random.Random()
    while True:
        port = dice.randrange(10_000, 30_000)
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for host in ("127.0.0.1", "127.0.0.2"):
                for each in (port, port + 1):
                    stack.enter_context(socket.create_server((host, each)))
            return port


@contextlib.contextmanager
def network_to(port: int, host: str = "127.0.0.2") -> Iterator[NetworkProxy]:
    """A network, entered at `host`, before the worker that listens on this port of 127.0.0.1."""
    proxy = NetworkProxy(port, host)
    try:
        yield proxy
    finally:
        proxy.close()
