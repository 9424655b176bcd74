"""Files whose weights are stored as they are computed: BF16, FP16 and FP32, also mixed.

Which dtype ComfyUI then computes in is its decision; memory is what the stored dtype needs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from .header import Header
from .registry import PLAIN_FORMATS, Findings, FormatHandler, is_layer_weight, plain_findings

# Buffers such as position ids and schedules; every quantised format packs its weights in some other dtype.
_BUFFER_DTYPES = frozenset({"F64", "I64", "BOOL"})
_QUANTISATION_KEY = "_quantization_metadata"  # in the header of files that ComfyUI dequantises


@dataclass(frozen=True, slots=True)
class FloatHandler:
    """A file of plain floats, most of them of one dtype, after which the file is named."""

    name: str
    dtype: str

    def recognises(self, header: Header) -> bool:
        return _main_dtype(header) == self.dtype

    def examine(self, header: Header) -> Findings:
        return plain_findings(header)


def _main_dtype(header: Header) -> str | None:
    """The float dtype of most weights, or None if the file holds anything that is not a plain float."""
    if _QUANTISATION_KEY in header.metadata:
        return None
    elements: Counter[str] = Counter()
    for name, info in header.tensors.items():
        if info.dtype in PLAIN_FORMATS:
            elements[info.dtype] += info.elements
        elif info.dtype not in _BUFFER_DTYPES or is_layer_weight(name, info):
            return None
    return max(elements, key=lambda dtype: elements[dtype], default=None)


HANDLERS: tuple[FormatHandler, ...] = tuple(FloatHandler(name, dtype) for dtype, name in PLAIN_FORMATS.items())
