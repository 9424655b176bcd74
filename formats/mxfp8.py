"""MXFP8: E4M3 values with a power-of-two scale (E8M0) for each 32 of them.

Layout: TensorCoreMXFP8Layout in comfy_kitchen/tensor/mxfp8.py.
"""

from __future__ import annotations

from .companions import (
    FLOATS,
    blocked,
    count_parameters,
    first,
    has,
    may_have,
    no_others,
    rows_and_columns_divide,
    scalar,
    weight_is,
)
from .layers import Layer
from .registry import ComputePath, Fault, FormatHandler, Kind, Node

_BLOCK = 32


class Mxfp8:
    name = "mxfp8"
    kind = Kind.QUANTISED

    def recognises(self, layer: Layer) -> bool:
        return layer.format == "mxfp8"

    def fault(self, layer: Layer) -> Fault | None:
        cause = first(
            lambda: weight_is(layer, "F8_E4M3"),
            lambda: rows_and_columns_divide(layer, _BLOCK),
            # Also as bytes, which ComfyUI views as E8M0.
            lambda: has(layer, "weight_scale", ("F8_E8M0", "U8"), blocked(layer, _BLOCK)),
            lambda: may_have(layer, "input_scale", FLOATS, *scalar(layer)),
            lambda: no_others(layer, "weight_scale", "input_scale"),
        )
        return Fault(cause) if cause else None

    def parameters(self, layer: Layer) -> int:
        """Padding to whole blocks of 32 counts, since the header does not say what it is."""
        return count_parameters(layer)

    def compute_path(self, node: Node) -> ComputePath:
        """See supports_mxfp8_compute in comfy/model_management.py."""
        if not node.backends:
            return "unavailable"
        return "native" if node.has(10) and node.torch >= (2, 10) else "dequantised"


HANDLERS: tuple[FormatHandler, ...] = (Mxfp8(),)
