"""The driver's handle of one worker during one run: greet, prepare a replica, compute shares, tell of its loss.

Sends and waits for one worker; which rows it gets and what happens when it fails is session's business.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from . import limits
from .addresses import Address
from .auth import AuthError, ExchangeKeys, KnownWorker, known_worker
from .channel import ChannelLost
from .codec import Kept, NotPlainData
from .driver_channel import DriverChannel
from .exchange import ExchangeFailed
from .file_content import ContentHash, read_chunks
from .messages import Kind, Message
from .recipe import Recipe
from .rows import Call
from .versions import Versions, mismatch

_LOADED_POLL_SECONDS = 0.002
_MAX_PORT = 65_535
_MIN_SECONDS, _MAX_SECONDS = 1e-7, 1e6


class PeerFailed(Exception):
    """This worker does not take part in the run now; the message says why and what to do.

    final: nothing will be different later in the run. worker_id: of the worker that refused, if it said so.
    """

    def __init__(self, why: str, *, final: bool = False, worker_id: str = "") -> None:
        super().__init__(why)
        self.final = final
        self.worker_id = worker_id


@dataclass(frozen=True)
class Share:
    """Output of a worker's share (tensor or list of tensors, on the CPU) and the seconds it computed."""

    output: Any
    seconds: float


@dataclass(frozen=True)
class ExchangeOffer:
    """Where a worker can be met for a token split: behind `port`, and at `store_port` (0: nowhere) by `backends`."""

    host: str
    port: int
    store_port: int
    backends: tuple[str, ...]


class Peer:
    """One worker in one run. Every wait calls `check`, which raises to stop the run (an interrupt)."""

    def __init__(
        self,
        address: Address,
        check: Callable[[], None],
        worker_at: Callable[[Address], KnownWorker] = known_worker,
    ) -> None:
        """worker_at: the keys and other addresses of the worker at an address, or AuthError."""
        self.address = str(address)
        self.name = self.address
        self.worker_id = ""
        # Formats that its device cannot compute natively (see compute_path).
        self.emulated: frozenset[str] = frozenset()
        self.addresses = (address,)
        # Whether it is a worker of this user on this machine, as its key proves.
        self.is_own = False
        # What the worker said of itself when it was greeted: its software, its device, and free bytes of what.
        self.versions: Versions | None = None
        self.device: dict[str, str] = {}
        self.free_bytes: dict[str, int] = {}
        # Of whatever it did since a greeting had it begin anew: the most memory (bytes), and what loading took (ms).
        self.usage: dict[str, int] = {}
        self.ready = False
        self._address = address
        self._worker_at = worker_at
        self._check = check
        self._channel: DriverChannel | None = None
        self._kept = _KeptTensors()
        # By the number they answer, in order: a quick worker's NEED and READY may come together.
        self._answers: dict[int, deque[Message]] = {}
        self._prepared = 0

    @property
    def lost(self) -> bool:
        """Whether the connection to it is gone."""
        return self._channel is not None and self._channel.lost is not None

    def watched_by(self, check: Callable[[], None]) -> None:
        """From now on every wait calls `check`."""
        self._check = check

    @property
    def traffic(self) -> tuple[int, int]:
        """(bytes sent, bytes received) in this run."""
        return (self._channel.sent_bytes, self._channel.received_bytes) if self._channel else (0, 0)

    # --- greeting and preparing ---------------------------------------------------------------------------------

    def connect(self, versions: Versions, *, allow_mismatch: bool, begin_usage: bool = False) -> list[str]:
        """Greet the worker. Returns warnings; raises PeerFailed if it cannot serve this driver.

        begin_usage: have it count its `usage` anew from now on.
        """
        try:
            known = self._worker_at(self._address)
            self.addresses = (self._address, *known.others)
            self.is_own = known.keys is None or known.keys.server == known.keys.own.public
            host, port = self._address.host, self._address.port
            self._channel = DriverChannel(host, port, keys=known.keys, more=known.others)
        except (AuthError, ChannelLost) as error:
            raise PeerFailed(str(error)) from None
        accepted = time.monotonic()
        try:
            hello = {"lanes": self._channel.lanes, "begin_usage": begin_usage, **versions.as_dict()}
            number = self._channel.send(Kind.HELLO, hello)
            answer = self._wait(number, timeout=limits.HELLO_TIMEOUT)
        except (ChannelLost, TimeoutError) as error:
            # A frozen worker and another program look alike here: the system accepts, and then there is silence.
            if time.monotonic() - accepted < limits.CONNECT_TIMEOUT / 2:
                raise PeerFailed(str(error)) from None
            raise PeerFailed(
                f"what listens at {self.address} does not answer as a Monarch worker of this version; "
                "start the worker of the same pack there, or start it again if it hangs"
            ) from None
        if answer.kind is not Kind.WELCOME:
            reason = f"the worker at {self.address} refused: {answer.body.get('reason')}"
            raise PeerFailed(reason, worker_id=str(answer.body.get("worker_id", "")))
        self.name = str(answer.body.get("name") or self.address)
        self.worker_id = str(answer.body.get("worker_id"))
        self.versions = Versions.from_message(answer.body)
        self.device = {str(key): str(value)[:200] for key, value in _mapping(answer.body.get("device")).items()}
        self.free_bytes = _integers(answer.body.get("free"))
        self.usage = _integers(answer.body.get("usage"))
        self.emulated = frozenset(self.device.get("emulates", "").split())
        refusal, warnings = mismatch(versions, self.versions, self.name)
        if refusal and not allow_mismatch:
            raise PeerFailed(refusal, final=True)
        return [*([refusal] if refusal else []), *warnings]

    def free(self, files: Collection[str]) -> None:
        """Have the worker let go of what it built from files with these digests. Raises PeerFailed."""
        if files:
            self.ask(Kind.FREE, {"files": sorted(files)})

    def prepare(self, recipe: Recipe, progress: Callable[[int, int], None]) -> None:
        """Have the worker build a replica of `recipe`; sends what it lacks. Returns while the worker still loads.

        `progress(done, total)` is called in bytes while a file is sent. Raises PeerFailed.
        """
        channel = self._open_channel()
        try:
            self._prepared = channel.send(Kind.PREPARE, {"recipe": recipe.tree, "file": recipe.file.as_dict()})
            need = self._wait(self._prepared)
            if need.kind is not Kind.NEED:
                raise PeerFailed(f"{self.name}: {need.body.get('reason', 'did not answer')}")
            for batch in recipe.tensor_batches(need.body["tensors"]):
                channel.send(Kind.TENSORS, {"for": self._prepared, "tensors": batch}, while_full=self._check)
            if need.body["file"]:
                self._send_file(recipe, _number(need.body["held"], recipe.file.bytes), progress)
        except ChannelLost as error:
            raise PeerFailed(f"{self.name}: {error}") from None
        except OSError as error:
            raise PeerFailed(f"{recipe.path} cannot be read: {error}") from None
        except (KeyError, TypeError, ValueError) as error:
            raise PeerFailed(f"{self.name} gave an answer that makes no sense ({error})") from None

    def _send_file(self, recipe: Recipe, held: int, progress: Callable[[int, int], None]) -> None:
        """Send the file from byte `held` on, which is how much the worker has kept of an earlier attempt."""
        channel, total = self._open_channel(), recipe.file.bytes
        begun = channel.send(Kind.FILE_BEGIN, {"file": recipe.file.as_dict()})
        acknowledged = sent = held
        with ContentHash() as digest:
            for offset, chunk in read_chunks(recipe.path):
                digest.update(chunk)
                if offset + len(chunk) <= held:
                    self._check()
                    continue
                data = torch.frombuffer(chunk, dtype=torch.uint8)[max(0, held - offset) :]
                channel.send(Kind.FILE_CHUNK, {"offset": sent, "data": data}, while_full=self._check)
                sent = offset + len(chunk)
                while sent - acknowledged > limits.FILE_CHUNK_BYTES * limits.FILE_WINDOW_CHUNKS:
                    acknowledged = self._acknowledged(begun, total)
                    progress(acknowledged, total)
            channel.send(Kind.FILE_END, {"digest": digest.hexdigest()})
        while acknowledged < sent:
            acknowledged = self._acknowledged(begun, total)
            progress(acknowledged, total)

    def _acknowledged(self, begun: int, total: int) -> int:
        answer = self._wait(begun, or_for=self._prepared)
        if answer.kind is not Kind.FILE_ACK:
            raise PeerFailed(f"{self.name}: {answer.body.get('reason')}")
        return _number(answer.body["bytes"], total)

    def loaded(self, until: float) -> bool:
        """Whether `wait_ready` would return (or raise) without waiting; waits for that until `until` (monotonic)."""
        while not self.ready and not self.arrived(self._prepared):
            if time.monotonic() > until:
                return False
            self._check()
            time.sleep(_LOADED_POLL_SECONDS)
        return True

    def wait_ready(self, recipe: Recipe) -> None:
        """Wait until the worker has built exactly `recipe`. Raises PeerFailed."""
        if self.ready:
            return
        answer = self._wait_or_fail(self._prepared)
        built = (answer.body.get("digest"), answer.body.get("patched"))
        if answer.kind is not Kind.READY or built != (recipe.digest, recipe.patched):
            reason = answer.body.get("reason", "it built another model than it was asked for")
            raise PeerFailed(f"{self.name}: {reason}")
        self.ready = True

    # --- forwards -----------------------------------------------------------------------------------------------

    def start(self, call: Call, tokens: dict[str, Any] | None = None) -> int:
        """Send the share `call`; its transformer_options are plain. Returns a ticket for finish. Raises PeerFailed.

        `tokens`: have the worker compute its tokens of the whole call, as this plan of a token split says.
        """
        fresh: dict[int | str, torch.Tensor] = {}
        kwargs = {
            name: value if name in ("control", "transformer_options") else self._kept.place(name, value, fresh)
            for name, value in call.kwargs.items()
        }
        body = {"args": list(call.args), "kwargs": kwargs, "keep": fresh, "drop": self._kept.take_dropped()}
        if tokens is not None:
            body["tokens"] = tokens
        try:
            # The forward that starts here meanwhile may write into its arguments.
            return self._open_channel().send(Kind.FORWARD, body, snapshot=True, while_full=self._check)
        except ChannelLost as error:
            raise PeerFailed(f"{self.name}: {error}") from None
        except (NotPlainData, ValueError) as error:
            raise PeerFailed(f"{self.name} cannot be sent its share: {error}") from None

    def look(self) -> None:
        """Read what has come, without waiting. Raises PeerFailed if the worker is gone."""
        try:
            self._collect(0)
        except ChannelLost as error:
            raise PeerFailed(f"{self.name}: {error}") from None

    def arrived(self, ticket: int) -> bool:
        """Whether `finish` would return (or raise) without waiting."""
        try:
            self._collect(0)
        except ChannelLost:
            return True
        return ticket in self._answers

    def finish(self, ticket: int) -> Share:
        """Wait for the output of a share, however long the worker computes. Raises PeerFailed."""
        answer = self._wait_or_fail(ticket, poll=limits.ALERT_POLL_SECONDS)
        if answer.kind is not Kind.RESULT:
            raise PeerFailed(f"{self.name}: {answer.body.get('reason')}")
        output, seconds = answer.body.get("output"), _duration(answer.body.get("seconds"))
        parts = output if isinstance(output, list) else [output]
        if not parts or not all(isinstance(part, torch.Tensor) and part.ndim for part in parts):
            raise PeerFailed(f"{self.name} gave an answer that makes no sense")
        return Share(output, seconds or 0.0)

    # --- token splits -------------------------------------------------------------------------------------------

    def open_exchange(self, *, store: bool, keys: ExchangeKeys) -> ExchangeOffer:
        """Where the worker can be met by all ranks, which have these keys, with a `store` for process groups.

        Raises ExchangeFailed if the worker cannot be met, PeerFailed if it is gone.
        """
        body = {"store": store, "secret": keys.pair.secret.decode(), "encrypted": keys.encrypted}
        answer = self._wait_or_fail(self.ask(Kind.EXCHANGE_OPEN, body))
        if answer.kind is not Kind.EXCHANGE:
            # It can still compute rows.
            raise ExchangeFailed(f"{self.name}: {answer.body.get('reason')}")
        body = answer.body
        port, store_port, backends = body.get("port"), body.get("store_port"), body.get("backends")
        if not isinstance(backends, list):
            raise PeerFailed(f"{self.name} gave an answer that makes no sense")
        try:
            ports = _number(port, _MAX_PORT), _number(store_port, _MAX_PORT)
        except ValueError as error:
            raise PeerFailed(f"{self.name} gave an answer that makes no sense ({error})") from None
        return ExchangeOffer(self._address.host, *ports, tuple(map(str, backends)))

    def start_joining(self, body: dict[str, Any]) -> int:
        """Have the worker join the other ranks. Returns a ticket for `joined`. Raises PeerFailed."""
        return self.ask(Kind.EXCHANGE_JOIN, body)

    def joined(self, ticket: int) -> str | None:
        """Wait until the worker has joined; the reason if it could not. Raises PeerFailed if the worker is gone."""
        answer = self._wait_or_fail(ticket)
        return None if answer.kind is Kind.EXCHANGE else f"{self.name}: {answer.body.get('reason')}"

    def failure(self, ticket: int) -> str | None:
        """Why the worker has given up on what it was asked for, if it said so already; does not wait or read."""
        for answer in self._answers.get(ticket, ()):
            if answer.kind is Kind.FAILED:
                return f"{self.name}: {answer.body.get('reason')}"
        return None

    def outcome(self, ticket: int) -> float | None:
        """Seconds a worker computed its tokens of a forward; None while it does. Raises PeerFailed if it cannot."""
        if ticket not in self._answers:
            return None
        answer = self._take_answer(ticket)
        seconds = _duration(answer.body.get("seconds"))
        if answer.kind is not Kind.RESULT or seconds is None:
            raise PeerFailed(f"{self.name}: {answer.body.get('reason', 'it gave an answer that makes no sense')}")
        return seconds

    def abandon(self, number: int) -> None:
        """Have the worker give up forwards by tokens up to `number`. Raises PeerFailed."""
        self.ask(Kind.ABANDON, {"number": number})

    def ask(self, kind: Kind, body: dict[str, Any]) -> int:
        """Send a message. Returns a ticket for `answer`. Raises PeerFailed."""
        try:
            return self._open_channel().send(kind, body, while_full=self._check)
        except ChannelLost as error:
            raise PeerFailed(f"{self.name}: {error}") from None

    # --- measuring the link -------------------------------------------------------------------------------------

    @property
    def lanes(self) -> int:
        """Data lanes of the channel."""
        return self._open_channel().lanes

    def answer(self, ticket: int, kind: Kind) -> dict[str, Any]:
        """Wait for the answer of this kind. Raises PeerFailed if another one or none comes."""
        answer = self._wait_or_fail(ticket)
        if answer.kind is not kind:
            raise PeerFailed(f"{self.name}: {answer.body.get('reason')}")
        return answer.body

    def close(self, *, cancel: bool) -> None:
        """End the run on the worker; with `cancel` it also stops what it computes."""
        if self._channel is None:
            return
        try:
            if not self._channel.lost:
                self._channel.send(Kind.CANCEL if cancel else Kind.END, {})
        except ChannelLost:
            pass  # nothing to tell a worker that is gone
        finally:
            self._channel.close()
            self._kept = _KeptTensors()

    # --- waiting ------------------------------------------------------------------------------------------------

    def _open_channel(self) -> DriverChannel:
        if self._channel is None:
            raise PeerFailed(f"{self.address} is not connected")
        return self._channel

    def _wait_or_fail(self, number: int, *, poll: float = limits.POLL_SECONDS) -> Message:
        try:
            return self._wait(number, poll=poll)
        except ChannelLost as error:
            raise PeerFailed(f"{self.name}: {error}") from None

    def _wait(
        self, number: int, *, or_for: int = 0, timeout: float | None = None, poll: float = limits.POLL_SECONDS
    ) -> Message:
        """The answer for message `number`, or for `or_for` if that comes first."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while number not in self._answers:
            if or_for in self._answers:
                return self._take_answer(or_for)
            self._check()
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError
            self._collect(poll)
        return self._take_answer(number)

    def _take_answer(self, number: int) -> Message:
        answers = self._answers[number]
        answer = answers.popleft()
        if not answers:
            del self._answers[number]
        return answer

    def _collect(self, timeout: float) -> None:
        for message in self._open_channel().receive(timeout):
            answered = message.body.get("for")
            if type(answered) is int:
                self._answers.setdefault(answered, deque()).append(message)
        waiting = [answer for answers in self._answers.values() for answer in answers]
        if len(waiting) > limits.MAX_WAITING_JOBS or sum(a.nbytes for a in waiting) > limits.MAX_WAITING_BYTES:
            raise ChannelLost(f"the worker at {self.address} sends what nobody asked it for")


def _number(value: Any, most: int) -> int:
    """What another machine gave as a number from 0 to `most`. Raises ValueError for anything else."""
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{str(value)[:40]} is not a number from 0 to {most}")
    return value


def _duration(value: Any) -> float | None:
    """Seconds that another machine says something took; None if it makes no sense."""
    return max(float(value), _MIN_SECONDS) if type(value) in (int, float) and 0 <= value < _MAX_SECONDS else None


def _mapping(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {}


def _integers(value: Any) -> dict[str, int]:
    return {str(key): number for key, number in _mapping(value).items() if type(number) is int}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers [n]: comparing 16-bit floats one by one takes a CPU ten times as long."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return flat.view(torch.int64) if flat.numel() % 8 == 0 and flat.storage_offset() % 8 == 0 else flat


class _KeptTensors:
    """What the worker holds of this run's unchanging tensors, so that they are named instead of sent.

    Compares with what was sent (exact, on the tensor's own device) rather than trusting names or addresses.
    """

    def __init__(self) -> None:
        self._versions: dict[str, list[tuple[int, torch.Tensor]]] = {}
        self._bytes = 0
        self._next = 0
        self._dropped: list[int] = []

    def place(self, path: str, value: Any, fresh: dict[int | str, torch.Tensor]) -> Any:
        """`value` with large tensors replaced by names; those not held yet are added to `fresh`."""
        if type(value) in (list, tuple):
            return type(value)(self.place(f"{path}[{i}]", item, fresh) for i, item in enumerate(value))
        if not isinstance(value, torch.Tensor) or value.nbytes <= limits.RUN_TENSOR_MIN_BYTES:
            return value
        versions = self._versions.setdefault(path, [])
        for position, (name, held) in enumerate(versions):
            alike = (held.shape, held.dtype, held.device) == (value.shape, value.dtype, value.device)
            if alike and torch.equal(_bits(held), _bits(value)):
                versions.append(versions.pop(position))
                return Kept(name)
        if self._bytes + value.nbytes > limits.RUN_TENSOR_CACHE_BYTES:
            return value
        if len(versions) >= limits.RUN_TENSOR_VERSIONS:
            name, held = versions.pop(0)
            self._dropped.append(name)
            self._bytes -= held.nbytes
        self._next += 1
        # A copy: a forward that writes into its arguments must not change what is compared with.
        fresh[self._next] = value.detach().clone()
        versions.append((self._next, fresh[self._next]))
        self._bytes += value.nbytes
        return Kept(self._next)

    def take_dropped(self) -> list[int]:
        dropped, self._dropped = self._dropped, []
        return dropped
