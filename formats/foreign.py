"""Formats that ComfyUI does not read, by the tensors that only they have; each is refused by name.

ComfyUI loads most of them without an error and computes with whatever was in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .layers import Layer
from .registry import USE_ANOTHER, ComputePath, Fault, FormatHandler, Kind, Node

_BNB_STATE = "weight.quant_state.bitsandbytes__"


@dataclass(frozen=True, slots=True)
class ForeignFormat:
    """name: in reports; title: as people know it; recognises: by a layer's tensors; packing: weights per element."""

    name: str
    title: str
    mark: Callable[[Layer], bool]
    packing: int = 1
    next_step: str = USE_ANOTHER
    kind: Kind = Kind.REFUSED

    def recognises(self, layer: Layer) -> bool:
        return layer.marker is None and self.mark(layer)

    def fault(self, layer: Layer) -> Fault:
        return Fault(f"is stored in the {self.title} format, which ComfyUI does not read", self.next_step)

    def parameters(self, layer: Layer) -> int:
        """Weights of the largest tensor, which holds them packed, and the bias."""
        packed = max(info.elements for info in layer.parts.values())
        return packed * self.packing + (layer.parts["bias"].elements if "bias" in layer.parts else 0)

    def compute_path(self, node: Node) -> ComputePath:
        return "unavailable"


def _has(*parts: str) -> Callable[[Layer], bool]:
    return lambda layer: all(part in layer.parts for part in parts)


def _bitsandbytes(kind: str) -> Callable[[Layer], bool]:
    def mark(layer: Layer) -> bool:
        if f"{_BNB_STATE}{kind}" in layer.parts:
            return True
        # Written without the state; NF4 is by far the more common.
        stateless = not any(part.startswith(_BNB_STATE) for part in layer.parts)
        return kind == "nf4" and stateless and _has("weight.absmax", "weight.quant_map")(layer)

    return mark


def _is_svdquant(layer: Layer) -> bool:
    return _has("qweight")(layer) and any(
        part in layer.parts for part in ("wscales", "smooth_factor", "proj_down", "lora_down")
    )


def _is_awq(layer: Layer) -> bool:
    """AutoAWQ packs along the columns of [K, N], as wide as N / 8; GPTQ along the rows."""
    qweight, scales = layer.parts.get("qweight"), layer.parts.get("scales")
    if qweight is None or "g_idx" in layer.parts or _is_svdquant(layer):
        return False
    return scales is not None and qweight.shape[-1:] != scales.shape[-1:]


def _is_gptq(layer: Layer) -> bool:
    return "qweight" in layer.parts and not _is_svdquant(layer) and not _is_awq(layer)


def _is_torchao(layer: Layer) -> bool:
    return any(part.endswith("weight_qdata") or part.endswith("weight:qdata") for part in layer.parts)


HANDLERS: tuple[FormatHandler, ...] = (
    ForeignFormat("bnb_nf4", "bitsandbytes NF4", _bitsandbytes("nf4"), packing=2),
    ForeignFormat("bnb_fp4", "bitsandbytes FP4", _bitsandbytes("fp4"), packing=2),
    ForeignFormat("bnb_int8", "bitsandbytes INT8", _has("weight", "SCB")),
    ForeignFormat("gptq", "GPTQ", _is_gptq, packing=8),
    ForeignFormat("awq", "AWQ", _is_awq, packing=8),
    ForeignFormat("torchao", "torchao", _is_torchao),
    ForeignFormat(
        "svdquant",
        "SVDQuant (nunchaku)",
        _is_svdquant,
        packing=2,
        next_step="ComfyUI-nunchaku's own loader reads it, on one machine. To split, use an NVFP4 safetensors file of "
        "the same model instead.",
    ),
    ForeignFormat("compressed_tensors", "compressed-tensors", _has("weight_packed"), packing=8),
    ForeignFormat("quanto", "optimum-quanto", _has("weight._data")),
    ForeignFormat("hqq", "HQQ", _has("W_q"), packing=2),
)
