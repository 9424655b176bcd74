"""Weights stored as they are computed: BF16, FP16 and FP32, and rarer floats that ComfyUI casts.

Which dtype ComfyUI then computes in is its decision; memory is what the stored dtype needs.
"""

from __future__ import annotations

from dataclasses import dataclass

from .layers import Layer
from .registry import ComputePath, FormatHandler, Kind, Node

OTHER = "other"


@dataclass(frozen=True, slots=True)
class FloatHandler:
    """Weights of one float dtype."""

    name: str
    dtypes: frozenset[str]
    kind: Kind = Kind.PLAIN

    def recognises(self, layer: Layer) -> bool:
        return layer.unmarked in self.dtypes

    def fault(self, layer: Layer) -> None:
        return None

    def parameters(self, layer: Layer) -> int:
        return layer.elements

    def compute_path(self, node: Node) -> ComputePath:
        """See should_use_bf16 and unet_dtype in comfy/model_management.py; a CPU computes in FP32."""
        if self.name == "fp32" or (self.name == "fp16" and node.capability is not None):
            return "native"
        return "native" if self.name == "bf16" and node.has(8) else "dequantised"


HANDLERS: tuple[FormatHandler, ...] = (
    FloatHandler("bf16", frozenset({"BF16"})),
    FloatHandler("fp16", frozenset({"F16"})),
    FloatHandler("fp32", frozenset({"F32"})),
    FloatHandler(OTHER, frozenset({"F64", "F8_E4M3FNUZ", "F8_E5M2FNUZ"})),
)
