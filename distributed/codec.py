"""Message <-> frames: a JSON header of bounded size and raw tensor bytes, nothing that could be executed.

Knows nothing of sockets; channel decides where the frames travel. Everything read is checked before it is allocated.
"""

from __future__ import annotations

import ctypes
import functools
import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from . import limits
from .messages import Kind, Message

MAGIC = b"MNRC"
# magic, protocol version, kind, reserved, header bytes, message number
_PREFIX = struct.Struct("<4sBBHIQ")
# magic, protocol version, reserved, reserved, tensor index, message number, byte offset
_CHUNK = struct.Struct("<4sBBHIQQ")


class ProtocolError(ValueError):
    """The other side sent something that is not this protocol. The channel it came from is closed."""


class NotPlainData(TypeError):
    """A value that cannot travel: it is neither plain data nor a tensor. `path` says where it stood."""

    def __init__(self, path: str, value: object, why: str = "which is not plain data") -> None:
        self.path = path
        self.value = value
        super().__init__(f"{path} is a {type(value).__module__}.{type(value).__qualname__}, {why}")


@dataclass(frozen=True)
class Kept:
    """Stands for a tensor that the other side already holds under `name`."""

    name: int | str


@dataclass(frozen=True)
class TensorSpec:
    """What a header says of one tensor. `inline` tensors follow as frames, the others come in chunks."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    inline: bool


@dataclass(frozen=True)
class Encoded:
    """A message ready to be sent: control frames, and (index, bytes) of each tensor to be sent in chunks."""

    number: int
    control: list[Any]
    chunked: list[tuple[int, memoryview]]
    nbytes: int


def _dtypes() -> dict[str, torch.dtype]:
    found = {}
    for name in dir(torch):
        value = getattr(torch, name)
        if isinstance(value, torch.dtype) and not name.startswith(("q", "bits")):
            found[str(value).removeprefix("torch.")] = value
    return found


DTYPES: dict[str, torch.dtype] = _dtypes()
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_SCALARS = frozenset({type(None), bool, int, float, str})
# libzmq allocates a large frame's memory behind a header of its own.
_FRAME_ALIGNMENT = 8
_KINDS = {int(kind): kind for kind in Kind}
_encode_json = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_decode_json = json.JSONDecoder().raw_decode


# bytes -> an uninitialised CPU tensor [bytes] of uint8
Allocate = Callable[[int], torch.Tensor]


def new_memory(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


# --- tensors ---------------------------------------------------------------------------------------------------------


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The raw bytes of `tensor` (any shape and device), without a copy when it is contiguous on the CPU.

    The view shares the tensor's memory: neither may be written until the bytes have been received.
    """
    plain = tensor
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    if not plain.is_cpu:
        plain = plain.cpu()
    if not plain.is_contiguous():
        plain = plain.contiguous()
    # Not by way of numpy: the calls that bring every dtype there cost a tenth of a millisecond in cold caches.
    memory = (ctypes.c_ubyte * plain.nbytes).from_address(plain.data_ptr())
    vars(memory)["owner"] = plain  # lives as long as the view
    return memoryview(memory).cast("B")


def empty_tensor(spec: TensorSpec, allocate: Allocate = new_memory) -> tuple[torch.Tensor, memoryview]:
    """A CPU tensor for `spec` and a writable view of its bytes. Raises ProtocolError if torch cannot make it."""
    try:
        if spec.nbytes == 0:
            return torch.empty(spec.shape, dtype=spec.dtype), memoryview(bytearray())
        storage = allocate(spec.nbytes)
        return storage.view(spec.dtype).reshape(spec.shape), storage.numpy().data
    except RuntimeError as error:  # no memory, or an empty shape whose strides overflow
        raise ProtocolError(f"a tensor of {spec.nbytes} bytes and shape {spec.shape} cannot be made here") from error


def _received(spec: TensorSpec, frame: memoryview) -> torch.Tensor:
    """The tensor whose bytes are `frame`, in that memory where it is the frame's alone and aligned for the dtype."""
    if spec.nbytes == 0:
        return empty_tensor(spec)[0]
    in_place = spec.nbytes > limits.KEEPING_BYTES and spec.dtype.itemsize <= _FRAME_ALIGNMENT and not frame.readonly
    return torch.frombuffer(frame if in_place else bytearray(frame), dtype=spec.dtype).view(spec.shape)


# --- plain data with tensors in it -----------------------------------------------------------------------------------
# JSON has no tuples, tensors or dtypes: they become an object with one key that starts with "~".


class _CannotTravel(Exception):
    """A value of a tree cannot be packed; its argument says why."""


def _pack(value: Any, tensors: list[torch.Tensor], depth: int = 0) -> Any:
    if depth > limits.MAX_TREE_DEPTH:
        raise _CannotTravel("nested too deeply to be sent")
    if type(value) in _SCALARS:
        return value
    if isinstance(value, torch.Tensor):
        if not _can_travel(value):
            raise _CannotTravel(f"of a kind ({value.dtype}, {value.layout}) that cannot be sent")
        tensors.append(value)
        return {"~t": len(tensors) - 1}
    if type(value) is list:
        return [_pack(item, tensors, depth + 1) for item in value]
    if type(value) is tuple:
        return {"~u": [_pack(item, tensors, depth + 1) for item in value]}
    if isinstance(value, dict):
        if all(_is_name(key) for key in value):
            return {key: _pack(item, tensors, depth + 1) for key, item in value.items()}
        items = value.items()
        return {"~d": [[_pack(key, tensors, depth + 1), _pack(item, tensors, depth + 1)] for key, item in items]}
    if isinstance(value, Kept):
        return {"~k": value.name}
    if isinstance(value, torch.dtype) and value in _DTYPE_NAMES:
        return {"~y": _DTYPE_NAMES[value]}
    if isinstance(value, torch.Size):
        return {"~z": list(value)}
    if isinstance(value, (int, float, str)):
        return value
    raise _CannotTravel("which is not plain data")


def _is_name(key: Any) -> bool:
    return isinstance(key, str) and not key.startswith("~")


def _culprit(value: Any, path: str, why: str, depth: int = 0) -> NotPlainData:
    """What stands in the way of packing `value`. Found only then, so that no forward pays for spelling out paths."""
    items: list[tuple[str, Any]] = []
    if type(value) in (list, tuple):
        items = [(f"{path}[{i}]", item) for i, item in enumerate(value)]
    elif isinstance(value, dict):
        named = all(_is_name(key) for key in value)
        items = [(path, key) for key in value]
        items += [(f"{path}.{key}" if named else f"{path}[{key!r}]", item) for key, item in value.items()]
    for where, item in items if depth <= limits.MAX_TREE_DEPTH else ():
        try:
            _pack(item, [], depth + 1)
        except _CannotTravel as error:
            return _culprit(item, where, str(error), depth + 1)
    return NotPlainData(path, value, why)


def _can_travel(tensor: torch.Tensor) -> bool:
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    return plain and not tensor.is_nested and not tensor.is_meta and tensor.dtype in _DTYPE_NAMES


def _unpack(value: Any, tensors: list[torch.Tensor], depth: int = 0) -> Any:
    if depth > limits.MAX_TREE_DEPTH:
        raise ProtocolError("a message is nested too deeply")
    if isinstance(value, list):
        return [_unpack(item, tensors, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value)) if len(value) == 1 else ""
    if not tag.startswith("~"):
        return {key: _unpack(item, tensors, depth + 1) for key, item in value.items()}
    content = value[tag]
    try:
        if tag == "~t":
            return tensors[_index(content, len(tensors))]
        if tag == "~k" and isinstance(content, (int, str)):
            return Kept(content)
        if tag == "~y":
            return DTYPES[content]
        if tag == "~z":
            return torch.Size([_index(item, 1 << 48) for item in content])
        if tag == "~u" and isinstance(content, list):
            return tuple(_unpack(item, tensors, depth + 1) for item in content)
        if tag == "~d":
            return {_unpack(key, tensors, depth + 1): _unpack(item, tensors, depth + 1) for key, item in content}
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"a message holds a bad {tag} value") from error
    raise ProtocolError(f"a message holds an unknown tag {tag!r}")


def pack_plain(value: Any, path: str) -> tuple[Any, list[torch.Tensor]]:
    """`value` as JSON data, and the tensors in it; nothing is copied. Raises NotPlainData for what cannot travel."""
    tensors: list[torch.Tensor] = []
    try:
        return _pack(value, tensors), tensors
    except _CannotTravel as error:
        raise _culprit(value, path, str(error)) from None


def replace_kept(value: Any, kept: Mapping[int | str, torch.Tensor], *, copy: bool = False) -> Any:
    """`value` with every Kept replaced by its tensor, or by a copy of it. Raises ProtocolError if one is not held."""
    if isinstance(value, Kept):
        if value.name not in kept:
            raise ProtocolError(f"a message names tensor {value.name!r}, which is not held here")
        return kept[value.name].clone() if copy else kept[value.name]
    if type(value) is list:
        return [replace_kept(item, kept, copy=copy) for item in value]
    if type(value) is tuple:
        return tuple(replace_kept(item, kept, copy=copy) for item in value)
    if isinstance(value, dict):
        return {key: replace_kept(item, kept, copy=copy) for key, item in value.items()}
    return value


# --- messages --------------------------------------------------------------------------------------------------------


def encode(message: Message, *, snapshot: bool = False) -> Encoded:
    """Frames of `message`. Raises NotPlainData for a value that cannot travel, ValueError if it is over a limit.

    The frames share the tensors' memory; with `snapshot`, those to be sent in chunks do not.
    """
    body, tensors = pack_plain(message.body, message.kind.name.lower())
    specs: list[list[Any]] = []
    inline: list[memoryview] = []
    chunked: list[tuple[int, memoryview]] = []
    total = 0
    for index, tensor in enumerate(tensors):
        nbytes = tensor.nbytes
        is_inline = nbytes <= limits.INLINE_BYTES
        specs.append([_DTYPE_NAMES[tensor.dtype], tensor.shape, nbytes, int(is_inline)])
        if is_inline:
            inline.append(tensor_bytes(tensor))
        else:
            chunked.append((index, tensor_bytes(tensor.clone() if snapshot and tensor.is_cpu else tensor)))
        total += nbytes
    header = _encode_json({"b": body, "t": specs}).encode()
    if len(header) > limits.MAX_HEADER_BYTES or len(tensors) > limits.MAX_TENSORS or total > limits.MAX_MESSAGE_BYTES:
        raise ValueError(
            f"a {message.kind.name} message is too large to send: {len(header)} header bytes, {len(tensors)} tensors, "
            f"{total} tensor bytes"
        )
    prefix = _PREFIX.pack(MAGIC, limits.PROTOCOL_VERSION, message.kind, 0, len(header), message.number)
    head = prefix + header
    return Encoded(message.number, [head, *inline], chunked, len(head) + total)


def chunk_prefix(number: int, index: int, offset: int) -> bytes:
    """First frame of a chunk: bytes from `offset` of tensor `index` of message `number`."""
    return _CHUNK.pack(MAGIC, limits.PROTOCOL_VERSION, 0, 0, index, number, offset)


def parse_chunk_prefix(frame: memoryview) -> tuple[int, int, int]:
    """(message number, tensor index, byte offset) of a chunk. Raises ProtocolError."""
    if frame.nbytes != _CHUNK.size:
        raise ProtocolError("a chunk has a malformed prefix")
    magic, version, *reserved, index, number, offset = _CHUNK.unpack(frame)
    if magic != MAGIC or version != limits.PROTOCOL_VERSION or any(reserved):
        raise ProtocolError("a chunk is not of this protocol")
    return number, index, offset


class PartialMessage:
    """A message whose header was read and whose chunks are still coming in."""

    def __init__(
        self,
        frames: list[memoryview],
        allowed: frozenset[Kind],
        max_bytes: int = limits.MAX_MESSAGE_BYTES,
        allocate: Allocate = new_memory,
    ) -> None:
        """Check `frames` of the control lane and allocate at most `max_bytes` of tensors. Raises ProtocolError.

        allocate: gives the memory of tensors that come in chunks.
        """
        self.kind, self.number = _read_prefix(frames[0], allowed)
        header = bytes(frames[0][_PREFIX.size :])
        read = _read_repeated_header if len(header) <= limits.REPEATED_HEADER_BYTES else _read_header
        self._body, specs = read(header)
        if sum(spec.nbytes for spec in specs) > max_bytes:
            raise ProtocolError("a message is larger than allowed")
        self._tensors: list[torch.Tensor] = []
        self._missing: dict[int, tuple[memoryview, set[int]]] = {}
        self._missing_bytes = 0
        inline_bytes = [spec.nbytes for spec in specs if spec.inline]
        if [frame.nbytes for frame in frames[1:]] != inline_bytes:
            raise ProtocolError("the frames of a message do not match its header")
        inline = iter(frames[1:])
        for index, spec in enumerate(specs):
            if spec.inline:
                self._tensors.append(_received(spec, next(inline)))
            else:
                tensor, view = empty_tensor(spec, allocate)
                self._tensors.append(tensor)
                self._missing[index] = (view, set())
                self._missing_bytes += spec.nbytes
        self.nbytes = frames[0].nbytes + sum(spec.nbytes for spec in specs)
        # In memory, at worst, until it is complete.
        self.cost = limits.KEEPING_BYTES + self.nbytes + frames[0].nbytes * limits.PARSED_PER_HEADER_BYTE

    def add_chunk(self, index: int, offset: int, payload: memoryview) -> None:
        """Place one chunk. Raises ProtocolError when it lies outside its tensor or comes twice."""
        if index not in self._missing:
            raise ProtocolError("a chunk names a tensor that takes none")
        view, seen = self._missing[index]
        if offset in seen or offset % limits.CHUNK_BYTES or offset >= view.nbytes:
            raise ProtocolError("a chunk lies outside its tensor")
        if payload.nbytes != min(limits.CHUNK_BYTES, view.nbytes - offset):
            raise ProtocolError("a chunk has a wrong length")
        view[offset : offset + payload.nbytes] = payload
        seen.add(offset)
        self._missing_bytes -= payload.nbytes

    @property
    def complete(self) -> bool:
        return self._missing_bytes == 0

    def message(self) -> Message:
        """The message, once complete. Raises ProtocolError for a malformed body."""
        body = _unpack(self._body, self._tensors)
        if not isinstance(body, dict):
            raise ProtocolError("a message has no body")
        return Message(self.kind, self.number, body, self.nbytes)


def _read_prefix(frame: memoryview, allowed: frozenset[Kind]) -> tuple[Kind, int]:
    """(kind, number) of a message. Raises ProtocolError."""
    if not _PREFIX.size <= frame.nbytes <= _PREFIX.size + limits.MAX_HEADER_BYTES:
        raise ProtocolError("a message header has an impossible size")
    magic, version, kind, reserved, length, number = _PREFIX.unpack_from(frame)
    if magic != MAGIC:
        raise ProtocolError("a message is not of this protocol")
    if version != limits.PROTOCOL_VERSION:
        raise ProtocolError(f"a message is of protocol {version}, this side speaks {limits.PROTOCOL_VERSION}")
    if length != frame.nbytes - _PREFIX.size or reserved:
        raise ProtocolError("a message header has a wrong length")
    if kind not in allowed:
        raise ProtocolError(f"a message of kind {kind} is not allowed here")
    return _KINDS[kind], number


def _read_header(header: bytes) -> tuple[Any, tuple[TensorSpec, ...]]:
    """(packed body, tensors) of a message. Raises ProtocolError."""
    try:
        text = header.decode()
        content, end = _decode_json(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("a message header is not JSON") from error
    if not isinstance(content, dict) or end != len(text) or content.keys() != {"b", "t"}:
        raise ProtocolError("a message header is not an object of a body and its tensors")
    specs = content["t"]
    if not isinstance(specs, list) or len(specs) > limits.MAX_TENSORS:
        raise ProtocolError("a message lists too many tensors")
    return content["b"], tuple(_check_spec(spec) for spec in specs)


_read_repeated_header = functools.lru_cache(maxsize=16)(_read_header)


def _check_spec(item: Any) -> TensorSpec:
    if not isinstance(item, list) or len(item) != 4 or not isinstance(item[1], list):
        raise ProtocolError("a tensor is described wrongly")
    name, shape, nbytes, inline = item
    dtype = DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise ProtocolError("a tensor has an unknown dtype")
    if len(shape) > limits.MAX_TENSOR_DIMS:
        raise ProtocolError("a tensor has too many dimensions")
    dims = tuple(_index(size, 1 << 48) for size in shape)
    expected = math.prod(dims) * dtype.itemsize
    if _index(nbytes, limits.MAX_MESSAGE_BYTES + 1) != expected:
        raise ProtocolError("a tensor's length does not match its shape")
    if bool(inline) != (nbytes <= limits.INLINE_BYTES):
        raise ProtocolError("a tensor travels the wrong way")
    return TensorSpec(dtype, dims, nbytes, bool(inline))


def _index(value: Any, below: int) -> int:
    if type(value) is not int or not 0 <= value < below:
        raise ProtocolError("a message holds a number out of range")
    return value
