"""Outputs of a forward: one tensor [rows, …], or a list of them for models that sample several latents at once."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from . import limits
from .rows import Call


def tensors(output: Any) -> list[torch.Tensor]:
    return [output] if isinstance(output, torch.Tensor) else list(output)


def device_of(output: Any) -> torch.device:
    return tensors(output)[0].device


def synchronize(output: Any) -> None:
    """Wait until the device has computed `output`, so that the clock can be read."""
    for tensor in tensors(output):
        if tensor.device.type == "cuda":
            torch.cuda.synchronize(tensor.device)
        elif tensor.device.type != "cpu" and hasattr(torch, "accelerator"):
            torch.accelerator.synchronize(tensor.device)
        else:
            continue
        return


def on_device(output: Any, like: Any) -> Any:
    device = tensors(like)[0].device
    if isinstance(output, torch.Tensor):
        return output.to(device)
    return type(output)(tensor.to(device) for tensor in output)


def continues(output: Any, count: int, local: Any) -> bool:
    """Whether `output` is `count` more rows of what `local` is."""
    got, want = tensors(output), tensors(local)
    return len(got) == len(want) and all(
        (len(theirs), theirs.shape[1:], theirs.dtype) == (count, ours.shape[1:], ours.dtype)
        for theirs, ours in zip(got, want, strict=True)
    )


def relative_difference(output: Any, expected: Any) -> float:
    """Norm of the difference over the norm, the largest of all tensors; NaNs in both places are equal."""
    worst = 0.0
    if len(tensors(output)) != len(tensors(expected)):
        return float("inf")
    for got, want in zip(tensors(output), tensors(expected), strict=True):
        if got.shape != want.shape:
            return float("inf")
        difference = torch.nan_to_num((got.float() - want.float())[~(got.isnan() & want.isnan())], nan=float("inf"))
        scale = torch.nan_to_num(want.float()).norm().item()
        distance = difference.norm().item()
        worst = max(worst, distance / scale if scale else (0.0 if distance == 0 else float("inf")))
    return worst


def tolerance(output: Any) -> float:
    dtype = tensors(output)[0].dtype
    return limits.CHECK_TOLERANCE_32BIT if dtype in (torch.float32, torch.float64) else limits.CHECK_TOLERANCE_16BIT


def shapes(call: Call) -> Hashable:
    """What forwards that cost alike have in common."""
    context = call.kwargs.get("context")
    return (
        tuple(tuple(tensor.shape) for tensor in tensors(call.args[0])),
        tuple(context.shape) if isinstance(context, torch.Tensor) else None,
    )
