"""The worker's serving loop: answers the network from one thread while another one loads models and computes.

What a model is and how it computes is the runtime's business (model_store for ComfyUI).
"""

from __future__ import annotations

import contextlib
import signal
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
import zmq

from . import limits
from .addresses import Address
from .admission import Doorkeeper
from .auth import OWN, PAIRING, AuthError, KeyPair, Pairings
from .channel import ChannelLost
from .codec import NotPlainData, ProtocolError, replace_kept
from .fields import check_fields
from .files import FileCache, FileRef, IncomingFile
from .jobs import Job, Jobs, Stopped, say
from .link_sink import SECRET_BYTES, Sink
from .memory import available_bytes
from .messages import Kind, Message
from .pairing import admit
from .patch_cache import PatchCache
from .recipe import tree_digest
from .runtime import Replica, Runtime
from .versions import Versions, mismatch
from .worker_channel import WorkerChannel
from .worker_tokens import TokenRank

_T = TypeVar("_T")


# How long a greeting waits for the driver that is served to end its run before it is refused.
_GOODBYE_SECONDS = 0.3


@dataclass
class _Preparation:
    number: int
    tree: dict[str, Any]
    file: FileRef
    path: Path | None
    missing: set[str]
    incoming: IncomingFile | None = None
    incoming_number: int = 0


@dataclass
class _Driver:
    """The driver that is being served."""

    session: bytes
    name: str
    since: float = field(default_factory=time.time)
    preparation: _Preparation | None = None
    given_up: bool = False
    # Owned by the compute thread.
    replica: Replica | None = None
    kept: dict[int | str, torch.Tensor] = field(default_factory=dict)
    shares: int = 0
    seconds: float = 0.0
    # Whether it has measured plain TCP: once is enough, and each time a port is opened.
    sink_opened: bool = False
    # Joins and forwards by tokens up to this number are given up.
    abandoned: int = 0


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
        self._runtime = runtime
        self._cache = cache
        self._patches = PatchCache(limits.PATCH_TENSOR_CACHE_BYTES)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=limits.DATA_LANES)
        self._doorkeeper = Doorkeeper(self._context, own) if own is not None else None
        try:
            self._channel = WorkerChannel(self._context, hosts, port, own=own)
        except zmq.ZMQError:
            if self._doorkeeper is not None:
                self._doorkeeper.close()
            raise
        self.addresses = tuple(Address(host, self._channel.port) for host in hosts)
        self._driver: _Driver | None = None
        self._greetings: dict[bytes, tuple[Message, float]] = {}
        self._jobs = Jobs(runtime, self._answer_job)
        self._tokens = TokenRank(hosts, self._channel.port + 1)
        self._stopping = False

    def stop(self) -> None:
        """Have `run` return soon; may be called from a signal handler."""
        self._stopping = True

    def run(self) -> None:
        """Serve until stopped; then release every thread and socket."""
        next_probe = 0.0
        try:
            while not self._stopping:
                self._channel.wait(4 * limits.POLL_SECONDS)
                for session, message in self._channel.receive():
                    self._handle(session, message)
                self._greet_waiting()
                if time.monotonic() >= next_probe:
                    next_probe = time.monotonic() + limits.DRIVER_PROBE_INTERVAL
                    self._probe_driver()
        finally:
            self._release_driver()
            self._jobs.close()
            self._tokens.close()
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

    def _release_driver(self) -> None:
        driver, self._driver = self._driver, None
        if driver is None:
            return
        if driver.preparation is not None and driver.preparation.incoming is not None:
            driver.preparation.incoming.leave()
        self._jobs.cancel(driver.session)
        self._jobs.add(Job(b"", 0, None, lambda: self._tokens.forget() or {}))
        self._channel.drop(driver.session)
        say(f"Served {driver.name}: {driver.shares} shares in {driver.seconds:.1f} s.")

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
        if driver.given_up and message.kind not in (Kind.CANCEL, Kind.END):
            return
        try:
            check_fields(message)
            _HANDLERS[message.kind](self, driver, message)
        except OSError as error:
            reason = f"the model file cannot be kept on the worker: {error.strerror or error}"
            if error.errno is not None:
                reason += "; free some space there, or start it with --cache on another disk"
            self._give_up(driver, message, reason)
        except Exception as error:  # whatever a driver sends, the worker lives on
            self._give_up(driver, message, f"a {message.kind.name} message makes no sense to the worker ({error})")

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

    def _give_up(self, driver: _Driver, message: Message, reason: str) -> None:
        """Tell the driver, whatever it waits for, and do nothing more for it; what it had sent by then is ignored."""
        say(f"Gave up on a driver: {reason}")
        preparation = driver.preparation
        numbers = {preparation.number, preparation.incoming_number} if preparation else set()
        for number in sorted({message.number} | numbers - {0}):
            self._answer(driver.session, Kind.FAILED, {"for": number, "reason": reason})
        if preparation is not None and preparation.incoming is not None:
            preparation.incoming.discard()
        driver.preparation = None
        driver.given_up = True

    def _greet_waiting(self) -> None:
        """Answer drivers whose lanes have all arrived (they are separate connections), or that are refused anyway."""
        for session, (message, came) in list(self._greetings.items()):
            # The goodbye of the driver that is served may arrive after this greeting, or it has gone without one.
            if self._driver is not None and time.monotonic() < came + _GOODBYE_SECONDS:
                continue
            self._probe_driver()
            refusal = self._refusal(message)
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
            self._driver = _Driver(session, self._name_of(session) or "a driver")
            say(f"Serving {self._driver.name}.")
            body = {"name": self.name, "worker_id": self.worker_id, "device": self._runtime.describe()}
            body["free"] = {"memory": self._free_memory(), "disk": self._cache.free_bytes()}
            self._answer(session, Kind.WELCOME, {"for": message.number, **body, **self._runtime.versions.as_dict()})

    @staticmethod
    def _free_memory() -> int:
        """Bytes that programs can still take; 0 where the system does not say and there is no psutil to ask."""
        with contextlib.suppress(ImportError):
            return available_bytes()
        return 0

    def _name_of(self, session: bytes) -> str | None:
        """What a session's driver is called here; None if it is not paired any more."""
        user = self._channel.user(session)
        if user in (OWN, ""):
            return "a driver on this machine"
        with contextlib.suppress(AuthError):
            driver = Pairings.load().driver_of(user.encode())
            return None if driver is None else driver.name
        return "a driver"

    def _refusal(self, message: Message) -> str | None:
        driver_versions = Versions.from_message(message.body)
        if driver_versions.pack != self._runtime.versions.pack:
            return mismatch(driver_versions, self._runtime.versions, self.name)[0]
        if self._driver is not None:
            since = time.strftime("%H:%M:%S", time.localtime(self._driver.since))
            return f"it is busy with {self._driver.name} since {since}; render again when that is done"
        return None

    # --- preparing ------------------------------------------------------------------------------------------------

    def _prepare(self, driver: _Driver, message: Message) -> None:
        if driver.preparation is not None:
            raise ProtocolError("another recipe is not complete yet")
        ref = FileRef.from_message(message.body["file"])
        tree = message.body["recipe"]
        path = self._runtime.find(ref) or self._cache.find(ref)
        missing = self._patches.missing(tree)
        incoming = self._cache.receive(ref) if path is None else None
        driver.preparation = _Preparation(message.number, tree, ref, path, set(missing), incoming)
        held = incoming.received if incoming else 0
        need = {"file": path is None, "held": held, "tensors": missing}
        self._answer(driver.session, Kind.NEED, {"for": message.number, **need})
        self._build_if_complete(driver)

    def _tensors(self, driver: _Driver, message: Message) -> None:
        preparation = _expected(driver.preparation)
        self._patches.add(message.body["tensors"], preparation.missing)
        preparation.missing -= set(message.body["tensors"])
        self._build_if_complete(driver)

    def _file_begin(self, driver: _Driver, message: Message) -> None:
        preparation = _expected(driver.preparation)
        ref = FileRef.from_message(message.body["file"])
        incoming = _expected(preparation.incoming)
        if ref != preparation.file or preparation.incoming_number:
            raise ProtocolError("a file comes that was not asked for")
        held = f", of which {incoming.received / 1e9:.2f} GB are here" if incoming.received else ""
        say(f"Receiving {ref.name}, {ref.bytes / 1e9:.2f} GB{held}.")
        preparation.incoming_number = message.number

    def _file_chunk(self, driver: _Driver, message: Message) -> None:
        preparation = _expected(driver.preparation)
        incoming = _expected(preparation.incoming)
        before = incoming.received
        incoming.write(message.body["offset"], memoryview(message.body["data"].numpy()))
        if before // limits.FILE_RECORD_BYTES != incoming.received // limits.FILE_RECORD_BYTES:
            incoming.save()
        self._answer(driver.session, Kind.FILE_ACK, {"for": preparation.incoming_number, "bytes": incoming.received})

    def _file_end(self, driver: _Driver, message: Message) -> None:
        preparation = _expected(driver.preparation)
        preparation.path = _expected(preparation.incoming).finish(message.body["digest"])
        preparation.incoming = None
        self._build_if_complete(driver)

    def _build_if_complete(self, driver: _Driver) -> None:
        preparation = driver.preparation
        if preparation is None or preparation.missing or preparation.path is None:
            return
        driver.preparation = None
        began = time.perf_counter()
        path, tree, file = preparation.path, self._patches.fill(preparation.tree), preparation.file
        digest = tree_digest(preparation.tree, file)

        def build() -> dict[str, Any]:
            driver.replica = self._runtime.build(tree, path, digest)
            seconds, patched = time.perf_counter() - began, driver.replica.patched
            say(f"{file.name} is ready after {seconds:.1f} s, {patched} weights patched.")
            return {"digest": digest, "patched": patched}

        self._jobs.add(Job(driver.session, preparation.number, Kind.READY, build))

    # --- computing ------------------------------------------------------------------------------------------------

    def _forward(self, driver: _Driver, message: Message) -> None:
        def compute() -> dict[str, Any]:
            if driver.replica is None:
                raise ProtocolError("the driver asked for a forward before a model was ready")
            for name in message.body["drop"]:
                driver.kept.pop(name, None)
            driver.kept.update({name: kept.to(driver.replica.device) for name, kept in message.body["keep"].items()})
            if sum(tensor.nbytes for tensor in driver.kept.values()) > 2 * limits.RUN_TENSOR_CACHE_BYTES:
                raise ProtocolError("the driver keeps more tensors here than is allowed")
            # Copies: a forward may write into its arguments.
            args = replace_kept(message.body["args"], driver.kept, copy=True)
            kwargs = replace_kept(message.body["kwargs"], driver.kept, copy=True)
            began = time.perf_counter()
            if "tokens" in message.body:
                return self._by_tokens(driver, driver.replica, args, kwargs, message.body["tokens"], began)
            output = driver.replica.forward(args, kwargs)
            output = output.to("cpu") if isinstance(output, torch.Tensor) else [part.to("cpu") for part in output]
            seconds = time.perf_counter() - began
            driver.shares += 1
            driver.seconds += seconds
            return {"output": output, "seconds": seconds}

        self._jobs.add(Job(driver.session, message.number, Kind.RESULT, compute, message.nbytes))

    # --- token splits ---------------------------------------------------------------------------------------------

    def _exchange_open(self, driver: _Driver, message: Message) -> None:
        store, secret = message.body["store"], message.body.get("secret")
        keys = None if secret is None else KeyPair.of_secret(secret.encode())

        def opened() -> dict[str, Any]:
            return self._tokens.open(driver.replica, store=store, keys=keys)

        self._jobs.add(Job(driver.session, message.number, Kind.EXCHANGE, opened))

    def _exchange_join(self, driver: _Driver, message: Message) -> None:
        local = self._channel.user(driver.session) in (OWN, "")

        def joined() -> dict[str, Any]:
            check = self._wanted(driver, message.body["number"])
            return self._tokens.join(message.body, driver.replica, check, local=local)

        self._jobs.add(Job(driver.session, message.number, Kind.EXCHANGE, joined))

    def _by_tokens(
        self, driver: _Driver, replica: Replica, args: list[Any], kwargs: dict[str, Any], plan: Any, began: float
    ) -> dict[str, Any]:
        """Compute this worker's tokens, which go to the other ranks and not into the answer."""
        waited: list[float] = []
        check = self._wanted(driver, int(plan["number"]))
        replica.forward(args, kwargs, lambda model, a, k: waited.append(self._tokens.forward(model, a, k, plan, check)))
        seconds = time.perf_counter() - began - sum(waited)
        driver.shares += 1
        driver.seconds += seconds
        return {"seconds": seconds}

    def _abandon(self, driver: _Driver, message: Message) -> None:
        driver.abandoned = max(driver.abandoned, message.body["number"])

    def _wanted(self, driver: _Driver, number: int) -> Callable[[], None]:
        """A check that raises Stopped once the driver does not want join or forward `number` any more."""

        def check() -> None:
            if self._jobs.cancelled(driver.session) or number <= driver.abandoned:
                raise Stopped("the driver gave this up")

        return check

    # --- measuring the link ---------------------------------------------------------------------------------------

    def _echo(self, driver: _Driver, message: Message) -> None:
        wanted = message.body["bytes"]
        if not 0 <= wanted <= limits.ECHO_BYTES:
            raise ProtocolError("the driver asked for too large an answer")
        self._answer(driver.session, Kind.ECHO, {"for": message.number, "data": torch.zeros(wanted, dtype=torch.uint8)})

    def _sink(self, driver: _Driver, message: Message) -> None:
        secret = bytes.fromhex(message.body["secret"])
        if len(secret) != SECRET_BYTES:
            raise ProtocolError("the secret has a wrong length")
        if driver.sink_opened:
            raise ProtocolError("plain TCP is measured once in a run")
        driver.sink_opened = True
        # The port after the one for exchanges, so that a firewall can let it pass.
        try:
            sink = Sink([address.host for address in self.addresses], self.addresses[0].port + 2, secret)
        except OSError as error:
            reason = f"there is no port for plain TCP ({error.strerror or error})"
            self._answer(driver.session, Kind.FAILED, {"for": message.number, "reason": reason})
            return
        self._answer(driver.session, Kind.SINK, {"for": message.number, "port": sink.port})
        check = self._wanted(driver, message.number)
        self._jobs.add(Job(driver.session, message.number, None, lambda: sink.drain(check) or {}))

    def _free(self, driver: _Driver, message: Message) -> None:
        files = frozenset(str(digest) for digest in message.body["files"])
        self._patches.clear()

        def release() -> dict[str, Any]:
            if released := self._runtime.release(files):
                say(f"Let go of {released} model{'s' * (released > 1)} that the driver needs no more.")
            return {}

        # Of no session: it is done even if the driver goes at once.
        self._jobs.add(Job(b"", message.number, None, release))

    def _end(self, driver: _Driver, message: Message) -> None:
        self._release_driver()


_HANDLERS: dict[Kind, Callable[[Worker, _Driver, Message], None]] = {
    Kind.PREPARE: Worker._prepare,
    Kind.TENSORS: Worker._tensors,
    Kind.FILE_BEGIN: Worker._file_begin,
    Kind.FILE_CHUNK: Worker._file_chunk,
    Kind.FILE_END: Worker._file_end,
    Kind.FORWARD: Worker._forward,
    Kind.EXCHANGE_OPEN: Worker._exchange_open,
    Kind.EXCHANGE_JOIN: Worker._exchange_join,
    Kind.ABANDON: Worker._abandon,
    Kind.ECHO: Worker._echo,
    Kind.SINK: Worker._sink,
    Kind.FREE: Worker._free,
    Kind.CANCEL: Worker._end,
    Kind.END: Worker._end,
}


def _expected(value: _T | None) -> _T:
    if value is None:
        raise ProtocolError("something comes that was not asked for")
    return value


def run_until_stopped(worker: Worker) -> None:
    """Run the worker; SIGINT and SIGTERM end it in good order, a second one at once."""

    previous = {int(number): signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def stop(number: int, _: FrameType | None) -> None:
        worker.stop()
        signal.signal(number, previous[number])

    for number in previous:
        signal.signal(number, stop)
    try:
        worker.run()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
