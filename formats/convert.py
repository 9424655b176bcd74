"""Write a 16 or 32 bit model anew in FP8, NVFP4 or INT8, one tensor at a time, with the markers that ComfyUI reads.

The numbers come from comfy-kitchen's quantisers; whether a file may be converted is decided from its header.
"""

from __future__ import annotations

import errno
import fnmatch
import json
import math
import os
import re
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from .contents import CONTENTS
from .header import Header, TensorInfo, UnreadableFile, display_name, open_regular, read_header
from .inspection import UnsupportedFile, inspect_file

if TYPE_CHECKING:
    from torch import Tensor

# What `to` may be, and the name of the format in comfy_quant markers.
TARGETS: Mapping[str, str] = {"fp8": "float8_e4m3fn", "nvfp4": "nvfp4", "int8": "int8_tensorwise"}

_SOURCES = frozenset({"bf16", "fp16", "fp32"})
_FLOATS = frozenset({"BF16", "F16", "F32"})
_NOT_READ = {"gguf": "GGUF", "pickle": "pickled PyTorch"}
# ComfyUI reads these formats in text encoders, too.
_CONVERTIBLE = frozenset({"diffusion_model", "text_encoder"})
_CHECKPOINT_PREFIX = "model.diffusion_model."
# Linear layers of repeated blocks. What shapes a whole block or picture from few numbers, or reads the input and makes
# the output, stays in 16 bits.
_BLOCK = re.compile(r"(^|\.)\w*(blocks?|layers)\.\d+\.")
_KEPT = re.compile(r"norm|emb|mod|adaln|refiner|router|(^|\.)gate\.|(^|\.)\w+_in\.")
# Names of diffusers, which ComfyUI changes and puts together when it loads: markers would not follow.
_DIFFUSERS = re.compile(
    r"^(single_transformer_blocks|joint_transformer_blocks|down_blocks)\.|^noise_refiner\.0\.\w+\.norm_k\."
)
_MULTIPLE = 16  # of both sizes of a matrix, for tensor cores
_FP8_MAX, _FP4_MAX = 448.0, 6.0
_SIZES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "U8": 1, "I8": 1}
_COPY_BYTES = 64 << 20
_DISK_RESERVE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class ConvertedLayer:
    """One quantised layer: `error` is the norm of the change of its weight [N, K] over the weight's norm."""

    name: str
    shape: tuple[int, ...]
    error: float


@dataclass(frozen=True, slots=True)
class Converted:
    """What a conversion wrote. Sizes in bytes; kept: tensors that stayed in 16 bits or as they were."""

    file: str
    format: str
    layers: list[ConvertedLayer]
    kept: int
    bytes_before: int
    bytes_after: int


def convert(
    source: Path,
    target: Path,
    to: str,
    *,
    layers: Sequence[str] = (),
    progress: Callable[[int, int, str], None] = lambda done, total, name: None,
) -> Converted:
    """Write `source` as `target` in the format `to` (a key of TARGETS). Needs torch and comfy_kitchen importable.

    `layers`: patterns of layer names to quantise instead of the usual ones. `progress(done, total, name)` counts
    layers. A file appears at `target` only when it is whole; one that is there is replaced. Memory: a few times the
    largest tensor. Raises UnsupportedFile or UnreadableFile for a source that cannot be converted or read, OSError if
    the target cannot be written.
    """
    header = _require_plain(source)
    chosen = _choose(header, layers)
    markers = {name: json.dumps({"format": TARGETS[to]}).encode() for name in chosen}
    planned = _Layout(header, to, markers)
    free = shutil.disk_usage(target.parent).free
    if planned.size > free - _DISK_RESERVE_BYTES:
        needed = planned.size + _DISK_RESERVE_BYTES
        raise OSError(
            errno.ENOSPC,
            f"it and what is left free for others need {needed / 1e9:.1f} GB, its disk has {free / 1e9:.1f} GB free",
        )
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with open_regular(source) as reader, partial.open("w+b") as writer:
            done = list(_write(header, chosen, planned, reader, writer, to, progress))
            writer.flush()
            os.fsync(writer.fileno())
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
    kept = len(header.tensors) - len(chosen)
    return Converted(str(target), TARGETS[to], done, kept, header.file_size, planned.size)


def _require_plain(source: Path) -> Header:
    report = inspect_file(source)
    name = display_name(source)
    if report.format in _NOT_READ:
        raise UnsupportedFile(
            f"{name} is a {_NOT_READ[report.format]} file, which convert does not read. "
            "Convert the BF16, FP16 or FP32 safetensors file of the same model."
        )
    if report.content in CONTENTS and report.content not in _CONVERTIBLE:
        raise UnsupportedFile(f"{name} is a {CONTENTS[report.content].title}; convert writes models and text encoders.")
    if report.refused:
        raise UnsupportedFile(" ".join(report.problems))
    if report.format not in _SOURCES or not set(report.layers) <= _SOURCES:
        formats = ", ".join(sorted(set(report.layers) - _SOURCES)) or report.format
        raise UnsupportedFile(
            f"{name} is in {formats} already. Convert the BF16, FP16 or FP32 file of the model instead: "
            "quantising twice adds both errors."
        )
    header = read_header(source)
    if any(_DIFFUSERS.search(tensor) for tensor in header.tensors):
        raise UnsupportedFile(
            f"{name} has the tensor names of diffusers, which ComfyUI changes when it loads them. "
            "Convert a file of the model that was made for ComfyUI."
        )
    return header


def _choose(header: Header, patterns: Sequence[str]) -> list[str]:
    """Names (without .weight) of the layers to quantise. Raises UnsupportedFile if there are none."""
    prefix = _prefix(header)
    chosen = []
    for tensor, info in header.tensors.items():
        if not (tensor.startswith(prefix) and tensor.endswith(".weight") and _fits(info)):
            continue
        name = tensor.removesuffix(".weight")
        inner = name.removeprefix(prefix)
        if patterns:
            wanted = any(fnmatch.fnmatchcase(inner, pattern) for pattern in patterns)
        else:
            wanted = _BLOCK.search(inner) is not None and _KEPT.search(inner) is None
        if wanted:
            chosen.append(name)
    if not chosen:
        what = f"matches {' or '.join(patterns)}" if patterns else "is a linear layer of a repeated block"
        raise UnsupportedFile(
            f"{display_name(header.path)} holds no layer that {what} and whose sizes are multiples of {_MULTIPLE}. "
            "Name layers of it with --layers, or use the file as it is."
        )
    return chosen


def _prefix(header: Header) -> str:
    """What the names of the diffusion model begin with: in a checkpoint, other models lie beside it."""
    checkpoint = any(name.startswith(_CHECKPOINT_PREFIX) for name in header.tensors)
    return _CHECKPOINT_PREFIX if checkpoint else ""


def _fits(info: TensorInfo) -> bool:
    return info.dtype in _FLOATS and len(info.shape) == 2 and all(size % _MULTIPLE == 0 for size in info.shape)


class _Layout:
    """Where each tensor of the new file goes: dtype, shape and offset by name; the header's bytes; the file's size."""

    def __init__(self, header: Header, to: str, markers: Mapping[str, bytes]) -> None:
        self.markers = markers
        prefix = _prefix(header)
        entries: dict[str, tuple[str, tuple[int, ...]]] = {}
        for tensor, info in header.tensors.items():
            name = tensor.removesuffix(".weight")
            if name in markers and name != tensor:
                parts = _parts(to, *info.shape)
                entries.update({f"{tensor}{suffix}": part for suffix, part in parts.items()})
                entries[f"{name}.comfy_quant"] = ("U8", (len(markers[name]),))
            else:
                shrinks = info.dtype == "F32" and tensor.startswith(prefix)
                entries[tensor] = ("BF16" if shrinks else info.dtype, tuple(info.shape))
        self.entries = entries
        described: dict[str, Any] = {"__metadata__": dict(header.metadata)} if header.metadata else {}
        self.offsets: dict[str, int] = {}
        end = 0
        # Wide dtypes first, so that all tensors are aligned.
        for name in sorted(entries, key=lambda name: (-_SIZES.get(entries[name][0], 8), name)):
            dtype, shape = entries[name]
            size = math.prod(shape) * _SIZES[dtype] if dtype in _SIZES else header.tensors[name].nbytes
            described[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
            self.offsets[name] = end
            end += size
        text = json.dumps(described, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.head = struct.pack("<Q", len(text)) + text
        self.size = len(self.head) + end

    def place(self, writer: BinaryIO, name: str) -> None:
        writer.seek(len(self.head) + self.offsets[name])


def _parts(to: str, rows: int, columns: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """dtype and shape of what is stored for a weight [rows, columns], by what is added to its name."""
    if to == "fp8":
        return {"": ("F8_E4M3", (rows, columns)), "_scale": ("F32", ())}
    if to == "int8":
        return {"": ("I8", (rows, columns)), "_scale": ("F32", (rows, 1))}
    # Scales of 16 weights each, in cuBLAS's tiles of 128 x 4.
    scales = (-(-rows // 128) * 128, -(-columns // 16 // 4) * 4)
    return {"": ("U8", (rows, columns // 2)), "_scale": ("F8_E4M3", scales), "_scale_2": ("F32", ())}


def _write(
    header: Header,
    chosen: Sequence[str],
    planned: _Layout,
    reader: BufferedReader,
    writer: BinaryIO,
    to: str,
    progress: Callable[[int, int, str], None],
) -> Iterator[ConvertedLayer]:
    import comfy_kitchen

    writer.truncate(planned.size)
    writer.write(planned.head)
    for name, info in header.tensors.items():
        if name.removesuffix(".weight") not in planned.markers or not name.endswith(".weight"):
            _copy(header, name, info, planned, reader, writer)
    # Plain torch: the other backends round alike, but not all of them work on every driver.
    with comfy_kitchen.use_backend("eager"):
        for done, name in enumerate(chosen):
            progress(done, len(chosen), name)
            tensor = f"{name}.weight"
            weight = _read(header, header.tensors[tensor], reader)
            parts, back = _quantise(weight, to)
            for suffix, part in parts.items():
                dtype, shape = planned.entries[tensor + suffix]
                if tuple(part.shape) != shape or part.element_size() != _SIZES[dtype]:
                    raise RuntimeError(f"comfy-kitchen made {part.dtype}{tuple(part.shape)} of {tensor}{suffix}")
                planned.place(writer, tensor + suffix)
                writer.write(_bytes(part))
            planned.place(writer, f"{name}.comfy_quant")
            writer.write(planned.markers[name])
            norm = weight.norm().item()
            if not math.isfinite(norm):
                raise UnsupportedFile(f"{display_name(header.path)} holds infinite or undefined weights in {name}.")
            error = (back - weight).norm().item() / norm if norm else 0.0
            yield ConvertedLayer(name, tuple(weight.shape), error)
    progress(len(chosen), len(chosen), "")


def _copy(
    header: Header, name: str, info: TensorInfo, planned: _Layout, reader: BufferedReader, writer: BinaryIO
) -> None:
    import torch

    reader.seek(header.data_start + info.begin)
    planned.place(writer, name)
    shrinks = info.dtype != planned.entries[name][0]
    left = info.nbytes
    while left:
        block = _read_bytes(header, min(left, _COPY_BYTES), reader)
        left -= len(block)
        writer.write(_bytes(torch.frombuffer(block, dtype=torch.float32).bfloat16()) if shrinks else block)


def _read(header: Header, info: TensorInfo, reader: BufferedReader) -> Tensor:
    """A weight as float32 [N, K], on the GPU if there is one."""
    import torch

    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[info.dtype]
    reader.seek(header.data_start + info.begin)
    weight = torch.frombuffer(_read_bytes(header, info.nbytes, reader), dtype=dtype).reshape(tuple(info.shape))
    return weight.to("cuda" if torch.cuda.is_available() else "cpu", torch.float32)


def _read_bytes(header: Header, size: int, reader: BufferedReader) -> bytearray:
    data = bytearray(size)
    try:
        complete = reader.readinto(data) == size
    except OSError as error:
        raise UnreadableFile(header.path, error.strerror or str(error), "Check the disk it is on.") from None
    if not complete:
        cause = "it became shorter while it was read"
        raise UnreadableFile(header.path, cause, "Wait until it is completely written.")
    return data


def _quantise(weight: Tensor, to: str) -> tuple[dict[str, Tensor], Tensor]:
    """(what is stored by what is added to the weight's name, what a node computes with) of a float32 weight [N, K]."""
    import comfy_kitchen as kitchen
    import torch

    largest = weight.abs().amax()
    largest = torch.where(largest > 0, largest, torch.ones_like(largest))
    if to == "fp8":
        scale = largest / _FP8_MAX
        stored = kitchen.quantize_per_tensor_fp8(weight, scale, torch.float8_e4m3fn)
        return {"": stored, "_scale": scale}, kitchen.dequantize_per_tensor_fp8(stored, scale, torch.float32)
    if to == "int8":
        # A scale for each row; [N] in some versions of comfy-kitchen, [N, 1] in files.
        stored, scale = kitchen.quantize_int8_rowwise(weight)
        scale = scale.reshape(-1, 1).float()
        return {"": stored, "_scale": scale}, stored.float() * scale
    scale = largest / (_FP8_MAX * _FP4_MAX)
    stored, blocks = kitchen.quantize_nvfp4(weight, scale)
    back = kitchen.dequantize_nvfp4(stored, scale, blocks, torch.float32)
    return {"": stored, "_scale": blocks, "_scale_2": scale}, back


def _bytes(tensor: Tensor) -> Any:
    """The tensor's bytes, as something that a file can write."""
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
