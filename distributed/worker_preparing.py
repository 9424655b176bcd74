"""What a worker needs before it can build a driver's model: the file and the patches, which the driver sends if asked.

All of this happens in the serving thread; what would keep that from its other work is done beside it (file_content).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from . import limits
from .codec import ProtocolError
from .file_cache import FileCache, IncomingFile
from .files import FileRef
from .jobs import say
from .messages import Kind, Message
from .patch_cache import PatchCache
from .recipe import tree_digest
from .runtime import Runtime

_T = TypeVar("_T")
# (number of the message to answer, recipe with its patches, file, where it lies, digest of the recipe)
Build = Callable[[int, dict[str, Any], FileRef, Path, str], None]


@dataclass
class _Preparation:
    number: int
    tree: dict[str, Any]
    file: FileRef
    path: Path | None
    # Digests of patch tensors: those that the driver has to send, and those of them that have not come yet.
    tensors: list[str]
    missing: set[str]
    incoming: IncomingFile | None = None
    # Whether the driver was told what is missing, and by which message it has begun to send the file.
    asked: bool = False
    incoming_number: int = 0


class Preparing:
    """One driver's recipe, until there is all that it takes; then `build` is called."""

    def __init__(
        self,
        runtime: Runtime,
        cache: FileCache,
        patches: PatchCache,
        answer: Callable[[Kind, dict[str, Any]], None],
        build: Build,
    ) -> None:
        self._runtime = runtime
        self._cache = cache
        self._patches = patches
        self._answer = answer
        self._build = build
        self._current: _Preparation | None = None

    def prepare(self, message: Message) -> None:
        if self._current is not None:
            raise ProtocolError("another recipe is not complete yet")
        ref = FileRef.from_message(message.body["file"])
        tree = message.body["recipe"]
        path = self._runtime.find(ref) or self._cache.find(ref)
        tensors = self._patches.missing(tree)
        incoming = self._cache.receive(ref) if path is None else None
        self._current = _Preparation(message.number, tree, ref, path, tensors, set(tensors), incoming)
        if incoming is not None and not incoming.ready(limits.POLL_SECONDS):
            say(f"Checking what is here of {ref.name} already.")
        self.go_on()

    def go_on(self) -> None:
        """Ask the driver for what is missing, as soon as it is known how much of the file is here already."""
        now = self._current
        if now is None or now.asked or (now.incoming is not None and not now.incoming.ready()):
            return
        now.asked = True
        held = now.incoming.received if now.incoming else 0
        need = {"file": now.path is None, "held": held, "tensors": now.tensors}
        self._answer(Kind.NEED, {"for": now.number, **need})
        self._build_if_complete()

    def tensors(self, message: Message) -> None:
        now = self._asked()
        self._patches.add(message.body["tensors"], now.missing)
        now.missing -= set(message.body["tensors"])
        self._build_if_complete()

    def file_begin(self, message: Message) -> None:
        now = self._asked()
        ref = FileRef.from_message(message.body["file"])
        incoming = _expected(now.incoming)
        if ref != now.file or now.incoming_number:
            raise ProtocolError("a file comes that was not asked for")
        held = f", of which {incoming.received / 1e9:.2f} GB are here" if incoming.received else ""
        say(f"Receiving {ref.name}, {ref.bytes / 1e9:.2f} GB{held}.")
        now.incoming_number = message.number

    def file_chunk(self, message: Message) -> None:
        now = self._asked()
        incoming = _expected(now.incoming)
        before = incoming.received
        incoming.write(message.body["offset"], memoryview(message.body["data"].numpy()))
        if before // limits.FILE_RECORD_BYTES != incoming.received // limits.FILE_RECORD_BYTES:
            incoming.save()
        self._answer(Kind.FILE_ACK, {"for": now.incoming_number, "bytes": incoming.received})

    def file_end(self, message: Message) -> None:
        now = self._asked()
        now.path = _expected(now.incoming).finish(message.body["digest"])
        now.incoming = None
        self._build_if_complete()

    @property
    def numbers(self) -> set[int]:
        """Messages that the driver waits for an answer to."""
        return {self._current.number, self._current.incoming_number} - {0} if self._current else set()

    def discard(self) -> None:
        """Forget the recipe and what has arrived of its file."""
        now, self._current = self._current, None
        if now is not None and now.incoming is not None:
            now.incoming.discard()

    def leave(self) -> None:
        """Forget the recipe; what has arrived of its file stays, for when that is sent again."""
        now, self._current = self._current, None
        if now is not None and now.incoming is not None:
            now.incoming.leave()

    def _asked(self) -> _Preparation:
        now = _expected(self._current)
        return _expected(now if now.asked else None)

    def _build_if_complete(self) -> None:
        now = self._current
        if now is None or now.missing or now.path is None:
            return
        self._current = None
        self._build(now.number, self._patches.fill(now.tree), now.file, now.path, tree_digest(now.tree, now.file))


def _expected(value: _T | None) -> _T:
    if value is None:
        raise ProtocolError("something comes that was not asked for")
    return value
