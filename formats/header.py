"""Read and check the header of a safetensors file without touching its tensor data.

Says what is stored where, and refuses files that are damaged; what the tensors mean is the handlers' business.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from .header_text import NOT_SAFETENSORS, Malformed, TensorInfo, parse_header_text, quote

__all__ = ["Header", "TensorInfo", "UnreadableFile", "display_name", "open_regular", "read_header"]

# The library allows 100 MB, which would take seconds and a gigabyte here. Headers of released models have at most a few
# hundred kilobytes, and a few megabytes where a workflow or a picture is in the metadata.
MAX_HEADER_BYTES = 16_000_000
_LENGTH_FIELD = struct.Struct("<Q")

# What a file that is not safetensors at all usually is, by its first bytes.
_LOOKALIKES: tuple[tuple[bytes, str], ...] = (
    (b"GGUF", "it is a GGUF file"),
    (b"PK\x03\x04", "it is a PyTorch or zip archive"),
    (b"\x80", "it is a Python pickle"),
    (b"version ", "it is a Git LFS pointer, not the model itself"),
    (b"<", "it is a web page, perhaps a login page"),
    (b"{", "it is a text file"),
)

_DOWNLOAD = "Download it again."


class UnreadableFile(ValueError):
    """A file cannot be read as safetensors. The message names the file, the cause and the next step."""

    def __init__(self, path: str | os.PathLike[str], cause: str, next_step: str) -> None:
        super().__init__(f"{display_name(path)} cannot be read: {cause}. {next_step}")


@dataclass(frozen=True, slots=True)
class Header:
    """A checked safetensors header; sizes and `data_start` are in bytes from the start of the file."""

    path: Path
    file_size: int
    metadata: Mapping[str, str]
    tensors: Mapping[str, TensorInfo]
    data_start: int


def display_name(path: str | os.PathLike[str]) -> str:
    """The file's name for a message: printable on any terminal, without its folders."""
    name = Path(path).name or str(path)
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name)


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading; a pipe or device is refused rather than waited for.

    Raises UnreadableFile if it is missing, not a file or not permitted.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UnreadableFile(path, "it is not a file", "Give the path of a model file.")
        return path.open("rb")
    except FileNotFoundError:
        raise UnreadableFile(path, "there is no such file", "Check its name and folder.") from None
    except (OSError, ValueError) as error:
        if isinstance(error, UnreadableFile):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise UnreadableFile(path, reason, "Check its name, folder and permissions.") from None


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read the header of a safetensors file and check it against the file's size; no tensor data is read.

    Format: u64 little-endian length, then that many bytes of JSON, then the data
    (https://github.com/huggingface/safetensors#format). It accepts what the library accepts, except
    duplicate keys, more than MAX_HEADER_BYTES and absurdly long entries. Raises UnreadableFile for anything else.
    """
    path = Path(path)
    with open_regular(path) as file:
        try:
            file_size = os.fstat(file.fileno()).st_size
            text, data_start = _read_text(file, file_size)
            metadata, tensors = parse_header_text(text)
            _check_layout(tensors, file_size - data_start)
        except Malformed as error:
            raise UnreadableFile(path, error.cause, error.next_step) from None
        except OSError as error:
            raise UnreadableFile(path, error.strerror or str(error), "Check the disk it is on.") from None
    return Header(path, file_size, metadata, tensors, data_start)


def _read_text(file: BinaryIO, file_size: int) -> tuple[str, int]:
    if file_size == 0:
        raise Malformed("it is empty", _DOWNLOAD)
    start = file.read(_LENGTH_FIELD.size)
    if len(start) < _LENGTH_FIELD.size:
        raise Malformed(f"it is only {file_size} bytes long, shorter than any safetensors file", _DOWNLOAD)
    (length,) = _LENGTH_FIELD.unpack(start)
    if length > MAX_HEADER_BYTES:
        for magic, what in _LOOKALIKES:
            if start.startswith(magic):
                raise Malformed(what, NOT_SAFETENSORS)
        if all(32 <= byte < 127 or byte in b"\t\r\n" for byte in start):
            raise Malformed("it is a text file", NOT_SAFETENSORS)
        raise Malformed(f"its header claims {length} bytes, above the limit of {MAX_HEADER_BYTES}", NOT_SAFETENSORS)
    data_start = _LENGTH_FIELD.size + length
    if data_start > file_size:
        raise Malformed(f"it is cut off inside its header ({file_size} of at least {data_start} bytes)", _DOWNLOAD)
    raw = file.read(length)
    if len(raw) < length:
        raise Malformed("it became shorter while it was read", "Wait until it is completely written.")
    try:
        return raw.decode("utf-8"), data_start
    except UnicodeDecodeError:
        raise Malformed("its header is not valid UTF-8", NOT_SAFETENSORS) from None


def _check_layout(tensors: Mapping[str, TensorInfo], data_bytes: int) -> None:
    """The tensors must cover the data part exactly once, without holes."""
    end = 0
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if info.begin < end:
            raise Malformed(f"the data of tensor {quote(name)} overlaps another tensor's")
        if info.begin > end:
            raise Malformed(f"the data of tensor {quote(name)} begins {info.begin - end} bytes too late")
        end = info.end
    if end > data_bytes:
        raise Malformed(f"it is cut off: its tensors need {end} bytes and it holds {data_bytes}", _DOWNLOAD)
    if end < data_bytes:
        raise Malformed(f"it holds {data_bytes - end} bytes that belong to no tensor", _DOWNLOAD)
