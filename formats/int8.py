"""INT8 with one scale for a weight or for each of its rows; in ConvRot the rows are rotated in groups beforehand.

Layout: TensorWiseINT8Layout in comfy_kitchen/tensor/int8.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from .companions import (
    FLOATS,
    Check,
    count_parameters,
    experts,
    first,
    has,
    marked,
    matrix,
    no_others,
    scalar,
    weight_is,
)
from .layers import Layer
from .registry import ComputePath, Fault, FormatHandler, Kind, Node

_GROUP_SIZE = 256  # where the settings name none


def rotation_fits(layer: Layer, columns: int) -> Check:
    """ConvRot's groups are a power of four and divide the weight's `columns` (_build_hadamard in comfy_kitchen)."""
    assert layer.marker is not None
    size = layer.marker.setting("convrot_groupsize", _GROUP_SIZE)
    if type(size) is not int or size < 4 or size & (size - 1) or size.bit_length() % 2 == 0:
        return f"has a convrot_groupsize of {size!r:.20}, which is not a power of four"
    if columns % size:
        return f"has {columns} columns, which the convrot_groupsize of {size} does not divide"
    return None


def int8_path(node: Node, cuda_from: tuple[int, int]) -> ComputePath:
    """Formats whose layers quantise activations on every machine (quantize_input in QUANT_ALGOS, comfy/quant_ops.py).

    Without a kernel for the GPU (FunctionConstraints in comfy_kitchen/backends), torch computes the same more slowly.
    """
    if not node.backends:
        return "unavailable"
    fast = ("cuda" in node.backends and node.has(*cuda_from)) or ("triton" in node.backends and node.has(8))
    return "native" if fast else "emulated"


@dataclass(frozen=True, slots=True)
class Int8:
    """One of the ways to store int8_tensorwise, which is ComfyUI's name for all of them."""

    name: str
    rowwise: bool
    rotated: bool
    kind: Kind = Kind.QUANTISED

    def recognises(self, layer: Layer) -> bool:
        if layer.marker is None:
            scaled = layer.unmarked == "I8" and "weight_scale" in layer.parts
            return scaled and not self.rotated and self.rowwise == _is_rowwise(layer)
        if layer.format != "int8_tensorwise" or self.rotated != bool(layer.marker.setting("convrot", False)):
            return False
        return self.rotated or self.rowwise == _is_rowwise(layer)

    def fault(self, layer: Layer) -> Fault | None:
        cause = first(
            lambda: weight_is(layer, "I8"),
            lambda: marked(layer),
            lambda: has(layer, "weight_scale", FLOATS, *self._scale_shapes(layer)),
            lambda: rotation_fits(layer, matrix(layer)[1]) if self.rotated else None,
            lambda: no_others(layer, "weight_scale"),
        )
        return Fault(cause) if cause else None

    def _scale_shapes(self, layer: Layer) -> tuple[tuple[int, ...], ...]:
        rows = (*experts(layer), matrix(layer)[0], 1)
        return (rows,) if self.rowwise else scalar(layer)

    def parameters(self, layer: Layer) -> int:
        return count_parameters(layer)

    def compute_path(self, node: Node) -> ComputePath:
        """See int8_linear in comfy_kitchen."""
        return int8_path(node, (7, 5))


def _is_rowwise(layer: Layer) -> bool:
    scale = layer.parts.get("weight_scale")
    return scale is not None and len(scale.shape) > 1


HANDLERS: tuple[FormatHandler, ...] = (
    Int8("int8_tensorwise", rowwise=False, rotated=False),
    Int8("int8_rowwise", rowwise=True, rotated=False),
    Int8("int8_convrot", rowwise=True, rotated=True),
)
