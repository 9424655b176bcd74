"""Keys and values of tokens in fewer bytes, for slow links: keys in 16 bits, values as FP8 E4M3 with a scale per head.

Approximate. Which tokens are exchanged like this, and which stay as they are, is tokens' business.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

_FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FP8).max
# Rows are padded to this, so that each begins where 16-bit numbers may.
_ALIGNED = 4


@dataclass(frozen=True)
class Packing:
    """The bytes of one token: its keys, a BF16 scale for each `group` of values, its values.

    keys, values: shape of a token's, such as [B, H, D]; group: number of values that share a scale.
    """

    keys: torch.Size
    values: torch.Size
    group: int
    dtype: torch.dtype

    @classmethod
    def of(cls, k: torch.Tensor, v: torch.Tensor, group: int) -> Packing:
        """For k, v [tokens, …]; a `group` that the values are no multiple of makes way for one of all of them."""
        # FP16 has more digits than BF16 in as many bits; whatever is wider may not fit its range.
        dtype = k.dtype if k.dtype.itemsize == 2 else torch.bfloat16
        count = math.prod(v.shape[1:])
        return cls(k.shape[1:], v.shape[1:], group if count % group == 0 else count, dtype)

    @property
    def _ends(self) -> tuple[int, int, int]:
        """Where the keys, the scales and the values of a token end."""
        keys, values = math.prod(self.keys) * self.dtype.itemsize, math.prod(self.values)
        scales = keys + values // self.group * 2
        return keys, scales, scales + values

    @property
    def width(self) -> int:
        """Bytes of a token."""
        return -(-self._ends[2] // _ALIGNED) * _ALIGNED

    def pack(self, k: torch.Tensor, v: torch.Tensor, into: torch.Tensor) -> None:
        """k [tokens, *keys], v [tokens, *values] -> into [tokens, width] of bytes."""
        keys, scales, values = self._parts(into)
        keys.copy_(k.flatten(1))
        groups = v.flatten(1).unflatten(1, (-1, self.group)).float()
        scale = (groups.abs().amax(-1) / _LARGEST).to(torch.bfloat16)
        scale = torch.where(scale == 0, 1, scale)
        scales.copy_(scale)
        # The scale was rounded, and a number beyond the largest would become NaN.
        fitted = (groups / scale[..., None].float()).clamp(-_LARGEST, _LARGEST)
        values.copy_(fitted.flatten(1).to(_FP8))

    def unpack(self, packed: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """The way back; k and v are written in place, in whatever type they have."""
        keys, scales, values = self._parts(packed)
        k.copy_(keys.unflatten(1, self.keys))
        groups = values.float().unflatten(1, (-1, self.group)) * scales.float()[..., None]
        v.copy_(groups.flatten(1).unflatten(1, self.values))

    def _parts(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        keys, scales, values = self._ends
        return (
            packed[:, :keys].view(self.dtype),
            packed[:, keys:scales].view(torch.bfloat16),
            packed[:, scales:values].view(_FP8),
        )
