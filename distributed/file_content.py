"""A whole model file on its way: read in pieces, and hashed beside whatever else is done with them.

Which file it is and where it goes is left to files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from . import limits


class ContentHash:
    """The hash of a whole file on its way: SHA-256, for which processors have instructions.

    In a thread of its own and one piece behind: it takes as long as all else that is done with a piece.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1, "monarch-hash")
        self._latest: Future[None] | None = None

    def update(self, data: memoryview | bytes) -> None:
        """Add the next bytes, which must not change before the next call."""
        self._wait()
        self._latest = self._thread.submit(self._hash.update, data)

    def hexdigest(self) -> str:
        """Of all that was added."""
        self._wait()
        return self._hash.hexdigest()

    def restart(self) -> None:
        """Forget what was added."""
        self._wait()
        self._hash = hashlib.sha256()

    def __enter__(self) -> ContentHash:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread; no more can be added."""
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
