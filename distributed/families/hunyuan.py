"""HunyuanVideo, HunyuanVideo 1.5 (no single blocks) and HunyuanImage: Flux's blocks over text and video tokens.

Text has been refined before the blocks, and has byT5 and vision tokens in it. A reference latent is in front of the
video. The mask is [1, 1, text + video]: one row for all queries, with every key already.
"""

from __future__ import annotations

from typing import Any

from ..layout import Layout
from . import Family
from .flux import CONTROL, IMAGE, JOINT, Slices, flux_blocks, image_slices, own_slices


def _joint_slices(value: Slices | None, layout: Layout) -> Any:
    """modulation_dims of single blocks with a guiding frame: the same numbers as for the video alone.

    The stock forward does not add the text's length, so the first tokens of text and video together count as the frame.
    """
    return value and own_slices(value, layout, JOINT)


def _text_behind_video(model: Any) -> str | None:
    """ComfyUI had the streams in the other order before it took up the order of Flux."""
    if getattr(model.double_blocks[0], "flipped_img_txt", False):
        return "this version of ComfyUI has the text behind the video, which is not known here; update ComfyUI"
    return None


FAMILIES = {
    "HunyuanVideo": Family(
        flux_blocks(image_slices, _joint_slices), result=IMAGE, control=CONTROL, refuse=_text_behind_video
    ),
}
