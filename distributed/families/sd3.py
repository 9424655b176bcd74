"""Stable Diffusion 3 and 3.5: text and image as two streams; positions are in the hidden states already.

The last block returns no text. In SD3.5 medium the first blocks attend twice: to text and image, then to the image.
"""

from __future__ import annotations

from . import Blocks, Family

FAMILIES = {
    "OpenAISignatureMMDITWrapper": Family(
        blocks=(
            Blocks(
                path="joint_blocks",
                positional=("context", "x"),
                tokens={"context": ("txt",), "x": ("img",)},
                returns=(("txt",), ("img",)),
                attention={"": (("txt", "img"), ("img",))},
            ),
        ),
        result=("img",),
        control={"output": "img"},
    )
}
