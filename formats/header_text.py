"""The JSON text of a safetensors header: parse it in bounded memory and check each tensor's entry on its own.

Whether the entries fit together and fit the file is header.py's business.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import TypeVar

MAX_MEMBERS = 50_000  # tensors, or metadata strings; several times what any published file has
MAX_ENTRY_CHARS = 4096  # one tensor's {"dtype", "shape", "data_offsets"}
_U64_MAX = 2**64 - 1

# Bits per element of every dtype name in the safetensors format (enum Dtype of its Rust crate, 0.8.0).
DTYPE_BITS: dict[str, int] = {
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8"), 8),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}

BROKEN_WRITER = "Download it again; if that does not help, the program that wrote it made a broken file."
NOT_SAFETENSORS = "Check that this is a safetensors file, and download it again if it is."

_SPACE = re.compile(r"[ \t\n\r]*")
_COLON = re.compile(r"[ \t\n\r]*:[ \t\n\r]*")
_SEPARATOR = re.compile(r"[ \t\n\r]*([,}])[ \t\n\r]*")
_USUAL_STRING = re.compile(r'"([^"\\\x00-\x1f]*)"')
# An entry as the library and most writers write it; a JSON decoder for each would take most of the time.
_SIZE = r"(?:0|[1-9][0-9]{0,19})"
_USUAL_ENTRY = re.compile(
    rf'\{{"dtype": ?"(\w{{1,20}})", ?"shape": ?\[((?:{_SIZE}(?:, ?{_SIZE}){{0,15}})?)\], ?'
    rf'"data_offsets": ?\[({_SIZE}), ?({_SIZE})\]\}}',
    re.ASCII,
)
_STRING_DECODER = json.JSONDecoder()
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as the header describes it; begin and end are byte offsets relative to `Header.data_start`."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def elements(self) -> int:
        """Number of stored elements (packed formats hold several values in one)."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the data in bytes."""
        return self.end - self.begin


class Malformed(Exception):
    """Cause and next step of a refusal, before the file's name is known."""

    def __init__(self, cause: str, next_step: str = BROKEN_WRITER) -> None:
        super().__init__(cause)
        self.cause = cause
        self.next_step = next_step


def parse_header_text(text: str) -> tuple[dict[str, str], dict[str, TensorInfo]]:
    """The header's metadata and tensors. Raises Malformed."""
    # Walked entry by entry instead of handed to json.loads as a whole: 100 MB of nested brackets would
    # otherwise become gigabytes of Python objects before the first check.
    metadata: dict[str, str] = {}
    tensors: dict[str, TensorInfo] = {}

    def read_value(name: str, pos: int) -> tuple[None, int]:
        nonlocal metadata
        if name == "__metadata__":
            metadata, pos = _read_metadata(text, pos)
        else:
            tensors[name], pos = _read_entry(text, pos, name)
        return None, pos

    _, pos = _read_object(text, _skip(text, 0), "its header", read_value)
    if _skip(text, pos) != len(text):
        raise Malformed("its header is not valid JSON (text after the closing brace)")
    return metadata, tensors


def _read_object(
    text: str, pos: int, where: str, read_value: Callable[[str, int], tuple[_T, int]]
) -> tuple[dict[str, _T], int]:
    """One JSON object whose values `read_value(key, position)` reads; returns it and the position behind it."""
    if not text.startswith("{", pos):
        raise Malformed(f"{where} is not a JSON object")
    found: dict[str, _T] = {}
    pos = _skip(text, pos + 1)
    if text.startswith("}", pos):
        return found, pos + 1
    while True:
        key, pos = _read_string(text, pos, where)
        if key in found:
            raise Malformed(f"{where} names {quote(key)} twice")
        if len(found) >= MAX_MEMBERS:
            raise Malformed(f"{where} has more than {MAX_MEMBERS} entries", NOT_SAFETENSORS)
        colon = _COLON.match(text, pos)
        if colon is None:
            raise Malformed(f"{where} is not valid JSON (no colon after {quote(key)})")
        found[key], pos = read_value(key, colon.end())
        separator = _SEPARATOR.match(text, pos)
        if separator is None:
            raise Malformed(f"{where} is not valid JSON (after {quote(key)})")
        pos = separator.end()
        if separator[1] == "}":
            return found, pos


def _read_metadata(text: str, pos: int) -> tuple[dict[str, str], int]:
    if text.startswith("null", pos):
        return {}, pos + 4
    where = "the __metadata__ of its header"
    return _read_object(text, pos, where, lambda key, at: _read_string(text, at, where))


def _read_entry(text: str, pos: int, name: str) -> tuple[TensorInfo, int]:
    usual = _USUAL_ENTRY.match(text, pos)
    if usual is not None:
        dtype, sizes, begin, end = usual.groups()
        shape = [int(size) for size in sizes.split(",")] if sizes else []
        return _tensor_info(dtype, shape, int(begin), int(end), name), usual.end()
    label = _label(name)
    if not text.startswith("{", pos):
        raise Malformed(f"{label} is not a JSON object")
    end = text.find("}", pos, pos + MAX_ENTRY_CHARS) + 1
    if not end:
        raise Malformed(f"{label} does not end within {MAX_ENTRY_CHARS} characters")
    try:
        entry = _ENTRY_DECODER.decode(text[pos:end])
    except (ValueError, RecursionError):
        raise Malformed(f"{label} is not valid JSON, or names a key twice") from None
    return _tensor_info(*_values(entry, label), name), end


def _label(name: str) -> str:
    return f"the header entry of tensor {quote(name)}"


def _values(entry: Mapping[str, object], label: str) -> tuple[str, list[int], int, int]:
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or not isinstance(shape, list) or not isinstance(offsets, list):
        raise Malformed(f"{label} lacks a dtype, shape or data_offsets of the right type")
    if len(offsets) != 2 or any(type(n) is not int for n in (*shape, *offsets)):
        raise Malformed(f"{label} has a shape or data_offsets that are not whole numbers")
    if min((*shape, *offsets)) < 0:
        raise Malformed(f"{label} has a negative shape or offset")
    return dtype, shape, offsets[0], offsets[1]


def _tensor_info(dtype: str, shape: list[int], begin: int, end: int, name: str) -> TensorInfo:
    if begin > end:
        raise Malformed(f"{_label(name)} has data_offsets that end before they begin")
    if dtype not in DTYPE_BITS:
        next_step = "Update the pack, or use a file with a dtype that safetensors defines."
        raise Malformed(f"{_label(name)} has the unknown dtype {quote(dtype)}", next_step)
    bits = DTYPE_BITS[dtype]
    for size in shape:  # step by step, as the library does: an overflow counts even if a later size is 0
        bits *= size
        if bits > _U64_MAX or size > _U64_MAX:
            raise Malformed(f"{_label(name)} has a shape too large for any file")
    if bits != 8 * (end - begin):
        raise Malformed(f"{_label(name)} has {end - begin} bytes, which is not dtype {dtype} times its shape")
    return TensorInfo(dtype, tuple(shape), begin, end)


def _read_string(text: str, pos: int, where: str) -> tuple[str, int]:
    usual = _USUAL_STRING.match(text, pos)
    if usual is not None:
        return usual[1], usual.end()
    if not text.startswith('"', pos):
        raise Malformed(f"{where} is not valid JSON (a string was expected)")
    try:
        value, end = _STRING_DECODER.raw_decode(text, pos)
        if not value.isascii():
            value.encode("utf-8")  # a lone surrogate is no text
    except ValueError:
        raise Malformed(f"{where} is not valid JSON (a string is broken)") from None
    return value, end


def _unique_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise ValueError("duplicate key")
    return unique


def _whole_number(digits: str) -> int:
    if digits == "-0":  # a float to the library, which refuses it
        raise ValueError("negative zero")
    return int(digits)


_ENTRY_DECODER = json.JSONDecoder(object_pairs_hook=_unique_pairs, parse_int=_whole_number)


def _skip(text: str, pos: int) -> int:
    match = _SPACE.match(text, pos)
    return match.end() if match else pos


def quote(name: str) -> str:
    """A name from the file for a message: short, and plain ASCII whatever the file says."""
    return ascii(name if len(name) <= 80 else name[:77] + "...")
