"""Model files that drivers send to a worker: a cache of bounded size, and receiving a file into it.

Only safetensors files travel. Which file is which is left to files, hashing what arrives to file_content.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import time
from concurrent.futures import Future, wait
from pathlib import Path
from typing import BinaryIO

from . import limits
from .codec import ProtocolError
from .file_content import ContentHash
from .files import FileRef, file_digest, sampled_digest, touch

try:
    import fcntl
except ImportError:  # Windows, where workers are not supported
    fcntl = None


class FileCache:
    """Files that drivers have sent, by digest, in one folder of bounded size; the least recently used go first."""

    def __init__(self, folder: Path, max_bytes: int = limits.FILE_CACHE_BYTES) -> None:
        self.folder = folder
        self.max_bytes = max_bytes

    def find(self, ref: FileRef) -> Path | None:
        """The file, if it is here whole."""
        path = self._path(ref)
        with contextlib.suppress(OSError):  # not there, or it cannot be read
            status = path.lstat()  # nothing here is a link, unless others can write here
            if stat.S_ISREG(status.st_mode) and status.st_size == ref.bytes and file_digest(path) == ref.digest:
                touch(path, ref.digest)
                return path
        return None

    def free_bytes(self) -> int:
        """Room on the disk for files that drivers send, in place of older ones, too; 0 if that cannot be told."""
        with contextlib.suppress(OSError):
            return max(0, self._free() + sum(size for size, _ in self._removable(None)))
        return 0

    def _free(self) -> int:
        return shutil.disk_usage(self.folder).free - limits.FILE_CACHE_RESERVE_BYTES

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
        self._make_room(ref, part)
        return IncomingFile(ref, target)

    def _remove_stale(self, wanted: Path) -> None:
        """Remove what was never sent to its end, but not what is about to be continued."""
        for part in self.folder.glob(f"*{_PART}"):
            with contextlib.suppress(FileNotFoundError):
                if part != wanted and time.time() - part.stat().st_mtime > limits.FILE_PART_SECONDS:
                    _remove_part(part)

    def _removable(self, wanted: Path | None) -> list[tuple[int, Path]]:
        """(bytes, path) of what may be removed, the least recently used first."""
        # Another worker that shares the folder writes to its own part all the time.
        busy = time.time() - limits.STALL_TIMEOUT
        held = [(path.stat(), path) for path in self.folder.glob("*.safetensors")]
        parts = [(path.stat(), path) for path in self.folder.glob(f"*{_PART}") if path != wanted]
        held += [(status, path) for status, path in parts if status.st_mtime < busy]
        return [(status.st_size, path) for status, path in sorted(held, key=lambda item: item[0].st_mtime)]

    def _make_room(self, ref: FileRef, part: Path) -> None:
        """Remove older files as far as this one needs it. Raises OSError, and removes nothing, if it cannot fit."""
        removable = self._removable(part)
        total = sum(size for size, _ in removable)
        needed, free = ref.bytes - (part.stat().st_size if part.exists() else 0), self._free()
        # The reserve is there for small ones.
        is_small = needed <= limits.FILE_CHUNK_BYTES * 16
        if not is_small and needed > free + total:
            raise OSError(
                f"{ref.name} needs {_gb(needed)}, the worker's disk has {_gb(max(0, free + total))} free for it at "
                f"{self.folder}; free some space there, or start it with --cache on another disk"
            )
        for size, path in removable:
            if total + ref.bytes <= self.max_bytes and (is_small or needed <= free):
                return
            total, free = total - size, free + size
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
        """Nothing can be written before `ready`. Raises OSError if another process is receiving the same file here."""
        self.ref = ref
        # Bytes that are here and sound, once it is `ready`.
        self.received = 0
        self._target = target
        self._part = target.with_suffix(_PART)
        self._record = target.with_suffix(_RECORD)
        self._hash = ContentHash()
        self._file: BinaryIO = os.fdopen(os.open(self._part, os.O_RDWR | _CREATE, 0o600), "r+b")
        try:
            _lock(self._file, ref.name)
            self._recorded, self._digest = self._read_record()
            # Another worker that shares the folder is not to take it for one that nobody goes on with.
            os.utime(self._file.fileno())
            self._checking: Future[bool] | None = self._hash.read(self._file, self._recorded)
        except BaseException:
            self._close()
            raise

    def _read_record(self) -> tuple[int, str | None]:
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            record = json.loads(self._record.read_text())
            length, digest = record["bytes"], record["digest"]
            if isinstance(length, int) and 0 <= length <= self.ref.bytes:
                return length, digest
        return 0, None

    def ready(self, patience: float = 0.0) -> bool:
        """Whether it is known how much is here: as much as is recorded, if that is what lies there, else nothing.

        Waits for that at most `patience` seconds; a large part takes minutes. Raises OSError.
        """
        if self._checking is None:
            return True
        if not wait([self._checking], patience).done:
            return False
        try:
            is_whole = self._checking.result()
        except OSError:  # it is sent again
            is_whole = False
        self._checking = None
        if is_whole and self._hash.hexdigest() == self._digest:
            self.received = self._recorded
        else:
            self._hash.restart()
        self._file.truncate(self.received)
        self._file.seek(self.received)
        return True

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
            if sampled_digest(self._part, self.received) != self.ref.digest:
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
        if self._checking is None and (self.received == 0 or self._file.closed):
            self.discard()
            return
        try:
            if self._checking is None:
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
