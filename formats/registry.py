"""The protocol of a weight format's handler, and the lookup of the handler that recognises a header.

A format is one module of this package with a HANDLERS tuple; nothing here names any of them.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from .header import Header, TensorInfo

OTHER = "other"

# Format names of the dtypes that need no companion tensors, as reports show them.
PLAIN_FORMATS: Mapping[str, str] = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}


@dataclass(frozen=True, slots=True)
class Findings:
    """What a handler says about a file it recognised.

    parameters: weights in the model; memory_bytes: estimate for the loaded weights on one node; layers: weight
    matrices per format; loadable: False refuses the file; problems: sentences for a person.
    """

    parameters: int
    memory_bytes: int
    layers: Mapping[str, int]
    loadable: bool = True
    problems: tuple[str, ...] = ()


class FormatHandler(Protocol):
    """One weight format. At most one handler may recognise a given header, so that their order never matters."""

    @property
    def name(self) -> str:
        """The format's name in reports, such as 'bf16'."""
        ...

    def recognises(self, header: Header) -> bool:
        """Whether the file as a whole is in this format; must not open the file."""
        ...

    def examine(self, header: Header) -> Findings:
        """Count and check a file that `recognises` accepted."""
        ...


class PassedOn:
    """Any other safetensors file: ComfyUI decides what to make of it."""

    name = OTHER

    def recognises(self, header: Header) -> bool:
        return True

    def examine(self, header: Header) -> Findings:
        """Packed formats store several weights in one element, so `parameters` is a lower bound."""
        return plain_findings(header)


@lru_cache(maxsize=1)
def handlers() -> tuple[FormatHandler, ...]:
    """The handlers of every module in this package."""
    found: list[FormatHandler] = []
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        found += getattr(importlib.import_module(f".{module.name}", __package__), "HANDLERS", ())
    return tuple(found)


def find_handler(header: Header) -> FormatHandler:
    """The handler that recognises the header, or the one that passes the file on to ComfyUI."""
    return next((handler for handler in handlers() if handler.recognises(header)), PassedOn())


def is_layer_weight(name: str, info: TensorInfo) -> bool:
    """Whether the tensor is what a report counts as a layer: a weight matrix or kernel, not a bias or a norm."""
    return name.endswith(".weight") and len(info.shape) >= 2


def plain_findings(header: Header) -> Findings:
    """Count stored elements, bytes as stored, and layers by their storage dtype."""
    tensors = header.tensors
    layers = Counter(
        PLAIN_FORMATS.get(info.dtype, OTHER) for name, info in tensors.items() if is_layer_weight(name, info)
    )
    return Findings(
        parameters=sum(info.elements for info in tensors.values()),
        memory_bytes=sum(info.nbytes for info in tensors.values()),
        layers=dict(layers),
    )
