"""A whole model file on its way: read in pieces, and hashed beside whatever else is done with them.

Which file it is and where it goes is left to files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import torch

from . import limits


class ContentHash:
    """The hash of a whole file on its way: SHA-256, for which processors have instructions.

    In a thread of its own and one piece behind: it takes as long as all else that is done with a piece.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1, "monarch-hash")
        self._latest: Future[Any] | None = None
        self._closed = False

    def update(self, data: memoryview | bytes) -> None:
        """Add the next bytes, which must not change before the next call."""
        self._wait()
        self._latest = self._thread.submit(self._hash.update, data)

    def read(self, file: BinaryIO, length: int) -> Future[bool]:
        """Add the next `length` bytes of a file. Returns at once; the result is whether there were so many."""
        self._wait()

        def work() -> bool:
            left = length
            while left > 0 and not self._closed and (block := file.read(min(left, limits.FILE_CHUNK_BYTES))):
                self._hash.update(block)
                left -= len(block)
            return left == 0

        self._latest = future = self._thread.submit(work)
        return future

    def hexdigest(self) -> str:
        """Of all that was added."""
        self._wait()
        return self._hash.hexdigest()

    def restart(self) -> None:
        """Forget what was added, and whatever went wrong with that."""
        if self._latest is not None:
            self._latest.exception()
            self._latest = None
        self._hash = hashlib.sha256()

    def __enter__(self) -> ContentHash:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread, in the middle of a file if it reads one; no more can be added."""
        self._closed = True
        self._thread.shutdown()

    def _wait(self) -> None:
        if self._latest is not None:
            self._latest.result()


def read_chunks(path: Path) -> Iterator[tuple[int, memoryview]]:
    """(offset, bytes) of a file in FILE_CHUNK_BYTES pieces, each in memory of its own. Raises OSError."""
    with path.open("rb", buffering=0) as file:
        offset = 0
        while True:
            # Not a bytearray, which would be filled with zeros first.
            memory = torch.empty(limits.FILE_CHUNK_BYTES, dtype=torch.uint8).numpy().data
            filled = 0
            while filled < len(memory) and (count := file.readinto(memory[filled:])):
                filled += count
            if not filled:
                return
            yield offset, memory[:filled]
            offset += filled
