"""ConvRot W4A4: pairs of signed 4-bit integers in a byte, one scale for each row, rotated in groups.

Layout: TensorCoreConvRotW4A4Layout in comfy_kitchen/tensor/convrot_w4a4.py.
"""

from __future__ import annotations

from .companions import FLOATS, Check, count_parameters, experts, first, has, matrix, no_others, weight_is
from .int8 import int8_path, rotation_fits
from .layers import Layer
from .registry import ComputePath, Fault, FormatHandler, Kind, Node

_PER_BYTE = 2
_QUANT_GROUP = 64


class ConvRotW4A4:
    name = "convrot_w4a4"
    kind = Kind.QUANTISED

    def recognises(self, layer: Layer) -> bool:
        return layer.format == "convrot_w4a4"

    def fault(self, layer: Layer) -> Fault | None:
        cause = first(
            lambda: weight_is(layer, "I8"),
            lambda: has(layer, "weight_scale", FLOATS, (*experts(layer), matrix(layer)[0])),
            lambda: rotation_fits(layer, matrix(layer)[1] * _PER_BYTE),
            lambda: _settings_fit(layer),
            lambda: no_others(layer, "weight_scale"),
        )
        return Fault(cause) if cause else None

    def parameters(self, layer: Layer) -> int:
        return count_parameters(layer, _PER_BYTE)

    def compute_path(self, node: Node) -> ComputePath:
        """See convrot_w4a4_linear in comfy_kitchen, which triton has no kernel for."""
        without_triton = Node(node.capability, node.backends - {"triton"} or node.backends, node.torch)
        return int8_path(without_triton, (7, 5))


def _settings_fit(layer: Layer) -> Check:
    assert layer.marker is not None
    columns = matrix(layer)[1] * _PER_BYTE
    if columns % _QUANT_GROUP:
        return f"has {columns} columns, which is not a multiple of {_QUANT_GROUP}"
    linear = layer.marker.setting("linear_dtype", "int4")
    return None if linear in ("int4", "int8") else f"has a linear_dtype of {linear!r:.20} instead of 'int4' or 'int8'"


HANDLERS: tuple[FormatHandler, ...] = (ConvRotW4A4(),)
