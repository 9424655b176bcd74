"""Row split: cut the arguments of a forward along the batch dimension, join the outputs.

A row is one batch item under one conditioning. What has the batch as first dimension is cut, the rest goes whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

# Arguments that hold one entry per conditioning rather than per row (ComfyUI's samplers write them).
_PER_CONDITIONING = ("cond_or_uncond", "uuids")


@dataclass(frozen=True)
class Call:
    """Arguments of one `diffusion_model.forward`: (x, timestep) and context, control, transformer_options, …"""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def rows(self) -> int:
        """Size of the batch dimension."""
        return row_count(self.args[0])


def row_count(x: Any) -> int:
    """Rows of a latent [B, …], or of a list of latents that are sampled together (video and audio)."""
    first = x if isinstance(x, torch.Tensor) else x[0]
    return int(first.shape[0])


def cut(call: Call, start: int, stop: int) -> Call:
    """The call with only rows `start` to `stop`. Tensors are views of the original ones."""
    rows = call.rows
    if start == 0 and stop == rows:
        return Call(call.args, _own_options(call.kwargs))
    kwargs = {name: _cut_argument(name, value, rows, start, stop) for name, value in call.kwargs.items()}
    return Call(tuple(_cut_value(value, rows, start, stop) for value in call.args), kwargs)


def join(parts: list[Any]) -> Any:
    """Put the outputs of consecutive rows together: tensors [b_i, …], or equal lists of such tensors."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], torch.Tensor):
        return torch.cat(parts, dim=0)
    return type(parts[0])(torch.cat(items, dim=0) for items in zip(*parts, strict=True))


def _cut_argument(name: str, value: Any, rows: int, start: int, stop: int) -> Any:
    if name == "transformer_options" and value is not None:
        return _cut_options(value, rows, start, stop)
    return _cut_value(value, rows, start, stop)


def _cut_value(value: Any, rows: int, start: int, stop: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value[start:stop] if value.ndim and value.shape[0] == rows else value
    if type(value) in (list, tuple):
        return type(value)(_cut_value(item, rows, start, stop) for item in value)
    if type(value) is dict:
        return {key: _cut_value(item, rows, start, stop) for key, item in value.items()}
    return value


def _cut_options(options: dict[str, Any], rows: int, start: int, stop: int) -> dict[str, Any]:
    cut_options = dict(options)
    for name in _PER_CONDITIONING:
        entries = options.get(name)
        if entries and rows % len(entries) == 0:
            repeats = rows // len(entries)
            cut_options[name] = [entry for entry in entries for _ in range(repeats)][start:stop]
    return cut_options


def _own_options(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Forwards write into transformer_options; each share gets its own dict."""
    options = kwargs.get("transformer_options")
    return kwargs if options is None else {**kwargs, "transformer_options": dict(options)}
