"""Grouped W4A8: 4-bit codes in pairs, a relative scale for each group, a scale for each row, and a codebook.

Layout: AsymW4A8Int8Layout in comfy_kitchen/tensor/w4a8_int8.py.
"""

from __future__ import annotations

from .companions import Check, count_parameters, first, has, matrix, may_have, no_others, weight_is
from .int8 import int8_path, rotation_fits
from .layers import Layer
from .registry import ComputePath, Fault, FormatHandler, Kind, Node

_PER_BYTE = 2
_GROUP_SIZE = 16  # where the settings name none
_CODES = 16


class AsymW4A8Int8:
    name = "asym_w4a8_int8"
    kind = Kind.QUANTISED

    def recognises(self, layer: Layer) -> bool:
        return layer.format == "asym_w4a8_int8"

    def fault(self, layer: Layer) -> Fault | None:
        cause = first(
            lambda: weight_is(layer, "I8", banks=False),
            lambda: _groups_fit(layer),
            lambda: has(layer, "weight_s_rel", ("F8_E4M3", "U8", "F32"), _group_shape(layer)),
            lambda: has(layer, "weight_s_channel", ("F32",), (matrix(layer)[0],)),
            lambda: may_have(layer, "weight_codebook", ("F32",), (_CODES,)),
            lambda: rotation_fits(layer, matrix(layer)[1] * _PER_BYTE),
            lambda: no_others(layer, "weight_s_rel", "weight_s_channel", "weight_codebook"),
        )
        return Fault(cause) if cause else None

    def parameters(self, layer: Layer) -> int:
        return count_parameters(layer, _PER_BYTE)

    def compute_path(self, node: Node) -> ComputePath:
        """See w4a8_int8_linear in comfy_kitchen."""
        return int8_path(node, (8, 0))


def _group_size(layer: Layer) -> object:
    assert layer.marker is not None
    return layer.marker.setting("group_size", _GROUP_SIZE)


def _groups_fit(layer: Layer) -> Check:
    size, columns = _group_size(layer), matrix(layer)[1] * _PER_BYTE
    if type(size) is not int or size < 4 or (16 % size and size % 16):
        return f"has a group_size of {size!r:.20}, which is neither 4, 8 nor a multiple of 16"
    if columns % size or columns % 16:
        return f"has {columns} columns, which groups of {size} and of 16 do not divide"
    return None


def _group_shape(layer: Layer) -> tuple[int, int]:
    rows, columns = matrix(layer)
    size = _group_size(layer)
    assert isinstance(size, int)
    return rows, columns * _PER_BYTE // size


HANDLERS: tuple[FormatHandler, ...] = (AsymW4A8Int8(),)
