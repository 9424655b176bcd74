"""FP8 weights: plain, scaled in the way of ComfyUI's comfy_quant settings, and scaled in its older way.

Files often mix FP8 and 16-bit layers; each layer stands for itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from .companions import (
    FLOATS,
    count_parameters,
    first,
    has,
    is_companion,
    marked,
    may_have,
    no_others,
    scalar,
    weight_is,
)
from .layers import Layer
from .markers import LEGACY_MARK, LEGACY_SCALE
from .registry import USE_ANOTHER, ComputePath, Fault, FormatHandler, Kind, Node

_LEGACY_INPUT = "scale_input"


def _has_companions(layer: Layer) -> bool:
    return any(is_companion(part) for part in layer.parts if part != "weight")


@dataclass(frozen=True, slots=True)
class PlainFp8:
    """FP8 without scales: values that were cast."""

    name: str
    dtype: str
    kind: Kind = Kind.PLAIN

    def recognises(self, layer: Layer) -> bool:
        return layer.unmarked == self.dtype and not _has_companions(layer)

    def fault(self, layer: Layer) -> None:
        return None

    def parameters(self, layer: Layer) -> int:
        return layer.elements

    def compute_path(self, node: Node) -> ComputePath:
        """FP8 products only on request: fp8_optimizations or --fast (pick_operations in comfy/ops.py)."""
        return "dequantised"


@dataclass(frozen=True, slots=True)
class ScaledFp8:
    """FP8 with one scale for each weight; `format` is ComfyUI's name of it (QUANT_ALGOS in comfy/quant_ops.py)."""

    name: str
    format: str
    dtype: str
    kind: Kind = Kind.QUANTISED

    def recognises(self, layer: Layer) -> bool:
        if layer.marker is not None:
            return layer.format == self.format and not layer.marker.legacy
        return layer.unmarked == self.dtype and _has_companions(layer) and LEGACY_SCALE not in layer.parts

    def fault(self, layer: Layer) -> Fault | None:
        cause = first(
            lambda: weight_is(layer, self.dtype),
            lambda: marked(layer),
            lambda: has(layer, "weight_scale", FLOATS, *scalar(layer)),
            lambda: may_have(layer, "input_scale", FLOATS, *scalar(layer)),
            lambda: no_others(layer, "weight_scale", "input_scale"),
        )
        return Fault(cause) if cause else None

    def parameters(self, layer: Layer) -> int:
        return count_parameters(layer)

    def compute_path(self, node: Node) -> ComputePath:
        """See supports_fp8_compute in comfy/model_management.py; cuBLAS does not multiply E5M2 by E5M2."""
        if not node.backends:
            return "unavailable"
        if not node.has(8, 9):
            return "dequantised"
        return "native" if self.dtype == "F8_E4M3" else "emulated"


@dataclass(frozen=True, slots=True)
class LegacyScaledFp8:
    """FP8 with a scale_weight for each layer and a tensor that marks the file: convert_old_quants in comfy/utils.py."""

    name: str = "scaled_fp8"
    kind: Kind = Kind.QUANTISED

    def recognises(self, layer: Layer) -> bool:
        if layer.marker is not None:
            return layer.marker.legacy
        return layer.unmarked in ("F8_E4M3", "F8_E5M2") and LEGACY_SCALE in layer.parts

    def fault(self, layer: Layer) -> Fault | None:
        if layer.marker is None:
            return Fault(f"has a {LEGACY_SCALE}, and the file lacks the {LEGACY_MARK} tensor that has ComfyUI read it")
        if layer.weight is not None and layer.weight.dtype == "F8_E5M2":
            # The layer is cast to E4M3 with its scale unchanged; larger values are cut.
            return Fault(f"is stored as F8_E5M2, and ComfyUI takes {LEGACY_MARK} for F8_E4M3", USE_ANOTHER)
        cause = first(
            lambda: weight_is(layer, "F8_E4M3"),
            lambda: has(layer, LEGACY_SCALE, FLOATS, *scalar(layer)),
            lambda: may_have(layer, _LEGACY_INPUT, FLOATS, *scalar(layer)),
            lambda: no_others(layer, LEGACY_SCALE, _LEGACY_INPUT),
        )
        return Fault(cause) if cause else None

    def parameters(self, layer: Layer) -> int:
        return count_parameters(layer)

    def compute_path(self, node: Node) -> ComputePath:
        """As per-layer E4M3, which ComfyUI converts it to; a mark of two elements asks for dequantising."""
        return HANDLERS[2].compute_path(node)


HANDLERS: tuple[FormatHandler, ...] = (
    PlainFp8("fp8_e4m3fn", "F8_E4M3"),
    PlainFp8("fp8_e5m2", "F8_E5M2"),
    ScaledFp8("fp8_e4m3fn_scaled", "float8_e4m3fn", "F8_E4M3"),
    ScaledFp8("fp8_e5m2_scaled", "float8_e5m2", "F8_E5M2"),
    LegacyScaledFp8(),
)
