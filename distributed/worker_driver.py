"""The driver that a worker serves: who it is, and which part of the worker each of its messages is for.

Whatever it sends, it can do no more than have itself given up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import limits
from .addresses import Address
from .codec import ProtocolError
from .fields import check_fields
from .file_cache import FileCache
from .jobs import Job, Jobs, say
from .link_sink import SECRET_BYTES, Sink
from .messages import Kind, Message
from .patch_cache import PatchCache
from .runtime import Runtime
from .usage import Usage
from .worker_computing import Computing
from .worker_preparing import Preparing
from .worker_tokens import TokenRank


@dataclass(frozen=True)
class Means:
    """What a worker has, for whichever driver it serves."""

    runtime: Runtime
    cache: FileCache
    patches: PatchCache
    jobs: Jobs
    tokens: TokenRank
    addresses: Sequence[Address]
    usage: Usage


class ServedDriver:
    """One driver, from its greeting until it goes. For the serving thread."""

    def __init__(
        self,
        session: bytes,
        name: str,
        means: Means,
        *,
        local: bool,
        answer: Callable[[Kind, dict[str, Any]], None],
        leave: Callable[[], None],
    ) -> None:
        """local: it is on this machine. answer: tells it something; leave: it wants no more."""
        self.session = session
        self.name = name
        self.since = time.time()
        self._means = means
        self._answer = answer
        self._given_up = False
        # Whether it has measured plain TCP: once is enough, and each time a port is opened.
        self._sink_opened = False
        self._computing = Computing(session, means.runtime, means.jobs, means.tokens, means.usage, local=local)
        self._preparing = Preparing(means.runtime, means.cache, means.patches, answer, self._computing.build)
        self._leave = leave

    def handle(self, message: Message) -> None:
        """Do what a message asks for, or give the driver up."""
        if self._given_up and message.kind not in (Kind.CANCEL, Kind.END):
            return

        def handled() -> None:
            check_fields(message)
            _HANDLERS[message.kind](self, message)

        self._guarded(handled, f"a {message.kind.name} message", {message.number})

    def go_on(self) -> None:
        """Do what no message has to come for."""
        self._guarded(self._preparing.go_on, "its recipe", set())

    def release(self) -> None:
        """It is gone: stop what runs for it, and keep what has arrived of a file."""
        self._preparing.leave()
        self._means.jobs.cancel(self.session)
        self._means.jobs.add(Job(b"", 0, None, lambda: self._means.tokens.forget() or {}))

    @property
    def summary(self) -> str:
        """What was done for it, for whoever reads the log."""
        shares, seconds = self._computing.shares, self._computing.seconds
        if not shares:
            return f"Served {self.name}: it had nothing to compute."
        return f"Served {self.name}: computed {shares} share{'s' * (shares > 1)} of its forwards in {seconds:.1f} s."

    # --- what goes wrong ----------------------------------------------------------------------------------------------

    def _guarded(self, work: Callable[[], None], what: str, numbers: set[int]) -> None:
        try:
            work()
        except OSError as error:
            reason = f"the model file cannot be kept on the worker: {error.strerror or error}"
            if error.errno is not None:
                reason += "; free some space there, or start it with --cache on another disk"
            self._give_up(numbers, reason)
        except Exception as error:  # whatever a driver sends, the worker lives on
            self._give_up(numbers, f"{what} makes no sense to the worker ({error})")

    def _give_up(self, numbers: set[int], reason: str) -> None:
        """Tell it, whatever it waits for, and do nothing more for it; what it had sent by then is ignored."""
        say(f"Gave up on a driver: {reason}")
        numbers = numbers | self._preparing.numbers
        self._preparing.discard()
        self._given_up = True
        for number in sorted(numbers):
            self._answer(Kind.FAILED, {"for": number, "reason": reason})

    # --- measuring the link, and letting go of models -----------------------------------------------------------------

    def _echo(self, message: Message) -> None:
        wanted = message.body["bytes"]
        if not 0 <= wanted <= limits.ECHO_BYTES:
            raise ProtocolError("the driver asked for too large an answer")
        self._answer(Kind.ECHO, {"for": message.number, "data": torch.zeros(wanted, dtype=torch.uint8)})

    def _sink(self, message: Message) -> None:
        secret = bytes.fromhex(message.body["secret"])
        if len(secret) != SECRET_BYTES:
            raise ProtocolError("the secret has a wrong length")
        if self._sink_opened:
            raise ProtocolError("plain TCP is measured once in a run")
        self._sink_opened = True
        addresses = self._means.addresses
        # The port after the one for exchanges, so that a firewall can let it pass.
        try:
            sink = Sink([address.host for address in addresses], addresses[0].port + 2, secret)
        except OSError as error:
            reason = f"there is no port for plain TCP ({error.strerror or error})"
            self._answer(Kind.FAILED, {"for": message.number, "reason": reason})
            return
        self._answer(Kind.SINK, {"for": message.number, "port": sink.port})
        check = self._computing.wanted(message.number)
        self._means.jobs.add(Job(self.session, message.number, None, lambda: sink.drain(check) or {}))

    def _free(self, message: Message) -> None:
        files = frozenset(str(digest) for digest in message.body["files"])
        self._means.patches.clear()

        def release() -> dict[str, Any]:
            if released := self._means.runtime.release(files):
                say(f"Let go of {released} model{'s' * (released > 1)} that the driver needs no more.")
            return {}

        # Of no session: it is done even if the driver goes at once.
        self._means.jobs.add(Job(b"", message.number, None, release))

    def _end(self, message: Message) -> None:
        self._leave()


# Not a table of each driver's own: it would refer to itself, and its model would stay until Python looks for cycles.
_HANDLERS: dict[Kind, Callable[[ServedDriver, Message], None]] = {
    Kind.PREPARE: lambda driver, message: driver._preparing.prepare(message),
    Kind.TENSORS: lambda driver, message: driver._preparing.tensors(message),
    Kind.FILE_BEGIN: lambda driver, message: driver._preparing.file_begin(message),
    Kind.FILE_CHUNK: lambda driver, message: driver._preparing.file_chunk(message),
    Kind.FILE_END: lambda driver, message: driver._preparing.file_end(message),
    Kind.FORWARD: lambda driver, message: driver._computing.forward(message),
    Kind.EXCHANGE_OPEN: lambda driver, message: driver._computing.exchange_open(message),
    Kind.EXCHANGE_JOIN: lambda driver, message: driver._computing.exchange_join(message),
    Kind.ABANDON: lambda driver, message: driver._computing.abandon(message),
    Kind.ECHO: ServedDriver._echo,
    Kind.SINK: ServedDriver._sink,
    Kind.FREE: ServedDriver._free,
    Kind.CANCEL: ServedDriver._end,
    Kind.END: ServedDriver._end,
}
