"""Model files between two machines: their identity, the worker's bounded cache, and receiving them.

Only safetensors files travel. What is in them is left to formats, loading them to model_store.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
import struct
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..formats.header import UnreadableFile, read_header
from . import limits
from .codec import ProtocolError
from .file_content import ContentHash

try:
    import fcntl
except ImportError:  # Windows, where workers are not supported
    fcntl = None


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
        if not isinstance(ref.name, str) or not _is_inside(ref.name) or type(ref.bytes) is not int:
            raise ProtocolError("a file is described wrongly")
        if not 8 <= ref.bytes < 1 << 63:
            raise ProtocolError("a file is described wrongly")
        if ref.folder is not None and not isinstance(ref.folder, str):
            raise ProtocolError("a file is described wrongly")
        return ref


def _is_inside(name: str) -> bool:
    """Whether a name stays in the folder that it is looked for in; a driver may write it as Windows does."""
    return "\0" not in name and not {"", ".", ".."} & set(re.split(r"[/\\]", name))


# By path: what tells whether the file is still the same, and its digest.
_digests: dict[str, tuple[tuple[int, ...], str]] = {}


def file_digest(path: Path) -> str:
    """Identity of a safetensors file: BLAKE2b over its size, its header, samples of every tensor, and some blocks.

    Training or merging changes a tensor everywhere, so three places of each tell two models apart without reading all
    of both. Reads a few MiB besides the header, whatever the size. Raises OSError.
    """
    status = path.stat()
    known = _digests.get(str(path))
    if known is not None and known[0] == _signature(status):
        return known[1]
    digest = _sampled_digest(path, status.st_size)
    _digests[str(path)] = _signature(status), digest
    return digest


def _signature(status: os.stat_result) -> tuple[int, ...]:
    # The change time too: copying with preserved times gives other content the same modification time.
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


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


class FileCache:
    """Files that drivers have sent, by digest, in one folder of bounded size; the least recently used go first."""

    def __init__(self, folder: Path, max_bytes: int = limits.FILE_CACHE_BYTES) -> None:
        self.folder = folder
        self.max_bytes = max_bytes

    def find(self, ref: FileRef) -> Path | None:
        """The file, if it is here whole."""
        path = self._path(ref)
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()  # nothing here is a link, unless others can write here
            if stat.S_ISREG(status.st_mode) and status.st_size == ref.bytes and file_digest(path) == ref.digest:
                os.utime(path)
                # That alone changed its times; it need not be read again.
                _digests[str(path)] = _signature(path.stat()), ref.digest
                return path
        return None

    def free_bytes(self) -> int:
        """Room on the disk for files that drivers send; 0 if that cannot be told."""
        with contextlib.suppress(OSError):
            return max(0, shutil.disk_usage(self.folder).free - limits.FILE_CACHE_RESERVE_BYTES)
        return 0

    def _path(self, ref: FileRef) -> Path:
        return self.folder / f"{ref.digest}.safetensors"

    def receive(self, ref: FileRef) -> IncomingFile:
        """Begin to receive a file, or go on with one that a broken link cut off.

        Raises OSError with a sentence for a person if it cannot be stored.
        """
        if ref.bytes > self.max_bytes:
            raise OSError(f"{ref.name} needs {_gb(ref.bytes)}, the worker's file cache holds {_gb(self.max_bytes)}")
        self.folder.mkdir(parents=True, exist_ok=True)
        target = self._path(ref)
        part = target.with_suffix(_PART)
        self._remove_stale(part)
        self._make_room(ref.bytes, part)
        needed = ref.bytes - (part.stat().st_size if part.exists() else 0)
        free = shutil.disk_usage(self.folder).free
        if needed > free - limits.FILE_CACHE_RESERVE_BYTES and needed > limits.FILE_CHUNK_BYTES * 16:
            raise OSError(f"{ref.name} needs {_gb(needed)}, the worker's disk has {_gb(free)} free at {self.folder}")
        return IncomingFile(ref, target)

    def _remove_stale(self, wanted: Path) -> None:
        """Remove what was never sent to its end, but not what is about to be continued."""
        for part in self.folder.glob(f"*{_PART}"):
            with contextlib.suppress(FileNotFoundError):
                if part != wanted and time.time() - part.stat().st_mtime > limits.FILE_PART_SECONDS:
                    _remove_part(part)

    def _make_room(self, needed: int, wanted: Path) -> None:
        # Another worker that shares the folder writes to its own part all the time.
        busy = time.time() - limits.STALL_TIMEOUT
        held = [(path.stat(), path) for path in self.folder.glob("*.safetensors")]
        parts = [(path.stat(), path) for path in self.folder.glob(f"*{_PART}") if path != wanted]
        held += [(status, path) for status, path in parts if status.st_mtime < busy]
        total = sum(status.st_size for status, _ in held)
        for status, path in sorted(held, key=lambda item: item[0].st_mtime):
            if total + needed <= self.max_bytes:
                return
            total -= status.st_size
            _remove_part(path) if path.suffix == _PART else path.unlink(missing_ok=True)


_PART = ".part"
_RECORD = ".part.json"
_RECORD_BYTES = 128
# A link in the cache was not made by a worker.
_CREATE = os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)


def _remove_part(part: Path) -> None:
    part.with_suffix(_RECORD).unlink(missing_ok=True)
    part.unlink(missing_ok=True)


class IncomingFile:
    """One file while it is being received. What arrived outlives a broken link, and this process, if it is left.

    Beside the part lies a record of how much of it is sound: its length and the digest of that much.
    """

    def __init__(self, ref: FileRef, target: Path) -> None:
        """Raises OSError if another process is receiving the same file here."""
        self.ref = ref
        self.received = 0
        self._target = target
        self._part = target.with_suffix(_PART)
        self._record = target.with_suffix(_RECORD)
        self._hash = ContentHash()
        self._file: BinaryIO = os.fdopen(os.open(self._part, os.O_RDWR | _CREATE, 0o600), "r+b")
        try:
            _lock(self._file, ref.name)
            self._resume()
        except BaseException:
            self._close()
            raise

    def _resume(self) -> None:
        """Go on behind what is recorded, if that is what lies there; begin anew if not."""
        try:
            record = json.loads(self._record.read_text())
            length, expected = record["bytes"], record["digest"]
            left = length = length if isinstance(length, int) and 0 <= length <= self.ref.bytes else 0
        except (OSError, ValueError, LookupError, TypeError):
            left, length, expected = 0, 0, None
        while left > 0 and (block := self._file.read(min(left, limits.FILE_CHUNK_BYTES))):
            self._hash.update(block)
            left -= len(block)
        if left == 0 and self._hash.hexdigest() == expected:
            self.received = length
        else:
            self._hash.restart()
        self._file.truncate(self.received)
        self._file.seek(self.received)

    def write(self, offset: int, data: memoryview) -> None:
        """Append the next bytes. Raises OSError if the disk takes no more, ProtocolError for bytes out of order."""
        if offset != self.received or offset + data.nbytes > self.ref.bytes:
            raise ProtocolError("a file arrives out of order")
        self._hash.update(data)
        self._file.write(data)
        self.received += data.nbytes

    def finish(self, content_digest: str) -> Path:
        """Check what arrived and put it in place. Raises OSError if it is not what was announced."""
        try:
            self._file.flush()
            if self.received != self.ref.bytes or self._hash.hexdigest() != content_digest:
                raise OSError(f"{self.ref.name} arrived damaged; render again to send it again")
            if _sampled_digest(self._part, self.received) != self.ref.digest:
                raise OSError(f"{self.ref.name} changed while it was sent; render again")
            os.replace(self._part, self._target)
        finally:
            self.discard()
        return self._target

    def save(self) -> None:
        """Record how much has arrived, so that it need not be sent again. Raises OSError."""
        self._file.flush()
        record = json.dumps({"bytes": self.received, "digest": self._hash.hexdigest()})
        # Over the former one, of the same length: a new file in its place would have the file system write all that is
        # in memory of it to the disk first. A torn record is no record.
        with os.fdopen(os.open(self._record, os.O_WRONLY | _CREATE, 0o600), "wb") as out:
            out.write(record.ljust(_RECORD_BYTES).encode())

    def leave(self) -> None:
        """Stop receiving; the next `receive` of the same file goes on from here."""
        if self.received == 0 or self._file.closed:
            self.discard()
            return
        try:
            self.save()
            self._close()
        except OSError:
            self.discard()

    def discard(self) -> None:
        """Give up: close and remove what was written."""
        with contextlib.suppress(OSError):
            self._close()
        _remove_part(self._part)

    def _close(self) -> None:
        self._hash.close()
        self._file.close()


def _lock(file: BinaryIO, name: str) -> None:
    """Hold `file` until it is closed or this process ends. Raises OSError if another process holds it."""
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(f"{name} is being received there from another driver; render again when it is done") from None


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
