"""Flux, Flux2 and Chroma: text and image as two streams, then as one joined sequence; HunyuanVideo shares the blocks.

References (Kontext, Flux2) are tokens of the image stream behind the noise; "pe" has their positions already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..layout import Layout
from . import Blocks, Family, Streams, Table

JOINT = ("txt", "img")
IMAGE = ("img",)
# (start, stop or None for the end, row of the modulation), as the blocks take it
Slices = Sequence[tuple[int, int | None, int]]


def own_slices(value: Slices, layout: Layout, streams: Streams) -> list[tuple[int, int, int]]:
    """Slices of the full sequence of `streams` as slices of what this rank holds of it; fewer, or more, than before."""
    end = layout.full_length(streams)
    return [
        (first, last, row)
        for start, stop, row in value
        for first, last in layout.held(streams, start, end if stop is None else stop)
    ]


def image_slices(value: Slices | None, layout: Layout) -> Any:
    """modulation_dims of double blocks, which count the tokens of the image stream."""
    return value and own_slices(value, layout, IMAGE)


def _joint_slices(value: Slices | None, layout: Layout) -> Any:
    """modulation_dims of single blocks, to which the stock forward has added the text's length: that of this rank.

    The slice that starts at 0 takes the text with it and has nothing added to its start.
    """
    if value is None:
        return None
    missing = layout.lengths["txt"] - layout.own_length(("txt",))
    full = [(start and start + missing, stop and stop + missing, row) for start, stop, row in value]
    return own_slices(full, layout, JOINT)


def _skipped_blocks(model: Any) -> str | None:
    """Chroma can leave blocks out, and with the last one what happens after it."""
    if model.skip_mmdit or model.skip_dit:
        return "blocks of the model are skipped"
    return None


def flux_blocks(image: Callable[..., Any], joint: Callable[..., Any]) -> tuple[Blocks, Blocks]:
    """Both lists of blocks; they write into their arguments. image, joint: adjust their modulation_dims."""
    pe = {"pe": Table(JOINT, 2)}
    double = Blocks(
        path="double_blocks",
        tokens={"img": IMAGE, "txt": ("txt",)},
        returns=(IMAGE, ("txt",)),
        attention={"": (JOINT,)},
        tables=pe,
        adjust={"modulation_dims_img": image},
    )
    single = Blocks(
        path="single_blocks",
        tokens={"x": JOINT},
        returns=(JOINT,),
        attention={"": (JOINT,)},
        tables=pe,
        adjust={"modulation_dims": joint},
    )
    return double, single


# Residuals of ControlNets may be shorter than the image stream, which has the references at its end.
CONTROL = {"input": "img", "output": "img"}
_BLOCKS = flux_blocks(image_slices, _joint_slices)

FAMILIES = {
    "Flux": Family(_BLOCKS, result=IMAGE, control=CONTROL),
    "Chroma": Family(_BLOCKS, result=IMAGE, control=CONTROL, refuse=_skipped_blocks),
}
