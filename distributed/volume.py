"""How much the ranks of a token split would have to swap in a forward, found out by computing it alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .exchange import Exchange
from .families import Family
from .layout import Span
from .tokens import TokenSplit


@dataclass
class Volume:
    """What the ranks of a forward have to swap: operations, and bytes of keys, values and hidden states in all."""

    operations: int = 0
    bytes: int = 0


def measure(
    family: Family,
    model: torch.nn.Module,
    forward: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    compress: bool = False,
) -> tuple[Any, Volume]:
    """The stock output of a forward, and what a split would have to swap of it. Raises NotSplittable."""
    alone = _Alone()
    output = TokenSplit(family, alone).run(model, forward, args, kwargs, (1.0,), 0, compress=compress)
    return output, alone.volume


class _Alone(Exchange):
    """An exchange without other ranks: it only adds up what would be swapped."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.volume = Volume()

    def begin(self, forward: int) -> None:
        pass

    def agree(self, plan: str) -> None:
        pass

    def settle(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _start(
        self, buffers: Sequence[torch.Tensor], regions: Sequence[Sequence[Span]], to: list[int], of: list[int]
    ) -> Callable[[], None]:
        self.volume.operations += 1
        for buffer in buffers:
            swapped = sum(stop - start for start, stop in regions[0])
            self.volume.bytes += buffer.nbytes // max(1, buffer.shape[0]) * swapped
        return lambda: None
