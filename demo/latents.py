"""Read and compare latents saved by the demo's node, with the standard library alone.

Writing them is the node's job (demo/nodes); this side may run in a Python without torch."""

from __future__ import annotations

import json
import struct
import sys
from array import array

TENSOR_NAME = "samples"


def read_latent(blob: bytes) -> tuple[tuple[int, ...], array]:
    """Shape and float32 values, in C order, of the tensor "samples" in the bytes of a safetensors file.

    Raises ValueError when the bytes are not such a file.
    """
    try:
        (length,) = struct.unpack_from("<Q", blob)
        entry = json.loads(blob[8 : 8 + length])[TENSOR_NAME]
        start, end = entry["data_offsets"]
        shape = tuple(int(size) for size in entry["shape"])
    except (struct.error, ValueError, KeyError, TypeError) as problem:
        raise ValueError(f"not a saved latent: {problem!r}") from problem
    if entry["dtype"] != "F32":
        raise ValueError(f"a saved latent is F32, this one is {entry['dtype']}")
    values = array("f")
    values.frombytes(blob[8 + length + start : 8 + length + end])
    if sys.byteorder == "big":
        values.byteswap()
    return shape, values


def max_abs_difference(one: bytes, other: bytes) -> float:
    """Largest absolute difference of two saved latents; infinite where either holds a NaN.

    Raises ValueError when their shapes differ.
    """
    (shape, values), (other_shape, other_values) = read_latent(one), read_latent(other)
    if shape != other_shape:
        raise ValueError(f"the latents have different shapes: {shape} and {other_shape}")
    worst = 0.0
    for a, b in zip(values, other_values, strict=True):
        difference = abs(a - b)
        if difference != difference:
            return float("inf")
        worst = max(worst, difference)
    return worst
