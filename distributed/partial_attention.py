"""Attention to a part of the keys at a time, put together by log-sum-exp (Rabe and Staats, arXiv:2112.05682).

It lets a rank attend to its own tokens while those of the others are still on their way. Exact up to rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

# [B, H, L, D] output and [B, H, L] log of the sum of the exponentials of the scores
Part = tuple[torch.Tensor, torch.Tensor]


def can_attend_in_parts(q: torch.Tensor, mask: Any, options: Mapping[str, Any]) -> bool:
    """Whether torch's flash attention, which also gives the log-sum-exp, does what was asked for."""
    if mask is not None or options.get("enable_gqa") or options.get("attn_precision") is not None:
        return False
    if q.device.type == "cuda":
        return q.dtype in (torch.bfloat16, torch.float16) and torch.cuda.get_device_capability(q.device) >= (8, 0)
    return q.device.type == "cpu" and hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")


def heads_first(tensor: torch.Tensor, heads: int, *, skip_reshape: bool) -> torch.Tensor:
    """[B, L, H*D] or [B, L, H, D], or with skip_reshape [B, H, L, D] -> [B, H, L, D]; see optimized_attention."""
    if skip_reshape:
        return tensor
    return (tensor if tensor.ndim == 4 else tensor.unflatten(-1, (heads, -1))).transpose(1, 2)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> Part:
    """q [B, H, Lq, D] attends to k, v [B, H, Lk, D], Lk at least 1."""
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, scale=scale)
    # Its kernels take head sizes that are multiples of 8.
    size = q.shape[-1]
    padding = -size % 8
    if padding:
        scale = size**-0.5 if scale is None else scale
        q, k, v = (torch.nn.functional.pad(tensor, (0, padding)) for tensor in (q, k, v))
    output, log_sum = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, scale=scale)[:2]
    return output[..., :size], log_sum


def merge(one: Part, other: Part) -> torch.Tensor:
    """Output [B, H, L, D] of attention to the keys of both parts."""
    share = torch.sigmoid(other[1] - one[1])[..., None]
    return torch.lerp(one[0], other[0], share.to(one[0].dtype))
