"""The driver's end of a TensorChannel: one socket for each lane, and the word for how it was lost."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from . import limits
from .addresses import Address
from .auth import ChannelKeys
from .channel import (
    LANE_READY,
    SESSION_BYTES,
    UNKNOWN_KEY,
    Assembler,
    ChannelLost,
    buffers,
    chunks,
    configure,
    endpoint,
    is_readable,
    reach,
    show_key,
)
from .codec import ProtocolError, encode
from .messages import FROM_WORKER, Kind, Message

_GONE = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_GONE |= zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


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
        session = b"M" + os.urandom(SESSION_BYTES - 1)
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
            self._send(sock, [LANE_READY], None, copy=True)

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
            for turn, chunk in enumerate(chunks(encoded)):
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
        while is_readable(sock):
            frames = sock.recv_multipart(zmq.NOBLOCK, copy=False)
            if lane == 0:
                self._assembler.control(buffers(frames))
            else:
                self._assembler.data(buffers(frames))

    def _read_monitors(self) -> None:
        for monitor in self._monitors:
            while is_readable(monitor):
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
    """(endpoint, seconds that a connection took) of those addresses that accept any, in this order.

    Raises ChannelLost of the first if none does. Once one has answered, the others are not waited for any longer than
    OTHER_ADDRESSES_SECONDS: the cable of one may be unplugged.
    """
    wanted = list(dict.fromkeys(addresses))
    outcomes: dict[Address, tuple[str, float] | ChannelLost] = {}
    changed = threading.Condition()

    def attempt(address: Address) -> None:
        began = time.monotonic()
        try:
            host = reach(address.host, address.port, str(address))
            outcome: tuple[str, float] | ChannelLost = endpoint(host, address.port), time.monotonic() - began
        except ChannelLost as problem:
            outcome = problem
        with changed:
            outcomes[address] = outcome
            changed.notify_all()

    for address in wanted:
        threading.Thread(target=attempt, args=(address,), name="monarch-reach", daemon=True).start()
    with changed:
        changed.wait_for(
            lambda: len(outcomes) == len(wanted) or any(isinstance(each, tuple) for each in outcomes.values())
        )
        changed.wait_for(lambda: len(outcomes) == len(wanted), limits.OTHER_ADDRESSES_SECONDS)
        known = [outcomes[address] for address in wanted if address in outcomes]
    endpoints = [each for each in known if isinstance(each, tuple)]
    if not endpoints:
        raise next(each for each in known if isinstance(each, ChannelLost))
    return endpoints
