"""The protocol of a weight format's handler, and the lookup of the handler that recognises a layer.

A format is one module of this package with a HANDLERS tuple; nothing here names any of them.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Literal, Protocol

from .header_text import BROKEN_WRITER, quote
from .layers import Layer

FORMATS_READ = "BF16, FP8, NVFP4 or INT8"
USE_ANOTHER = f"Use a {FORMATS_READ} safetensors file of the same model instead."

# How a layer multiplies: with the stored values and quantised activations on tensor cores; with the same numbers, but
# by slower means; with weights that are turned into 16 or 32 bits first, which gives other numbers; or not at all.
ComputePath = Literal["native", "emulated", "dequantised", "unavailable"]


@dataclass(frozen=True, slots=True)
class Node:
    """What decides how a machine computes a format.

    capability: (major, minor) of its NVIDIA GPU, None for a CPU or another GPU; backends: the enabled backends of
    comfy-kitchen ('eager', 'cuda', 'triton'), none if it is not installed; torch: (major, minor) of its version.
    """

    capability: tuple[int, int] | None
    backends: frozenset[str] = frozenset({"eager", "cuda"})
    torch: tuple[int, int] = (2, 10)

    def has(self, major: int, minor: int = 0) -> bool:
        """Whether the GPU has at least this compute capability."""
        return self.capability is not None and self.capability >= (major, minor)


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a layer refuses its file: "layer 'x' <cause>." and what to do about it."""

    cause: str
    next_step: str = BROKEN_WRITER


class Kind(Enum):
    """What a layer's format says about its file; the file is named after the formats of the last kind that is there."""

    PLAIN = 1
    QUANTISED = 2
    REFUSED = 3


class FormatHandler(Protocol):
    """One weight format. At most one handler may recognise a given layer, so that their order never matters."""

    @property
    def name(self) -> str:
        """The format's name in reports, such as 'bf16'."""
        ...

    @property
    def kind(self) -> Kind: ...

    def recognises(self, layer: Layer) -> bool:
        """Whether the layer's weight is in this format, or would be if nothing were wrong with it."""
        ...

    def fault(self, layer: Layer) -> Fault | None:
        """What is wrong with a layer that `recognises` accepted: ComfyUI would fail or compute something else."""
        ...

    def parameters(self, layer: Layer) -> int:
        """Parameters of the model in the layer: weights after unpacking and biases, no scales."""
        ...

    def compute_path(self, node: Node) -> ComputePath:
        """How ComfyUI multiplies with such a layer on a machine, with its default options."""
        ...


class Unknown:
    """Layers that no handler recognises."""

    name = "unknown"
    kind = Kind.REFUSED

    def fault(self, layer: Layer) -> Fault:
        marker = layer.marker
        if marker is not None and marker.broken:
            return Fault(marker.broken)
        if marker is not None and "format" not in marker.settings:
            return Fault("has quantisation settings that name no format")
        if marker is not None:
            format_name = quote(str(marker.settings["format"]))
            return Fault(f"is in the format {format_name}, which ComfyUI does not read", USE_ANOTHER)
        dtypes = sorted({info.dtype for info in layer.parts.values() if len(info.shape) >= 2})
        cause = f"is stored as {' and '.join(dtypes)} and nothing says how to read that"
        return Fault(cause, f"It may need another pack's loader. {USE_ANOTHER}")

    def parameters(self, layer: Layer) -> int:
        return layer.elements

    def compute_path(self, node: Node) -> ComputePath:
        return "unavailable"


UNKNOWN = Unknown()
# Dtypes in which only packed or quantised weights come as matrices. Not I64 and BOOL: positions, indices and masks.
_PACKED = frozenset({"F4", "F6_E2M3", "F6_E3M2", "I8", "U8", "I16", "U16", "I32", "U32"})


@lru_cache(maxsize=1)
def handlers() -> tuple[FormatHandler, ...]:
    """The handlers of every module in this package."""
    found: list[FormatHandler] = []
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        found += getattr(importlib.import_module(f".{module.name}", __package__), "HANDLERS", ())
    return tuple(found)


def find_handler(layer: Layer) -> FormatHandler | Unknown | None:
    """The handler for a layer's weight; None if it has none that counts (a norm, a bias, a table of positions)."""
    if layer.marker is None and all(len(info.shape) < 2 for info in layer.parts.values()):
        return None
    for handler in handlers():
        if handler.recognises(layer):
            return handler
    packed = any(info.dtype in _PACKED and len(info.shape) >= 2 for info in layer.parts.values())
    return UNKNOWN if layer.marker is not None or layer.unmarked is not None or packed else None
