"""Krea2, Ideogram4 and MiniMax H3: text, references, sound and picture in one sequence, with one set of weights.

One stream, which may be cut anywhere.
"""

from __future__ import annotations

from typing import Any

from ..layout import Layout
from . import Blocks, Family, Table

_SEQUENCE = ("sequence",)


def _timestep_zero_index(value: Any, layout: Layout) -> Any:
    """Where references begin, which are modulated for timestep 0: among this rank's tokens, or at an end of them."""
    if value is None:
        return None
    first, last = layout.own("sequence")
    return min(max(value, first), last) - first


def _mod_segments(value: Any, layout: Layout) -> Any:
    """[(start, stop, row of the modulation or a tensor of one for each token)] -> the same for this rank's tokens."""
    first, last = layout.own("sequence")
    segments = []
    for start, stop, row in value:
        begin, end = max(start, first), min(stop, last)
        if begin < end:
            own = row if isinstance(row, int) else row[begin - start : end - start]
            segments.append((begin - first, end - first, own))
    return segments


_KREA = Blocks(
    path="blocks",
    tokens={"x": _SEQUENCE},
    returns=(_SEQUENCE,),
    attention={"attn": (_SEQUENCE,)},
    tables={"freqs": Table(_SEQUENCE, 2)},
    adjust={"timestep_zero_index": _timestep_zero_index},
)
# Without text (the unconditional model) the sequence is the image. Its mask has a row of keys for every query.
_IDEOGRAM = Blocks(
    path="layers",
    tokens={"x": _SEQUENCE},
    returns=(_SEQUENCE,),
    attention={"attention": (_SEQUENCE,)},
    tables={"freqs_cis": Table(_SEQUENCE, 1)},
)
# Hidden states are [L, C], since it takes one latent at a time.
_MINIMAX = Blocks(
    path="blocks",
    tokens={"x": _SEQUENCE},
    token_dims=(0, 0),
    returns=(_SEQUENCE,),
    attention={"attn": (_SEQUENCE,)},
    tables={"rope_freqs": Table(_SEQUENCE, 1)},
    adjust={"mod_segments": _mod_segments},
)

FAMILIES = {
    "SingleStreamDiT": Family((_KREA,), result=_SEQUENCE),
    "Ideogram4Transformer2DModel": Family((_IDEOGRAM,), result=_SEQUENCE),
    "MiniMaxH3Model": Family((_MINIMAX,), result=_SEQUENCE),
}
