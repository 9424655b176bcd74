"""TensorChannel: ordered messages between a driver and a worker over one control lane and several data lanes.

A lane is one ZeroMQ socket on the driver's side; the worker has one ROUTER behind one port. All are encrypted and know
who is at the other end (CURVE) before a message is read; admission says who may come in. Heartbeats are ZeroMQ's own
PING and PONG: libzmq's I/O thread answers them, so a side that computes or holds the GIL is never taken for dead.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from . import limits
from .addresses import Address
from .auth import DOMAIN, PAIRING, ChannelKeys, KeyPair
from .codec import Encoded, PartialMessage, ProtocolError, chunk_prefix, encode, parse_chunk_prefix
from .messages import FROM_DRIVER, FROM_WORKER, Kind, Message

_SESSION_BYTES = 8
_GONE = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_GONE |= zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
# On a data lane, the first frame that tells the worker which lanes a session has.
_LANE_READY = b"lane"


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


class Assembler:
    """Puts messages together from frames that arrive on several lanes, in the order of their headers."""

    def __init__(self, allowed: frozenset[Kind], max_bytes: int = limits.MAX_MESSAGE_BYTES) -> None:
        self._allowed = allowed
        self._max_bytes = max_bytes
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
        partial = PartialMessage(frames, self._allowed, min(self._max_bytes, room))
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


def _chunks(encoded: Encoded) -> Iterator[tuple[bytes, memoryview]]:
    for index, view in encoded.chunked:
        for offset in range(0, view.nbytes, limits.CHUNK_BYTES):
            yield chunk_prefix(encoded.number, index, offset), view[offset : offset + limits.CHUNK_BYTES]


def _buffers(frames: list[zmq.Frame]) -> list[memoryview]:
    return [frame.buffer for frame in frames]


def _is_readable(sock: zmq.Socket[bytes]) -> bool:
    return bool(int(sock.get(zmq.EVENTS)) & zmq.POLLIN)


class DriverChannel:
    """The driver's end. Used by one thread at a time; closing it releases every socket and I/O thread."""

    def __init__(
        self,
        host: str,
        port: int,
        lanes: int = limits.DATA_LANES,
        *,
        keys: ChannelKeys | None,
        more: Sequence[Address] = (),
    ) -> None:
        """Connect to a worker. Raises ChannelLost with the cause if nothing accepts a connection there.

        keys: None leaves the channel in the clear, for measurements. more: other addresses of the same worker; lanes
        are spread over all that answer.
        """
        self.address = f"{host}:{port}"
        self._keys = keys
        endpoints = _reachable([Address(host, port), *more])
        self.lanes = lanes
        self.lost: str | None = None
        self.sent_bytes = 0
        self._number = 0
        self._assembler = Assembler(FROM_WORKER)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=max(1, lanes))
        self._poller = zmq.Poller()
        self._monitors: list[zmq.Socket[bytes]] = []
        self._sockets: list[zmq.Socket[bytes]] = []
        session = b"M" + os.urandom(_SESSION_BYTES - 1)
        try:
            for lane in range(lanes + 1):
                way, trip = endpoints[max(0, lane - 1) % len(endpoints)]
                self._add_lane(way, trip, session + bytes([lane]), is_data=lane > 0)
        except BaseException:
            self.close()
            raise

    def _add_lane(self, endpoint: str, trip: float, identity: bytes, *, is_data: bool) -> None:
        sock = self._context.socket(zmq.DEALER)
        self._sockets.append(sock)
        configure(sock)
        if self._keys is not None:
            show_key(sock, self._keys)
        sock.set(zmq.IDENTITY, identity)
        # A lane that breaks ends the channel: chunks may have gone with it, so libzmq must not mend it quietly.
        sock.set(zmq.RECONNECT_IVL, -1)
        sock.set(zmq.CONNECT_TIMEOUT, int(limits.CONNECT_TIMEOUT * 1000))
        sock.set(zmq.HANDSHAKE_IVL, int((limits.CONNECT_TIMEOUT + limits.HANDSHAKE_TRIPS * trip) * 1000))
        monitor = sock.get_monitor_socket(_GONE)
        self._monitors.append(monitor)
        self._poller.register(sock, zmq.POLLIN)
        sock.connect(endpoint)
        if is_data:
            # Without waiting: a lane that has failed by now takes nothing, ever.
            self._send(sock, [_LANE_READY], None, copy=True)

    @property
    def received_bytes(self) -> int:
        return self._assembler.received_bytes

    def send(
        self,
        kind: Kind,
        body: dict[str, object],
        *,
        snapshot: bool = False,
        while_full: Callable[[], None] | None = None,
    ) -> int:
        """Send one message and return its number.

        `snapshot`: its tensors may be written into once this returns; otherwise never. `while_full` is called while a
        lane's queue is full; it may raise to give up. Raises ChannelLost, and what codec.encode raises.
        """
        self._require_open()
        self._number += 1
        encoded = encode(Message(kind, self._number, dict(body)), snapshot=snapshot)
        control, *data = self._sockets
        try:
            # Copied: for small frames that costs less than having libzmq give the memory back.
            self._send(control, encoded.control, while_full, copy=True)
            for turn, chunk in enumerate(_chunks(encoded)):
                self._send(data[turn % len(data)], list(chunk), while_full, copy=False)
        except BaseException:
            # The other side would wait for the rest of this message before it looks at any later one.
            self.lost = self.lost or f"sending to the worker at {self.address} was given up"
            raise
        self.sent_bytes += encoded.nbytes
        return self._number

    def _require_open(self) -> None:
        if not self._sockets:
            raise ChannelLost(self.lost or f"the channel to the worker at {self.address} is closed")

    def _send(
        self, sock: zmq.Socket[bytes], frames: list[Any], while_full: Callable[[], None] | None, *, copy: bool
    ) -> None:
        stalled = time.monotonic() + limits.STALL_TIMEOUT
        while True:
            if self.lost:
                raise ChannelLost(self.lost)
            try:
                sock.send_multipart(frames, flags=zmq.NOBLOCK, copy=copy)
                return
            except zmq.Again:
                if while_full:
                    while_full()
                # Reading does not wait here; it only notices that the other side is gone.
                self._read_monitors()
                sock.poll(int(limits.POLL_SECONDS * 1000), zmq.POLLOUT)
                if time.monotonic() > stalled:
                    raise ChannelLost(f"the worker at {self.address} takes no more data") from None

    def receive(self, timeout: float) -> list[Message]:
        """Messages that are complete, waiting at most `timeout` seconds for the first frame.

        Raises ChannelLost once the other side is gone; what had not been read by then is lost.
        """
        self._require_open()
        ready = dict(self._poller.poll(max(0, int(timeout * 1000))))
        try:
            for lane, sock in enumerate(self._sockets):
                if sock in ready:
                    self._read_lane(lane, sock)
            messages = [message for message in self._assembler.take() if not self._is_about_channel(message)]
        except ProtocolError as error:
            self.lost = f"the worker at {self.address} broke the protocol: {error}"
            if not self._assembler.heard:
                # libzmq takes anything that answers at once for a peer of its oldest protocol, a web server too.
                self.lost = f"what answers at {self.address} is not a Monarch worker of this version: {error}"
            raise ChannelLost(self.lost) from error
        if not messages:
            self._read_monitors()
            if self.lost:
                raise ChannelLost(self.lost)
        return messages

    def _is_about_channel(self, message: Message) -> bool:
        # A refusal that answers nothing: the worker has dropped this session.
        if message.kind is Kind.REFUSED and "for" not in message.body:
            self.lost = self.lost or f"the worker at {self.address} ended the run: {message.body.get('reason')}"
            return True
        return message.kind is Kind.PROBE

    def _read_lane(self, lane: int, sock: zmq.Socket[bytes]) -> None:
        while _is_readable(sock):
            frames = sock.recv_multipart(zmq.NOBLOCK, copy=False)
            if lane == 0:
                self._assembler.control(_buffers(frames))
            else:
                self._assembler.data(_buffers(frames))

    def _read_monitors(self) -> None:
        for monitor in self._monitors:
            while _is_readable(monitor):
                event = recv_monitor_message(monitor)["event"]
                if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    self.lost = self.lost or (
                        f"the worker at {self.address} {UNKNOWN_KEY}; pair them: "
                        "`monarch pair --new-code` there, then `monarch pair CODE` here"
                    )
                # libzmq does not always tell a failed handshake from a connection that ended.
                if not self._assembler.heard:
                    self.lost = self.lost or (
                        f"what answers at {self.address} is not a Monarch worker paired with this machine; "
                        "start it there (at a tunnel's other end) again, or pair it anew"
                    )
                self.lost = self.lost or f"the connection to the worker at {self.address} was lost"

    def close(self) -> None:
        """Close every socket; a message just sent gets a moment to leave."""
        for sock in self._sockets:
            with contextlib.suppress(zmq.ZMQError):
                sock.disable_monitor()
        for monitor in self._monitors:
            monitor.close(linger=0)
        linger = 0 if self.lost else int(limits.CLOSE_LINGER_SECONDS * 1000)
        for sock in self._sockets:
            sock.close(linger=linger)
        self._sockets, self._monitors = [], []
        self._context.term()


def _reachable(addresses: Sequence[Address]) -> list[tuple[str, float]]:
    """(endpoint, seconds that a connection took) of those addresses that accept any.

    Raises ChannelLost of the first if none does.
    """
    endpoints: list[tuple[str, float]] = []
    problems: list[ChannelLost] = []
    for address in addresses:
        try:
            began = time.monotonic()
            host = reach(address.host, address.port, str(address))
            endpoints.append((endpoint(host, address.port), time.monotonic() - began))
        except ChannelLost as problem:
            problems.append(problem)
    if not endpoints:
        raise problems[0]
    return endpoints


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


class WorkerChannel:
    """The worker's end: one ROUTER that serves any number of connections behind one address.

    A session is one driver's channel, named by random bytes that the driver chose. One thread waits and receives; any
    may send, so that a result does not wait until another thread has woken up.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], hosts: Sequence[str], port: int, *, own: KeyPair | None
    ) -> None:
        """Bind all `hosts`. Port 0 takes any free one. Raises zmq.ZMQError if an address cannot be bound.

        own: this machine's pair; the context needs a Doorkeeper. None leaves all in the clear, for measurements.
        """
        self._sock = context.socket(zmq.ROUTER)
        configure(self._sock)
        self._sock.set(zmq.ROUTER_MANDATORY, 1)
        self._sock.set(zmq.SNDTIMEO, int(limits.HELLO_TIMEOUT * 1000))
        if own is not None:
            require_key(self._sock, own)
        self._is_open = own is None
        try:
            self.port = bind(self._sock, hosts, port)
        except zmq.ZMQError:
            self._sock.close(linger=0)
            raise
        # Whoever uses the socket or the sessions holds this. Waiting uses neither, only the socket's descriptor.
        self._lock = threading.RLock()
        self._wakes, self._woken = socket.socketpair()
        self._wakes.setblocking(False)
        self._woken.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._sock.get(zmq.FD), zmq.POLLIN)
        self._poller.register(self._woken.fileno(), zmq.POLLIN)
        self._sessions: dict[bytes, _Session] = {}
        # What a dropped session had already sent still arrives; it must not begin a session of its own.
        self._dropped: deque[bytes] = deque(maxlen=4 * limits.MAX_STRANGERS)

    def wait(self, timeout: float) -> None:
        """Wait until there may be something to receive, at most `timeout` seconds."""
        if any(descriptor == self._woken.fileno() for descriptor, _ in self._poller.poll(int(timeout * 1000))):
            self._woken.recv(64)

    def _wake_if_readable(self) -> None:
        """The descriptor tells of news only once, and whoever uses the socket in any way takes that note off it."""
        if _is_readable(self._sock):
            with contextlib.suppress(BlockingIOError):
                self._wakes.send(b"\0")

    def receive(self) -> list[tuple[bytes, Message]]:
        """(session, message) of every message that is complete now, without waiting.

        A session that breaks the protocol is told so and dropped.
        """
        messages: list[tuple[bytes, Message]] = []
        with self._lock:
            touched: dict[bytes, None] = {}
            # Bounded, so that a flood from outside cannot keep the caller from its other work.
            for _ in range(4 * limits.LANE_QUEUE_MESSAGES):
                if not _is_readable(self._sock):
                    break
                identity, *frames = self._sock.recv_multipart(zmq.NOBLOCK, copy=False)
                user = "" if self._is_open else str(identity.get("User-Id"))
                session = self._accept(bytes(identity.buffer), _buffers(frames), user)
                if session is not None:
                    touched[session] = None
            else:
                self._wake_if_readable()
            for session in touched:
                state = self._sessions.get(session)
                if state is None:
                    continue
                try:
                    messages.extend((session, message) for message in state.assembler.take())
                except ProtocolError as error:
                    self.drop(session, str(error))
        return messages

    def _accept(self, identity: bytes, frames: list[memoryview], user: str) -> bytes | None:
        if len(identity) != _SESSION_BYTES + 1 or not identity.startswith(b"M") or not frames:
            return None
        session, lane = identity[:_SESSION_BYTES], identity[_SESSION_BYTES]
        if lane > limits.MAX_LANES or session in self._dropped:
            return None
        state = self._sessions.get(session)
        if state is None:
            state = self._sessions[session] = _Session(user)
            self._forget_strangers()
        if state.user != user:
            return None  # somebody else uses the session's name
        state.lanes.add(lane)
        try:
            if lane == 0:
                state.assembler.control(frames)
            elif frames[0] != _LANE_READY:
                state.assembler.data(frames)
        except ProtocolError as error:
            self.drop(session, str(error))
            return None
        return session

    def _forget_strangers(self) -> None:
        strangers = [session for session, state in self._sessions.items() if not state.admitted]
        for session in strangers[: -limits.MAX_STRANGERS]:
            self.drop(session)

    def admit(self, session: bytes) -> None:
        """Let a session send more than its HELLO."""
        with self._lock:
            self._sessions[session].admit()

    def user(self, session: bytes) -> str:
        """Who a session belongs to (see auth.OWN); empty without keys."""
        with self._lock:
            state = self._sessions.get(session)
            return state.user if state else ""

    def lane_count(self, session: bytes) -> int:
        """Data lanes of `session` heard from so far."""
        with self._lock:
            state = self._sessions.get(session)
            return len(state.lanes - {0}) if state else 0

    def send(self, session: bytes, kind: Kind, body: dict[str, object]) -> None:
        """Send one message to a session, whose tensors are not written into from now on.

        Raises ChannelLost if its driver is no longer connected, and what codec.encode raises.
        """
        with self._lock:
            try:
                self._send(session, kind, body)
            finally:
                self._wake_if_readable()

    def _send(self, session: bytes, kind: Kind, body: dict[str, object]) -> None:
        state = self._sessions.get(session)
        if state is None:
            raise ChannelLost("the driver is no longer connected")
        state.number += 1
        encoded = encode(Message(kind, state.number, dict(body)))
        lanes = sorted(state.lanes - {0})
        if encoded.chunked and not lanes:
            raise ChannelLost("the driver has no data lanes")
        try:
            self._sock.send_multipart([session + b"\0", *encoded.control])
            for turn, chunk in enumerate(_chunks(encoded)):
                self._sock.send_multipart([session + bytes([lanes[turn % len(lanes)]]), *chunk], copy=False)
        except zmq.ZMQError as error:
            self.drop(session)
            raise ChannelLost("the driver is no longer connected") from error

    def drop(self, session: bytes, reason: str | None = None) -> None:
        """Forget a session and tell its driver the `reason`, if any. What still comes from it is ignored."""
        with self._lock:
            state = self._sessions.pop(session, None)
            if session not in self._dropped:
                self._dropped.append(session)
            if state is None or reason is None or 0 not in state.lanes:
                return
            refusal = encode(Message(Kind.REFUSED, state.number + 1, {"reason": reason}))
            with contextlib.suppress(zmq.ZMQError):
                self._sock.send_multipart([session + b"\0", *refusal.control], flags=zmq.NOBLOCK)
            self._wake_if_readable()

    def close(self) -> None:
        self._wakes.close()
        self._woken.close()
        self._sock.close(linger=int(limits.CLOSE_LINGER_SECONDS * 1000))


class _Session:
    def __init__(self, user: str) -> None:
        self.user = user
        # Until the worker admits it, a session may say who it is and nothing else, and have nothing allocated for it.
        greeting = Kind.PAIR if user.startswith(PAIRING) else Kind.HELLO
        self.assembler = Assembler(frozenset({greeting}), max_bytes=0)
        self.admitted = False
        self.lanes: set[int] = set()
        self.number = 0

    def admit(self) -> None:
        self.assembler.allow(FROM_DRIVER, limits.MAX_MESSAGE_BYTES)
        self.admitted = True
