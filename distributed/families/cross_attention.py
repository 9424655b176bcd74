"""Cosmos-Predict2, Anima and Kandinsky5: one stream of image or video tokens that cross-attends to whole text."""

from __future__ import annotations

from typing import Any

from ..layout import Layout
from . import Blocks, Family, Table, spread_frames

_VIDEO = ("video",)


def _per_token(value: Any, layout: Layout) -> Any:
    """[B, T, C] for T frames -> a row for every token of this rank, each a frame to the block; [B, 1, C] stays."""
    if value is None or value.shape[1] == 1:
        return value
    return spread_frames(value, "video", layout)


_COSMOS = Family(
    blocks=(
        Blocks(
            path="blocks",
            tokens={"x_B_T_H_W_D": _VIDEO},
            token_dims=(1, 3),
            returns=(_VIDEO,),
            attention={"self_attn": (_VIDEO,)},
            # Its name lies: the argument is [1, L, 1, D/2, 2, 2].
            tables={"rope_emb_L_1_1_D": Table(_VIDEO, 1)},
            adjust={"emb_B_T_D": _per_token, "adaln_lora_B_T_3D": _per_token},
        ),
    ),
    result=_VIDEO,
)

# Its text blocks are another list, which runs before and is the same on every rank.
_KANDINSKY = Family(
    blocks=(
        Blocks(
            path="visual_transformer_blocks",
            tokens={"visual_embed": _VIDEO},
            returns=(_VIDEO,),
            attention={"self_attention": (_VIDEO,)},
            tables={"freqs": Table(_VIDEO, 1)},
        ),
    ),
    result=_VIDEO,
)

FAMILIES = {"MiniTrainDIT": _COSMOS, "Anima": _COSMOS, "Kandinsky5": _KANDINSKY}
