"""LTX-Video and LTX-2: a stream of video tokens, which cross-attends to whole text and, in LTX-2, to whole audio.

Audio is a few hundred tokens next to many thousand of video, so every rank computes all of it, text likewise.
"""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import torch

from ..layout import Layout
from . import Blocks, Family

_VIDEO = ("video",)


def _own_rows(value: Any, dim: int, layout: Layout) -> Any:
    """A tensor with an entry per video token along `dim`, cut to this rank's; any other value stays."""
    if not isinstance(value, torch.Tensor) or value.shape[dim] != layout.lengths["video"]:
        return value
    start, stop = layout.own("video")
    return value.narrow(dim, start, stop - start)


def _positions(value: Any, layout: Layout) -> Any:
    """(rotations [B, L, H, D/2, 2, 2], kind); in ComfyUI 0.8 (cos, sin, kind), [B, L, C] or [B, H, L, D/2] each."""
    return tuple(_own_rows(part, 2 if getattr(part, "ndim", 0) == 4 else 1, layout) for part in value)


def _guide_mask(value: Any, layout: Layout) -> Any:
    """GuideAttentionMask, which attends in groups of queries [noise, tracked guides, rest], with this rank's queries.

    A group may be left without a query. The masks keep all keys.
    """
    if not hasattr(value, "tracked_mask"):
        return value
    first, last = layout.own("video")
    start = value.guide_start
    begin, end = (min(max(bound, first), last) for bound in (start, start + value.tracked_count))
    own = copy.copy(value)
    own.guide_start, own.tracked_count = begin - first, end - begin
    own.tracked_mask = value.tracked_mask[:, :, begin - start : begin - start + own.tracked_count]
    return own


@lru_cache(maxsize=8)
def _own_span(compressed: type) -> type:
    """A CompressedTimestep of the frames that a rank has a part of, without what other ranks have of those frames."""

    class OwnSpan(compressed):
        __slots__ = ("span",)

        def expand_for_computation(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
            return tuple(tokens[:, self.span] for tokens in super().expand_for_computation(*args, **kwargs))

    return OwnSpan


def _timestep(value: Any, layout: Layout) -> Any:
    """[B, L, C], or a CompressedTimestep with a row per frame or per token, for this rank's tokens; a single row stays.

    There is a row for each where some tokens are given, such as the first frames of image-to-video.
    """
    if isinstance(value, torch.Tensor):
        return _own_rows(value, 1, layout)
    per_frame = value.patches_per_frame
    if value.num_frames * per_frame != layout.lengths["video"]:
        return value
    start, stop = layout.own("video")
    first = start // per_frame
    frames = value.data[:, first : (stop - 1) // per_frame + 1]
    own = object.__new__(_own_span(type(value)))  # the arguments of its constructor have changed between versions
    for name in type(value).__slots__:
        setattr(own, name, getattr(value, name))
    own.data, own.num_frames = frames, frames.shape[1]
    own.span = slice(start - first * per_frame, stop - first * per_frame)
    return own


_LTXV = Blocks(
    path="transformer_blocks",
    tokens={"x": _VIDEO},
    returns=(_VIDEO,),
    attention={"attn1": (_VIDEO,)},
    adjust={"pe": _positions, "timestep": _timestep, "self_attention_mask": _guide_mask},
)
_LTXAV = Blocks(
    path="transformer_blocks",
    tokens={},
    tuples={"x": (_VIDEO, ("audio",))},
    returns=(_VIDEO, ("audio",)),
    attention={"attn1": (_VIDEO,), "video_to_audio_attn": (_VIDEO,)},
    adjust={
        "v_pe": _positions,
        "v_cross_pe": _positions,
        "self_attention_mask": _guide_mask,
        "v_timestep": _timestep,
        "v_cross_scale_shift_timestep": _timestep,
        "v_cross_gate_timestep": _timestep,
    },
)

FAMILIES = {
    "LTXVModel": Family((_LTXV,), result=_VIDEO),
    # A latent without sound has an audio stream of no tokens.
    "LTXAVModel": Family((_LTXAV,), result=("video", "audio"), whole=frozenset({"audio"})),
}
