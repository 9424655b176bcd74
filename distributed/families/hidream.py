"""HiDream: image tokens as one stream; all text is whole on every rank, since the forward swaps a part of it per block.

A router sends each token to two of four experts, and may choose another one for a difference in the last digit.
"""

from __future__ import annotations

from . import Blocks, Family, Table

_JOINT = ("img", "txt")
_ROPE = {"rope": Table(_JOINT, 1)}

# The text of a block is the first part of what the block before returned, and the prompt by another layer of Llama.
# After the last block the forward cuts off text by lengths that it has taken from this rank's tokens.
_DOUBLE = Blocks(
    path="double_stream_blocks",
    tokens={"image_tokens": ("img",), "text_tokens": ("txt",)},
    returns=(("img",), ("txt",)),
    attention={"": (_JOINT,)},
    tables=_ROPE,
)
_SINGLE = Blocks(
    path="single_stream_blocks",
    tokens={"image_tokens": _JOINT},
    returns=(_JOINT,),
    attention={"": (_JOINT,)},
    tables=_ROPE,
)

FAMILIES = {
    "HiDreamImageTransformer2DModel": Family(
        (_DOUBLE, _SINGLE), result=("img",), whole=frozenset({"txt"}), gather_before="final_layer"
    ),
}
