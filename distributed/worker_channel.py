"""The worker's end of TensorChannels: one ROUTER for any number of drivers, told apart by session and by key."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Sequence

import zmq

from . import limits
from .auth import PAIRING, KeyPair
from .channel import (
    LANE_READY,
    SESSION_BYTES,
    Assembler,
    ChannelLost,
    bind,
    buffers,
    chunks,
    configure,
    is_readable,
    require_key,
)
from .codec import ProtocolError, encode
from .messages import FROM_DRIVER, Kind, Message


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
        if is_readable(self._sock):
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
                if not is_readable(self._sock):
                    break
                identity, *frames = self._sock.recv_multipart(zmq.NOBLOCK, copy=False)
                user = "" if self._is_open else str(identity.get("User-Id"))
                session = self._accept(bytes(identity.buffer), buffers(frames), user)
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
        if len(identity) != SESSION_BYTES + 1 or not identity.startswith(b"M") or not frames:
            return None
        session, lane = identity[:SESSION_BYTES], identity[SESSION_BYTES]
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
            elif frames[0] != LANE_READY:
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
            for turn, chunk in enumerate(chunks(encoded)):
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
