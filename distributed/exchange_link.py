"""Joins the ranks of a token split over ZeroMQ: who listens, who connects, and how a rank proves which one it is.

Every worker listens behind one port; each rank connects to the ranks above it, so that nobody connects to the driver.
All ranks of an exchange have one key pair, which the driver made for it and told each over its own channel: only who
has it can connect and read what is said (CURVE). Over a link that the user trusts, its secret is a password (PLAIN) and
what is said is in the clear.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Sequence

import zmq

from . import limits
from .admission import RanksOnly
from .auth import DOMAIN, ChannelKeys, ExchangeKeys
from .channel import bind, configure, endpoint, show_key
from .exchange import ExchangeFailed
from .exchange_lanes import Lane, LaneExchange

_GREETING = b"exchange"
_USERNAME = b"rank"
# A rank that is joined sooner sends at most a tiny operation and waits.
_MAX_ARRIVED = 256
_MAX_LEFT = 65_536
SECRET_BYTES = 32


class ExchangeListener:
    """A worker's port for exchanges that have these keys. Used by one thread at a time."""

    def __init__(self, hosts: Sequence[str], port: int, keys: ExchangeKeys) -> None:
        """Listen on `port`, or on any free one if it is taken. Raises zmq.ZMQError if a host cannot be bound."""
        self.keys = keys
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=limits.EXCHANGE_LANES)
        self._admission = RanksOnly(self._context, keys)
        self._sock = self._context.socket(zmq.ROUTER)
        _configure(self._sock)
        if keys.encrypted:
            self._sock.set(zmq.CURVE_SERVER, 1)
            self._sock.set(zmq.CURVE_SECRETKEY, keys.pair.secret)
        else:
            self._sock.set(zmq.PLAIN_SERVER, 1)
        self._sock.set(zmq.ZAP_DOMAIN, DOMAIN)
        self._sock.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
        try:
            try:
                self.port = bind(self._sock, hosts, port)
            except zmq.ZMQError:
                self.port = bind(self._sock, hosts, 0)
        except zmq.ZMQError:
            self.close()
            raise

    def close(self) -> None:
        self._sock.close(linger=0)
        self._admission.close()
        self._context.term()

    def join(
        self, rank: int, addresses: Sequence[tuple[str, int] | None], secret: bytes, check: Callable[[], None]
    ) -> LaneExchange:
        """Become `rank` among ranks at `addresses`, None for the driver. Raises ExchangeFailed if one does not come."""
        lower = {_identity(secret, peer, lane): peer for peer in range(rank) for lane in range(limits.EXCHANGE_LANES)}
        context, lanes = _connect(rank, addresses, secret, self.keys)
        try:
            for identity, peer in lower.items():
                lanes.setdefault(peer, []).append(Lane(self._sock, (identity,)))
            arrived = self._await(set(lower), check)
        except BaseException:
            _close(context, lanes, self._sock)
            raise
        return LaneExchange(rank, lanes, lower, lambda: _close(context, lanes, self._sock), arrived)

    def _await(self, identities: set[bytes], check: Callable[[], None]) -> list[list[zmq.Frame]]:
        """Wait until all these have greeted. Returns what ranks that were joined sooner have sent meanwhile."""
        deadline = time.monotonic() + limits.EXCHANGE_JOIN_TIMEOUT
        arrived: list[list[zmq.Frame]] = []
        expected = frozenset(identities)
        while identities:
            check()
            if time.monotonic() > deadline:
                raise ExchangeFailed("the machines did not find each other for the exchange of tokens")
            if self._sock.poll(int(limits.POLL_SECONDS * 1000)):
                frames = self._sock.recv_multipart(copy=False)
                if frames[0].bytes not in expected:
                    continue  # a stranger, or the end of an earlier exchange
                if [frame.bytes for frame in frames[1:]] == [_GREETING]:
                    identities.discard(frames[0].bytes)
                elif len(arrived) < _MAX_ARRIVED:
                    arrived.append(frames)
        return arrived


def join_as_driver(addresses: Sequence[tuple[str, int] | None], secret: bytes, keys: ExchangeKeys) -> LaneExchange:
    """Connect rank 0 to the workers at `addresses`, whose first entry is None. Connecting goes on in the background.

    keys: those that the workers' listeners were opened with.
    """
    context, lanes = _connect(0, addresses, secret, keys)
    return LaneExchange(0, lanes, {}, lambda: _close(context, lanes, None))


def _connect(
    rank: int, addresses: Sequence[tuple[str, int] | None], secret: bytes, keys: ExchangeKeys
) -> tuple[zmq.Context[zmq.Socket[bytes]], dict[int, list[Lane]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=limits.EXCHANGE_LANES)
    lanes: dict[int, list[Lane]] = {}
    for peer in range(rank + 1, len(addresses)):
        address = addresses[peer]
        if address is None:
            raise ExchangeFailed("a machine of the token split has no address")
        for lane in range(limits.EXCHANGE_LANES):
            sock = context.socket(zmq.DEALER)
            _configure(sock)
            if keys.encrypted:
                show_key(sock, ChannelKeys(keys.pair, keys.pair.public))
            else:
                sock.set(zmq.PLAIN_USERNAME, _USERNAME)
                sock.set(zmq.PLAIN_PASSWORD, keys.pair.secret)
            sock.set(zmq.IDENTITY, _identity(secret, rank, lane))
            # Each lane has an I/O thread of its own.
            sock.set(zmq.AFFINITY, 1 << lane)
            # What was on its way is gone with a connection, so libzmq must not mend it quietly.
            sock.set(zmq.RECONNECT_IVL, -1)
            monitor = _connect_lane(sock, endpoint(*address))
            sock.send(_GREETING)
            lanes.setdefault(peer, []).append(Lane(sock, monitor=monitor))
    return context, lanes


def _configure(sock: zmq.Socket[bytes]) -> None:
    configure(sock)
    # The channel tells who is alive. Here a heartbeat may wait behind chunks that a slow link takes seconds for.
    sock.set(zmq.HEARTBEAT_IVL, 0)
    # What waits to be sent is the caller's own memory; a limit would only let two ranks wait for each other.
    sock.set(zmq.SNDHWM, 0)
    sock.set(zmq.MAXMSGSIZE, limits.EXCHANGE_CHUNK_BYTES + 1024)


def _connect_lane(sock: zmq.Socket[bytes], address: str) -> zmq.Socket[bytes]:
    """Connect, and give it a moment to get there; it goes on in the background. Returns its monitor.

    The other side's socket gives each connection to the I/O thread with the fewest. Those that came at once would all
    go to the same.
    """
    monitor = sock.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
    sock.connect(address)
    monitor.poll(int(limits.POLL_SECONDS * 1000))
    return monitor


def _identity(secret: bytes, rank: int, lane: int) -> bytes:
    """What a rank calls itself on a lane. Only who was told the secret knows it."""
    return b"X" + hashlib.blake2b(f"{rank}/{lane}".encode(), key=secret, digest_size=31).digest()


def _close(
    context: zmq.Context[zmq.Socket[bytes]], lanes: dict[int, list[Lane]], shared: zmq.Socket[bytes] | None
) -> None:
    for ways in lanes.values():
        for lane in ways:
            if lane.socket is not shared:
                with contextlib.suppress(zmq.ZMQError):
                    lane.socket.disable_monitor()
                if lane.monitor is not None:
                    lane.monitor.close(linger=0)
                with contextlib.suppress(zmq.ZMQError):
                    lane.socket.close(linger=0)
    context.term()
    if shared is not None:
        # What the others had sent before they heard of the end would stay in memory until the next exchange.
        with contextlib.suppress(zmq.Again):
            for _ in range(_MAX_LEFT):
                shared.recv_multipart(zmq.NOBLOCK, copy=False)
