"""The identity of a model file on two machines: where it lies, how large it is, and a digest of samples of it.

Keeping files that a driver sends is left to file_cache, what is in them to formats, loading them to model_store.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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
    digest = sampled_digest(path, status.st_size)
    _digests[str(path)] = _signature(status), digest
    return digest


def touch(path: Path, digest: str) -> None:
    """Note that a file of this digest is in use. That alone changes its times; it need not be read again."""
    os.utime(path)
    _digests[str(path)] = _signature(path.stat()), digest


def _signature(status: os.stat_result) -> tuple[int, ...]:
    # The change time too: copying with preserved times gives other content the same modification time.
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def sampled_digest(path: Path, size: int) -> str:
    """See file_digest, which remembers what this reads."""
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
