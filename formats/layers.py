"""The tensors of a file grouped into layers, each with what the file says about how it is quantised.

What a layer's tensors have to look like is the business of the handlers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .header import Header, TensorInfo
from .markers import Marker, read_markers

_WEIGHT = ".weight."


@dataclass(frozen=True, slots=True)
class Layer:
    """Tensors that share a name up to its last part, such as 'weight', 'bias' and 'weight_scale' of one module.

    parts: tensors by that last part ('weight.absmax' where a weight has parts of its own); marker: what the file says
    about the weight's quantisation, None if nothing; unmarked: dtype of its weight if that is a matrix or kernel (not a
    norm) and there is no marker, else None.
    """

    name: str
    parts: Mapping[str, TensorInfo]
    marker: Marker | None
    unmarked: str | None

    @property
    def weight(self) -> TensorInfo | None:
        return self.parts.get("weight")

    @property
    def format(self) -> str | None:
        """ComfyUI's name of the layer's format, from its marker."""
        return self.marker.format if self.marker is not None else None

    @property
    def elements(self) -> int:
        """Number of stored elements of all its tensors."""
        return sum(info.elements for info in self.parts.values())


def read_layers(header: Header) -> list[Layer]:
    """The file's layers; reads the comfy_quant tensors, which are tiny, and no other data. Raises UnreadableFile."""
    parts: dict[str, dict[str, TensorInfo]] = {}
    for name, info in header.tensors.items():
        layer, part = _split(name)
        parts.setdefault(layer, {})[part] = info
    markers = read_markers(header, parts)
    # A layer that is marked and has no tensors at all is a fault that its handler reports.
    return [_layer(name, parts.get(name, {}), markers.get(name)) for name in {**parts, **markers}]


def _layer(name: str, parts: Mapping[str, TensorInfo], marker: Marker | None) -> Layer:
    weight = parts.get("weight")
    is_matrix = weight is not None and len(weight.shape) >= 2
    return Layer(name, parts, marker, weight.dtype if weight is not None and is_matrix and marker is None else None)


def _split(name: str) -> tuple[str, str]:
    layer, found, part = name.partition(_WEIGHT)
    if found:
        return layer, f"weight.{part}"
    layer, _, part = name.rpartition(".")
    return layer, part
