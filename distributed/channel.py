"""TensorChannel: ordered messages between a driver and a worker over one control lane and several data lanes.

A lane is one ZeroMQ socket on the driver's side (driver_channel); the worker has one ROUTER behind one port
(worker_channel). All are encrypted and know who is at the other end (CURVE) before a message is read; admission says
who may come in. Heartbeats are ZeroMQ's own PING and PONG: libzmq's I/O thread answers them, so a side that computes or
holds the GIL is never taken for dead. This file is what both ends have in common.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterator, Sequence

import zmq

from . import limits
from .auth import DOMAIN, ChannelKeys, KeyPair
from .codec import Encoded, PartialMessage, ProtocolError, chunk_prefix, parse_chunk_prefix
from .messages import Kind, Message
from .receive_buffers import ReceiveBuffers

# What names a session, in front of the number of each of its lanes.
SESSION_BYTES = 8
# On a data lane, the first frame that tells the worker which lanes a session has.
LANE_READY = b"lane"
# Of a client whose key a worker does not let in.
UNKNOWN_KEY = "does not know this machine's key"


class ChannelLost(ConnectionError):
    """The other side is gone or silent; the message says which and how it was noticed."""


def configure(sock: zmq.Socket[bytes]) -> None:
    """Options of every socket between machines: heartbeats, no lingering, no frame larger than the protocol has."""
    sock.set(zmq.LINGER, 0)
    sock.set(zmq.SNDHWM, limits.LANE_QUEUE_MESSAGES)
    # No limit: libzmq stops reading heartbeats too when this queue is full, and would take a busy side for a dead one.
    # What an honest side sends ahead is bounded by the protocol.
    sock.set(zmq.RCVHWM, 0)
    sock.set(zmq.HEARTBEAT_IVL, int(limits.HEARTBEAT_INTERVAL * 1000))
    sock.set(zmq.HEARTBEAT_TIMEOUT, int(limits.HEARTBEAT_TIMEOUT * 1000))
    sock.set(zmq.HANDSHAKE_IVL, int(limits.HANDSHAKE_TIMEOUT * 1000))
    sock.set(zmq.IPV6, 1)
    sock.set(zmq.SNDBUF, limits.SOCKET_BUFFER_BYTES)
    sock.set(zmq.RCVBUF, limits.SOCKET_BUFFER_BYTES)
    # No single frame is larger than a header or a chunk; libzmq refuses others before it allocates.
    sock.set(zmq.MAXMSGSIZE, limits.MAX_HEADER_BYTES + 1024)


def show_key(sock: zmq.Socket[bytes], keys: ChannelKeys) -> None:
    """Have a socket that connects prove its own key, and the other side the key of the server."""
    sock.set(zmq.CURVE_PUBLICKEY, keys.own.public)
    sock.set(zmq.CURVE_SECRETKEY, keys.own.secret)
    sock.set(zmq.CURVE_SERVERKEY, keys.server)


def require_key(sock: zmq.Socket[bytes], own: KeyPair) -> None:
    """Have a socket that binds prove its own key, and let in whom the context's Doorkeeper knows."""
    sock.set(zmq.CURVE_SERVER, 1)
    sock.set(zmq.CURVE_SECRETKEY, own.secret)
    sock.set(zmq.ZAP_DOMAIN, DOMAIN)
    # Without a Doorkeeper nobody is let in, rather than everybody.
    sock.set(zmq.ZAP_ENFORCE_DOMAIN, 1)


def endpoint(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def reach(host: str, port: int, address: str) -> str:
    """The IP address of `host` that accepts connections. Raises ChannelLost with the operating system's word.

    ZeroMQ connects in the background, says little, and tries only the first address of a name.
    """
    try:
        with socket.create_connection((host, port), timeout=limits.CONNECT_TIMEOUT) as probe:
            return socket.getnameinfo(probe.getpeername(), socket.NI_NUMERICHOST)[0]
    except ConnectionRefusedError:
        raise ChannelLost(f"nothing listens at {address}; start the worker there") from None
    except TimeoutError:
        raise ChannelLost(f"{address} does not answer; check the address, the cable and the firewall") from None
    except (socket.gaierror, ValueError):  # ValueError: no name at all, such as one with empty or overlong labels
        raise ChannelLost(f"the name {host!r} is not known; check the address in the configuration") from None
    except OSError as error:
        raise ChannelLost(f"{address} cannot be reached ({error.strerror or error})") from None


def bind(sock: zmq.Socket[bytes], hosts: Sequence[str], port: int) -> int:
    """Bind a socket to the same port of all hosts; 0 takes a free one. Returns it. Raises zmq.ZMQError."""
    for host in hosts:
        sock.bind(endpoint(host, port))
        port = int(sock.get_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])
    return port


class Assembler:
    """Puts messages together from frames that arrive on several lanes, in the order of their headers."""

    def __init__(self, allowed: frozenset[Kind], max_bytes: int = limits.MAX_MESSAGE_BYTES) -> None:
        self._allowed = allowed
        self._max_bytes = max_bytes
        self._buffers = ReceiveBuffers()
        self._pending: deque[PartialMessage] = deque()
        self._pending_bytes = 0
        self._early: dict[int, list[tuple[int, int, memoryview]]] = {}
        self._early_bytes = 0
        self._last_number = 0
        self.received_bytes = 0

    @property
    def heard(self) -> bool:
        """Whether any message was understood so far."""
        return self._last_number > 0

    def allow(self, kinds: frozenset[Kind], max_bytes: int) -> None:
        """Accept messages of `kinds` with up to `max_bytes` of tensors from now on."""
        self._allowed, self._max_bytes = kinds, max_bytes

    def control(self, frames: list[memoryview]) -> None:
        """Take the frames of a control lane message. Raises ProtocolError."""
        if not self._max_bytes and frames[0].nbytes > limits.MAX_HELLO_BYTES:
            raise ProtocolError("a greeting is too long")
        room = max(0, limits.MAX_PENDING_BYTES - self._pending_bytes)
        partial = PartialMessage(frames, self._allowed, min(self._max_bytes, room), self._buffers.take)
        if partial.number <= self._last_number:
            raise ProtocolError("messages came out of order")
        self._last_number = partial.number
        self._pending_bytes += partial.cost
        if self._pending_bytes > limits.MAX_PENDING_BYTES:
            raise ProtocolError("too many messages are not complete")
        for index, offset, payload in self._early.pop(partial.number, []):
            self._early_bytes -= payload.nbytes + limits.KEEPING_BYTES
            partial.add_chunk(index, offset, payload)
        self._pending.append(partial)

    def data(self, frames: list[memoryview]) -> None:
        """Take the frames of one chunk. Raises ProtocolError."""
        if len(frames) != 2:
            raise ProtocolError("a chunk has a wrong number of frames")
        number, index, offset = parse_chunk_prefix(frames[0])
        for partial in self._pending:
            if partial.number == number:
                partial.add_chunk(index, offset, frames[1])
                return
        if number <= self._last_number:
            raise ProtocolError("a chunk belongs to a message that is complete")
        self._early_bytes += frames[1].nbytes + limits.KEEPING_BYTES
        if self._early_bytes > min(limits.MAX_EARLY_CHUNK_BYTES, self._max_bytes):
            raise ProtocolError("too many chunks came without their message")
        self._early.setdefault(number, []).append((index, offset, frames[1]))

    def take(self) -> Iterator[Message]:
        """Messages that are complete, in order."""
        while self._pending and self._pending[0].complete:
            partial = self._pending.popleft()
            self._pending_bytes -= partial.cost
            self.received_bytes += partial.nbytes
            yield partial.message()


def chunks(encoded: Encoded) -> Iterator[tuple[bytes, memoryview]]:
    for index, view in encoded.chunked:
        for offset in range(0, view.nbytes, limits.CHUNK_BYTES):
            yield chunk_prefix(encoded.number, index, offset), view[offset : offset + limits.CHUNK_BYTES]


def buffers(frames: list[zmq.Frame]) -> list[memoryview]:
    return [frame.buffer for frame in frames]


def is_readable(sock: zmq.Socket[bytes]) -> bool:
    return bool(int(sock.get(zmq.EVENTS)) & zmq.POLLIN)
