"""Where each model family keeps its token streams, so that a token split can cut them: types and lookup.

A family is a row in one of this package's tables; how it is split is tokens' business. See docs/families.md.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..layout import Layout

Streams = tuple[str, ...]
# (value of the argument, layout) -> value for this rank
Adjust = Callable[[Any, Layout], Any]


@dataclass(frozen=True)
class Table:
    """An argument with one entry per token of `streams`, one stream after the other, along dimension `dim`."""

    streams: Streams
    dim: int


@dataclass(frozen=True)
class Blocks:
    """One list of blocks of a diffusion model.

    path: attribute that holds the list, such as "double_blocks"
    positional: names of the block's positional arguments, where its forward does not tell them (*args)
    tokens: arguments that hold hidden states [B, L, C], with their streams in order
    tuples: arguments that hold a tuple of hidden states, with the streams of each
    token_dims: first and last dimension of hidden states that count tokens, where they are not [B, L, C]; a block that
        takes [B, T, H, W, C] gets [B, this rank's tokens, 1, 1, C]
    returns: the streams of the output, or of each element of it where a block returns several; () for something else
    attention: whose keys attention sees, by the submodule that calls it ("" is the block itself); several choices are
        told apart by their length. Calls from other submodules see the same keys on every rank and are left alone
    tables: arguments with an entry per token of their streams, or one for all, or this rank's already
    adjust: arguments that a family cuts in its own way
    """

    path: str
    tokens: Mapping[str, Streams]
    returns: tuple[Streams, ...]
    attention: Mapping[str, tuple[Streams, ...]]
    tables: Mapping[str, Table] = field(default_factory=dict)
    adjust: Mapping[str, Adjust] = field(default_factory=dict)
    tuples: Mapping[str, tuple[Streams, ...]] = field(default_factory=dict)
    token_dims: tuple[int, int] = (1, 1)
    positional: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """A diffusion model whose tokens can be split.

    blocks: the last block of the last list is the last one to run; empty lists are skipped
    result: the streams that are needed after the last block
    whole: streams that every rank computes in full, for being short or for being mixed outside of attention
    gather_before: the submodule whose first argument is put together, for forwards that still cut the sequence at this
        rank's lengths after the last block; "" puts together what the last block returns
    control: residuals of a ControlNet, [B, tokens, C] each, by the key of their list: the stream they are added to
    refuse: diffusion model -> why its tokens cannot be split, or None
    """

    blocks: tuple[Blocks, ...]
    result: Streams
    whole: frozenset[str] = frozenset()
    gather_before: str = ""
    control: Mapping[str, str] = field(default_factory=dict)
    refuse: Callable[[Any], str | None] = lambda model: None


def spread_frames(value: Any, stream: str, layout: Layout) -> Any:
    """[B, F, …] for the F frames of a stream -> [B, tokens of this rank, …], which may begin and end within a frame."""
    per_frame = -(-layout.lengths[stream] // value.shape[1])
    start, stop = layout.own(stream)
    first = start // per_frame
    spread = value[:, first : (stop - 1) // per_frame + 1].repeat_interleave(per_frame, dim=1)
    return spread[:, start - first * per_frame : stop - first * per_frame]


@lru_cache(maxsize=1)
def families() -> dict[str, Family]:
    """Every known family by the name of its diffusion model's class, from the FAMILIES of this package's modules."""
    found: dict[str, Family] = {}
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        found.update(importlib.import_module(f".{module.name}", __package__).FAMILIES)
    return found


def find_family(diffusion_model: object) -> Family | None:
    """The family of a diffusion model. A subclass is a family of its own: it may do more with its tokens."""
    return families().get(type(diffusion_model).__name__)
