"""Qwen-Image and its Edit models: text and image as two streams to the end; references follow the noise in the image.

The block makes its mask over all keys from the lengths it sees, which are this rank's; attention puts it together.
"""

from __future__ import annotations

from ..layout import Layout
from . import Blocks, Family, Table

_JOINT = ("txt", "img")


def _noise_tokens(value: int | None, layout: Layout) -> int | None:
    """timestep_zero_index: so many image tokens come before the references, which may be none or all of this rank's."""
    if value is None:
        return None
    start, stop = layout.own("img")
    return min(max(value, start), stop) - start


FAMILIES = {
    "QwenImageTransformer2DModel": Family(
        blocks=(
            Blocks(
                path="transformer_blocks",
                tokens={"hidden_states": ("img",), "encoder_hidden_states": ("txt",)},
                returns=(("txt",), ("img",)),
                attention={"": (_JOINT,)},
                tables={"image_rotary_emb": Table(_JOINT, 2), "encoder_hidden_states_mask": Table(("txt",), 1)},
                adjust={"timestep_zero_index": _noise_tokens},
            ),
        ),
        result=("img",),
        control={"input": "img"},
    )
}
