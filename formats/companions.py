"""Checks of the tensors that a quantised weight needs beside it. Each says what is wrong, or None.

The causes continue a sentence that begins with the layer: "layer 'x' lacks weight_scale".
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from .header import TensorInfo
from .layers import Layer
from .markers import TENSOR_PART

FLOATS = ("F32", "BF16", "F16")
Check = str | None


def first(*checks: Callable[[], Check]) -> Check:
    """The first cause; a check runs only if those before it found nothing."""
    return next((cause for check in checks if (cause := check()) is not None), None)


def weight_is(layer: Layer, dtype: str, *, banks: bool = True) -> Check:
    """A matrix of this dtype, [N, K] as stored; with `banks` also [E, N, K] of a bank of experts."""
    info = layer.weight
    if info is None:
        return "is marked as quantised and has no weight"
    if info.dtype != dtype:
        return f"has its weight as {info.dtype} instead of {dtype}"
    if len(info.shape) not in ((2, 3) if banks else (2,)) or 0 in info.shape:
        return f"has a weight of shape {list(info.shape)}, which is not a matrix"
    return None


def marked(layer: Layer) -> Check:
    """The file says how the layer is quantised: without that, ComfyUI takes the stored values for plain weights."""
    if layer.marker is None:
        return "has scales, and neither a comfy_quant tensor nor the header's metadata says its format"
    return None


def rows_and_columns_divide(layer: Layer, size: int, columns_per_element: int = 1) -> Check:
    """The weight is padded to whole blocks of `size` in both directions."""
    rows, columns = matrix(layer)
    columns *= columns_per_element
    if rows % size or columns % size:
        return f"has a weight of {rows} x {columns}, which is not in whole blocks of {size} x {size}"
    return None


def has(layer: Layer, part: str, dtypes: Collection[str], *shapes: tuple[int, ...]) -> Check:
    """The companion is there, in one of the dtypes and shapes."""
    info = layer.parts.get(part)
    if info is None:
        return f"lacks {part}"
    return _fits(info, part, dtypes, shapes)


def may_have(layer: Layer, part: str, dtypes: Collection[str], *shapes: tuple[int, ...]) -> Check:
    """As `has`, for a companion that need not be there."""
    return has(layer, part, dtypes, *shapes) if part in layer.parts else None


def no_others(layer: Layer, *known: str) -> Check:
    """No companions but the known ones: ComfyUI would leave them out of what it computes."""
    for part in layer.parts:
        if part not in known and part not in ("weight", TENSOR_PART) and is_companion(part):
            return f"has {part}, which ComfyUI does not read in this format"
    return None


def is_companion(part: str) -> bool:
    """Whether a tensor beside a weight is needed to make sense of it, by its name: scales, zero points, codebooks."""
    return part.startswith(("weight_", "weight.")) or "scale" in part or "zero" in part


def matrix(layer: Layer) -> tuple[int, int]:
    """(rows, columns) of the weight as stored, of one expert if it is a bank."""
    assert layer.weight is not None
    return layer.weight.shape[-2], layer.weight.shape[-1]


def experts(layer: Layer) -> tuple[int, ...]:
    """() or (number of experts,)."""
    assert layer.weight is not None
    return layer.weight.shape[:-2]


def scalar(layer: Layer) -> tuple[tuple[int, ...], ...]:
    """Shapes of one number for the whole weight, or one for each expert."""
    return ((), (1,), *({experts(layer)} - {()}))


def blocked(layer: Layer, block: int, columns_per_element: int = 1) -> tuple[int, ...]:
    """Shape of the scales of blocks of 1 x `block` in cuBLAS's order: whole tiles of 128 rows and 4 blocks.

    Source: to_blocked in comfy_kitchen/float_utils.py.
    """
    rows, columns = matrix(layer)
    blocks = -(-columns * columns_per_element // block)
    return (*experts(layer), -(-rows // 128) * 128, -(-blocks // 4) * 4)


def count_parameters(layer: Layer, weights_per_element: int = 1) -> int:
    """Weights after unpacking, and everything beside them that is no companion."""
    total = 0
    for part, info in layer.parts.items():
        if part == "weight":
            total += info.elements * weights_per_element
        elif part != TENSOR_PART and not is_companion(part):
            total += info.elements
    return total


def _fits(info: TensorInfo, part: str, dtypes: Collection[str], shapes: Collection[tuple[int, ...]]) -> Check:
    if info.dtype not in dtypes:
        return f"has {part} as {info.dtype} instead of {' or '.join(dtypes)}"
    if info.shape not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        return f"has {part} of shape {list(info.shape)} instead of {wanted}"
    return None
