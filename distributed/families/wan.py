"""Wan: one stream of video tokens, references among them; text and CLIP image are attended to in cross-attention."""

from __future__ import annotations

from typing import Any

from ..layout import Layout
from . import Blocks, Family, Table, spread_frames

_VIDEO = ("video",)


def _modulation(value: Any, layout: Layout) -> Any:
    """Modulation e [B, F, 6, C] for F frames -> one for every token of this rank; [B, 1, 6, C] and [B, 6, C] stay.

    The block itself spreads the frames over the tokens it gets, which here may begin within a frame.
    """
    if value.ndim < 4 or value.shape[1] == 1:
        return value
    return spread_frames(value, "video", layout)


_ATTENTION = {"self_attn": (_VIDEO,)}
_FREQS = Table(_VIDEO, 1)

_BLOCKS = Blocks(
    path="blocks",
    tokens={"x": _VIDEO},
    returns=(_VIDEO,),
    attention=_ATTENTION,
    tables={"freqs": _FREQS},
    adjust={"e": _modulation},
)
# Run between the main blocks, and even after the last one. Each context c starts with all its tokens and goes on as the
# block before returned it; x is the whole video as it was before the first main block, where the stream has begun.
_VACE_BLOCKS = Blocks(
    path="vace_blocks",
    tokens={},
    returns=(),
    attention=_ATTENTION,
    tables={"freqs": _FREQS, "c": Table(_VIDEO, 1), "x": Table(_VIDEO, 1)},
)

_WAN = Family((_BLOCKS,), result=_VIDEO)

FAMILIES = {
    "WanModel": _WAN,
    "CameraWanModel": _WAN,
    "SCAILWanModel": _WAN,
    "SCAIL2WanModel": _WAN,
    "VaceWanModel": Family((_BLOCKS, _VACE_BLOCKS), result=_VIDEO, gather_before="head"),
}
