"""Lumina 2 and Z-Image (NextDiT): one sequence of captions, vision tokens, references and noise, with their padding.

Only `layers` are cut. The refiners run before them over text or image alone and are computed whole on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..layout import Layout, Span
from . import Blocks, Family, Table

_JOINT = ("joint",)


def _noisy_tokens(value: Sequence[Span] | None, layout: Layout) -> list[Span] | None:
    """timestep_zero_index: the spans that take the real timestep; what is in none of them is a reference, at time 0.

    With references only; none of the spans need lie on this rank.
    """
    if value is None:
        return None
    return [own for start, stop in value for own in layout.held(_JOINT, start, stop)]


FAMILIES = {
    "NextDiT": Family(
        blocks=(
            Blocks(
                path="layers",
                tokens={"x": _JOINT},
                returns=(_JOINT,),
                attention={"": (_JOINT,)},
                tables={"freqs_cis": Table(_JOINT, 1)},
                adjust={"timestep_zero_index": _noisy_tokens},
            ),
        ),
        # The image is found from the end of the captions in the whole sequence.
        result=_JOINT,
    )
}
