"""NVFP4: pairs of E2M1 values in a byte, an E4M3 scale for each 16 of them, and one scale for the whole weight.

Layout: TensorCoreNVFP4Layout in comfy_kitchen/tensor/nvfp4.py.
"""

from __future__ import annotations

from .companions import (
    FLOATS,
    blocked,
    count_parameters,
    first,
    has,
    marked,
    matrix,
    may_have,
    no_others,
    rows_and_columns_divide,
    scalar,
    weight_is,
)
from .layers import Layer
from .registry import ComputePath, Fault, FormatHandler, Kind, Node

_BLOCK = 16
_PER_BYTE = 2


class Nvfp4:
    name = "nvfp4"
    kind = Kind.QUANTISED

    def recognises(self, layer: Layer) -> bool:
        if layer.marker is not None:
            return layer.format == "nvfp4"
        return layer.unmarked == "U8" and "weight_scale_2" in layer.parts

    def fault(self, layer: Layer) -> Fault | None:
        cause = first(
            lambda: weight_is(layer, "U8"),
            lambda: marked(layer),
            lambda: rows_and_columns_divide(layer, _BLOCK, _PER_BYTE),
            # Also as bytes, which ComfyUI views as E4M3.
            lambda: has(layer, "weight_scale", ("F8_E4M3", "U8"), blocked(layer, _BLOCK, _PER_BYTE)),
            lambda: has(layer, "weight_scale_2", FLOATS, *scalar(layer)),
            lambda: may_have(layer, "input_scale", FLOATS, *scalar(layer)),
            lambda: may_have(layer, "pre_quant_scale", FLOATS, (matrix(layer)[1] * _PER_BYTE,)),
            lambda: no_others(layer, "weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale"),
        )
        return Fault(cause) if cause else None

    def parameters(self, layer: Layer) -> int:
        """Padding to whole blocks of 16 counts, since the header does not say what it is."""
        return count_parameters(layer, _PER_BYTE)

    def compute_path(self, node: Node) -> ComputePath:
        """See supports_nvfp4_compute in comfy/model_management.py."""
        if not node.backends:
            return "unavailable"
        return "native" if node.has(10) else "dequantised"


HANDLERS: tuple[FormatHandler, ...] = (Nvfp4(),)
