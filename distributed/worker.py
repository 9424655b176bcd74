"""The worker's serving loop: who is served, one driver at a time, and the thread that answers the network.

Another thread loads models and computes (jobs). What is done for a driver is worker_driver's business; what a model is,
and how it computes, is the runtime's (model_store for ComfyUI).
"""

from __future__ import annotations

import contextlib
import signal
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import zmq

from . import limits
from .addresses import Address
from .admission import Doorkeeper
from .auth import OWN, PAIRING, AuthError, KeyPair, Pairings
from .channel import ChannelLost
from .codec import NotPlainData
from .fields import check_fields
from .file_cache import FileCache
from .jobs import Jobs, say
from .memory import available_bytes
from .messages import Kind, Message
from .pairing import admit
from .patch_cache import PatchCache
from .runtime import Runtime
from .usage import Usage
from .worker_channel import WorkerChannel
from .worker_driver import Means, ServedDriver
from .worker_tokens import TokenRank

# How long a greeting waits for the driver that is served to end its run before it is refused.
_GOODBYE_SECONDS = 0.3
_OWN_CODE = Path(__file__)


class Worker:
    """Serves one driver at a time until `stop`. `addresses` are where it listens."""

    def __init__(
        self,
        runtime: Runtime,
        cache: FileCache,
        hosts: Sequence[str],
        port: int,
        name: str,
        *,
        own: KeyPair | None,
    ) -> None:
        """Bind to the IP addresses `hosts`. Raises zmq.ZMQError if one cannot be bound.

        own: this machine's key pair; None serves anybody in the clear, for measurements.
        """
        self.name = name
        self.worker_id = uuid.uuid4().hex
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=limits.DATA_LANES)
        self._doorkeeper = Doorkeeper(self._context, own) if own is not None else None
        try:
            self._channel = WorkerChannel(self._context, hosts, port, own=own)
        except zmq.ZMQError:
            if self._doorkeeper is not None:
                self._doorkeeper.close()
            raise
        self.addresses = tuple(Address(host, self._channel.port) for host in hosts)
        self._driver: ServedDriver | None = None
        self._greetings: dict[bytes, tuple[Message, float]] = {}
        self._means = Means(
            runtime,
            cache,
            PatchCache(limits.PATCH_TENSOR_CACHE_BYTES),
            Jobs(runtime, self._answer_job),
            TokenRank(hosts, self._channel.port + 1),
            self.addresses,
            Usage(),
        )
        self._stopping = False
        self._code_seen = time.monotonic()

    def stop(self) -> None:
        """Have `run` return soon; may be called from a signal handler."""
        self._stopping = True

    def run(self) -> None:
        """Serve until stopped; then release every thread and socket."""
        next_probe = 0.0
        try:
            while not self._stopping:
                due = self._driver is not None and self._means.jobs.idle
                self._channel.wait(limits.ALERT_POLL_SECONDS if due else 4 * limits.POLL_SECONDS)
                for session, message in self._channel.receive():
                    self._handle(session, message)
                self._greet_waiting()
                if self._driver is not None:
                    self._driver.go_on()
                if time.monotonic() >= next_probe:
                    next_probe = time.monotonic() + limits.DRIVER_PROBE_INTERVAL
                    self._probe_driver()
                    self._end_if_uninstalled()
        finally:
            self._release_driver()
            self._means.jobs.close()
            self._means.tokens.close()
            self._channel.close()
            if self._doorkeeper is not None:
                self._doorkeeper.close()
            self._context.term()

    # --- who is served --------------------------------------------------------------------------------------------

    def _probe_driver(self) -> None:
        """A driver that vanished without a word frees the worker for the next one."""
        if self._driver is None:
            return
        if self._name_of(self._driver.session) is None:
            self._channel.drop(self._driver.session, "the machines are no longer paired")
            self._release_driver()
            return
        self._answer(self._driver.session, Kind.PROBE, {})

    def _end_if_uninstalled(self) -> None:
        """Nothing is to run on once the pack is gone from this machine."""
        if self._driver is not None or _OWN_CODE.exists():
            self._code_seen = time.monotonic()
        elif time.monotonic() > self._code_seen + limits.UNINSTALLED_SECONDS:
            say("Monarch was removed from this machine; its worker ends.")
            self.stop()

    def _release_driver(self) -> None:
        driver, self._driver = self._driver, None
        if driver is None:
            return
        driver.release()
        self._channel.drop(driver.session)
        say(driver.summary)

    def _answer(self, session: bytes, kind: Kind, body: dict[str, Any]) -> None:
        try:
            self._send(session, kind, body)
        except ChannelLost:
            if self._driver is not None and self._driver.session == session:
                self._release_driver()

    def _answer_job(self, session: bytes, kind: Kind, body: dict[str, Any]) -> None:
        """Called in the compute thread. That a driver is gone is for the serving thread to notice."""
        with contextlib.suppress(ChannelLost):
            self._send(session, kind, body)

    def _send(self, session: bytes, kind: Kind, body: dict[str, Any]) -> None:
        try:
            self._channel.send(session, kind, body)
        except (NotPlainData, ValueError) as error:
            reason = f"its answer cannot be sent: {error}"
            self._channel.send(session, Kind.FAILED, {"for": body.get("for"), "reason": reason})

    def _handle(self, session: bytes, message: Message) -> None:
        if message.kind is Kind.PAIR:
            self._pair(session, message)
            return
        if message.kind is Kind.HELLO:
            lanes = message.body.get("lanes")
            if type(lanes) is int and 1 <= lanes <= limits.MAX_LANES:
                self._greetings[session] = (message, time.monotonic())
            return
        driver = self._driver
        if driver is None or driver.session != session:
            self._channel.drop(session, "it is over on the worker")
            return
        driver.handle(message)

    def _pair(self, session: bytes, message: Message) -> None:
        """A driver whose code opened the door leaves its own key; its code is used up."""
        try:
            check_fields(message)
            driver = admit(message.body, self._channel.user(session).removeprefix(PAIRING).encode())
        except Exception as error:  # whatever a stranger with a code sends, the worker lives on
            say(f"A driver could not be paired: {error}", error=True)
            self._answer(session, Kind.REFUSED, {"for": message.number, "reason": str(error)})
        else:
            say(f"Paired with {driver.name}.")
            self._answer(session, Kind.PAIRED, {"for": message.number, "name": self.name})
        self._channel.drop(session)

    def _greet_waiting(self) -> None:
        """Answer drivers whose lanes have all arrived (they are separate connections), or that are refused anyway."""
        for session, (message, came) in list(self._greetings.items()):
            # The goodbye of the driver that is served may arrive after this greeting, or it has gone without one.
            if self._driver is not None and time.monotonic() < came + _GOODBYE_SECONDS:
                continue
            self._probe_driver()
            refusal = self._refusal()
            if refusal is None and self._channel.lane_count(session) < message.body["lanes"]:
                if time.monotonic() > came + limits.CONNECT_TIMEOUT:
                    del self._greetings[session]
                    self._channel.drop(session)
                continue
            del self._greetings[session]
            if refusal is not None:
                body = {"for": message.number, "reason": refusal, "worker_id": self.worker_id}
                self._answer(session, Kind.REFUSED, body)
                continue
            self._channel.admit(session)
            self._welcome(session, message)

    def _welcome(self, session: bytes, message: Message) -> None:
        self._driver = ServedDriver(
            session,
            self._name_of(session) or "a driver",
            self._means,
            local=self._is_local(session),
            answer=lambda kind, body: self._answer(session, kind, body),
            leave=self._release_driver,
        )
        say(f"Serving {self._driver.name}.")
        runtime = self._means.runtime
        body = {"name": self.name, "worker_id": self.worker_id, "device": runtime.describe()}
        body["free"] = {"memory": self._free_memory(), "disk": self._means.cache.free_bytes()}
        body["usage"] = self._means.usage.taken()
        if message.body.get("begin_usage") is True:
            self._means.usage.begin()
        self._answer(session, Kind.WELCOME, {"for": message.number, **body, **runtime.versions.as_dict()})

    @staticmethod
    def _free_memory() -> int:
        """Bytes that programs can still take; 0 where the system does not say and there is no psutil to ask."""
        with contextlib.suppress(ImportError):
            return available_bytes()
        return 0

    def _name_of(self, session: bytes) -> str | None:
        """What a session's driver is called here; None if it is not paired any more."""
        if self._is_local(session):
            return "a driver on this machine"
        user = self._channel.user(session)
        with contextlib.suppress(AuthError):
            driver = Pairings.load().driver_of(user.encode())
            return None if driver is None else driver.name
        return "a driver"

    def _is_local(self, session: bytes) -> bool:
        return self._channel.user(session) in (OWN, "")

    def _refusal(self) -> str | None:
        # Whether other versions will do is the driver's decision: its user may allow them.
        if self._driver is not None:
            since = time.strftime("%H:%M:%S", time.localtime(self._driver.since))
            return f"it is busy with {self._driver.name} since {since}; render again when that is done"
        return None


@contextlib.contextmanager
def ended_by_signals(worker: Worker) -> Iterator[None]:
    """Within it SIGINT and SIGTERM end the worker in good order, even before it runs; a second one at once."""
    previous = {int(number): signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def stop(number: int, _: FrameType | None) -> None:
        worker.stop()
        signal.signal(number, previous[number])

    for number in previous:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
