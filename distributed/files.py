"""Model files between two machines: their identity, the worker's bounded cache, and streaming in both directions.

Only safetensors files travel. What is in them is left to formats, loading them to model_store.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import struct
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..formats.header import UnreadableFile, read_header
from . import limits
from .codec import ProtocolError


@dataclass(frozen=True)
class FileRef:
    """A model file by kind of folder, name, size in bytes, and digest of its header and samples of its content."""

    folder: str | None
    name: str
    bytes: int
    digest: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_message(cls, data: Any) -> FileRef:
        """Check what came from the network. Raises ProtocolError."""
        if not isinstance(data, dict) or set(data) != {"folder", "name", "bytes", "digest"}:
            raise ProtocolError("a file is described wrongly")
        ref = cls(**data)
        if not isinstance(ref.digest, str) or re.fullmatch("[0-9a-f]{40}", ref.digest) is None:
            raise ProtocolError("a file is described wrongly")
        if not isinstance(ref.name, str) or type(ref.bytes) is not int:
            raise ProtocolError("a file is described wrongly")
        if not 8 <= ref.bytes < 1 << 63:
            raise ProtocolError("a file is described wrongly")
        if ref.folder is not None and not isinstance(ref.folder, str):
            raise ProtocolError("a file is described wrongly")
        return ref


_digests: dict[tuple[str | int, ...], str] = {}


def file_digest(path: Path) -> str:
    """Identity of a safetensors file: BLAKE2b over its size, its header, samples of every tensor, and some blocks.

    Training or merging changes a tensor everywhere, so three places of each tell two models apart without reading all
    of both. Reads a few MiB besides the header, whatever the size. Raises OSError.
    """
    status = path.stat()
    # The change time too: copying with preserved times gives other content the same modification time.
    key = (str(path), status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    if key not in _digests:
        _digests[key] = _sampled_digest(path, status.st_size)
    return _digests[key]


def _sampled_digest(path: Path, size: int) -> str:
    digest = hashlib.blake2b(struct.pack("<Q", size), digest_size=20)
    with path.open("rb") as file:
        prefix = file.read(8)
        header = int.from_bytes(prefix, "little") if len(prefix) == 8 else 0
        data_start = 8 + min(header, limits.MAX_HEADER_BYTES * 4, size)
        digest.update(prefix)
        digest.update(file.read(data_start - 8))
        data = max(0, size - data_start)
        block = limits.DIGEST_BLOCK_BYTES
        if data <= block * limits.DIGEST_BLOCKS:
            offsets = range(data_start, size, block)
        else:
            last = data - block
            offsets = [data_start + last * i // (limits.DIGEST_BLOCKS - 1) for i in range(limits.DIGEST_BLOCKS)]
        for offset in offsets:
            file.seek(offset)
            digest.update(file.read(block))
        for offset in _tensor_samples(path):
            file.seek(offset)
            digest.update(file.read(limits.DIGEST_SAMPLE_BYTES))
    return digest.hexdigest()


def _tensor_samples(path: Path) -> Iterator[int]:
    """Where to look at each tensor: its begin, its middle and its end. Nothing for a file that is no safetensors."""
    try:
        header = read_header(path)
    except UnreadableFile:
        return
    for tensor in header.tensors.values():
        begin, end = header.data_start + tensor.begin, header.data_start + tensor.end
        last = max(begin, end - limits.DIGEST_SAMPLE_BYTES)
        yield from sorted({begin, (begin + last) // 2, last})


def read_chunks(path: Path) -> Iterator[tuple[int, bytes]]:
    """(offset, bytes) of a file in FILE_CHUNK_BYTES pieces. Raises OSError."""
    with path.open("rb") as file:
        offset = 0
        while chunk := file.read(limits.FILE_CHUNK_BYTES):
            yield offset, chunk
            offset += len(chunk)


class FileCache:
    """Files that drivers have sent, by digest, in one folder of bounded size; the least recently used go first."""

    def __init__(self, folder: Path, max_bytes: int = limits.FILE_CACHE_BYTES) -> None:
        self.folder = folder
        self.max_bytes = max_bytes

    def find(self, ref: FileRef) -> Path | None:
        """The file, if it is here whole."""
        path = self._path(ref)
        if path.is_file() and path.stat().st_size == ref.bytes and file_digest(path) == ref.digest:
            os.utime(path)
            return path
        return None

    def _path(self, ref: FileRef) -> Path:
        return self.folder / f"{ref.digest}.safetensors"

    def receive(self, ref: FileRef) -> IncomingFile:
        """Begin to receive a file. Raises OSError with a sentence for a person if it cannot be stored."""
        if ref.bytes > self.max_bytes:
            raise OSError(f"{ref.name} needs {_gb(ref.bytes)}, the worker's file cache holds {_gb(self.max_bytes)}")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._remove_stale()
        self._make_room(ref.bytes)
        free = shutil.disk_usage(self.folder).free
        if ref.bytes > free - limits.FILE_CACHE_RESERVE_BYTES and ref.bytes > limits.FILE_CHUNK_BYTES * 16:
            raise OSError(f"{ref.name} needs {_gb(ref.bytes)}, the worker's disk has {_gb(free)} free at {self.folder}")
        return IncomingFile(ref, self._path(ref))

    def _remove_stale(self) -> None:
        """Remove what a killed worker left; another worker that shares the folder writes to its own all the time."""
        for part in self.folder.glob("*.part"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - part.stat().st_mtime > limits.STALL_TIMEOUT:
                    part.unlink()

    def _make_room(self, needed: int) -> None:
        held = sorted(self.folder.glob("*.safetensors"), key=lambda path: path.stat().st_mtime)
        total = sum(path.stat().st_size for path in held)
        for path in held:
            if total + needed <= self.max_bytes:
                return
            total -= path.stat().st_size
            path.unlink(missing_ok=True)


class IncomingFile:
    """One file while it is being received; nothing of it is left behind unless `finish` succeeds."""

    def __init__(self, ref: FileRef, target: Path) -> None:
        self.ref = ref
        self.received = 0
        self._target = target
        self._part = target.with_name(f"{target.stem}.{os.getpid()}.part")
        self._hash = hashlib.blake2b(digest_size=20)
        self._file: BinaryIO = self._part.open("wb")

    def write(self, offset: int, data: memoryview) -> None:
        """Append the next bytes. Raises OSError if the disk takes no more, ProtocolError for bytes out of order."""
        if offset != self.received or offset + data.nbytes > self.ref.bytes:
            raise ProtocolError("a file arrives out of order")
        self._file.write(data)
        self._hash.update(data)
        self.received += data.nbytes

    def finish(self, content_digest: str) -> Path:
        """Check what arrived and put it in place. Raises OSError if it is not what was announced."""
        try:
            self._file.close()
            if self.received != self.ref.bytes or self._hash.hexdigest() != content_digest:
                raise OSError(f"{self.ref.name} arrived damaged; render again to send it again")
            if _sampled_digest(self._part, self.received) != self.ref.digest:
                raise OSError(f"{self.ref.name} changed while it was sent; render again")
            os.replace(self._part, self._target)
        finally:
            self.discard()
        return self._target

    def discard(self) -> None:
        """Give up: close and remove what was written."""
        with contextlib.suppress(OSError):
            self._file.close()
        self._part.unlink(missing_ok=True)


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
