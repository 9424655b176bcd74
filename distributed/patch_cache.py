"""Tensors of weight patches (LoRA and relatives) that a worker keeps between runs, by digest of their content."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch

from . import limits
from .codec import Kept, ProtocolError, replace_kept
from .recipe import tensor_digest


class PatchCache:
    """Bounded; the least recently used go first, but never those of a recipe that is being completed."""

    def __init__(self, max_bytes: int, max_pinned: int = limits.RECIPE_TENSOR_BYTES) -> None:
        self._max_bytes = max_bytes
        self._max_pinned = max_pinned
        self._tensors: OrderedDict[int | str, torch.Tensor] = OrderedDict()
        self._pinned: set[int | str] = set()

    def missing(self, tree: dict[str, Any]) -> list[str]:
        """Digests that `tree` names and that are not here; those that are here stay until the next call."""
        named = list(dict.fromkeys(_names(tree)))
        self._pinned = set(named)
        for name in named:
            if name in self._tensors:
                self._tensors.move_to_end(name)
        return [str(name) for name in named if name not in self._tensors]

    def add(self, tensors: dict[str, torch.Tensor], wanted: set[str]) -> None:
        """Take tensors that were asked for. Raises ProtocolError for others, or if content and digest differ.

        Also if the recipe's tensors come to more than RECIPE_TENSOR_BYTES: none of them could be let go.
        """
        for digest, tensor in tensors.items():
            if digest not in wanted or tensor_digest(tensor) != digest:
                raise ProtocolError("a patch tensor is not the one that was asked for")
            self._tensors[digest] = tensor
        if sum(tensor.nbytes for name, tensor in self._tensors.items() if name in self._pinned) > self._max_pinned:
            raise ProtocolError("a recipe has more patch tensors than are allowed")
        size = sum(tensor.nbytes for tensor in self._tensors.values())
        for digest in [name for name in self._tensors if name not in self._pinned]:
            if size <= self._max_bytes:
                return
            size -= self._tensors.pop(digest).nbytes

    def clear(self) -> None:
        """Let go of all of them."""
        self._tensors.clear()
        self._pinned = set()

    def fill(self, tree: dict[str, Any]) -> dict[str, Any]:
        """`tree` with tensors in place of their names."""
        return replace_kept(tree, self._tensors)


def _names(value: Any) -> Iterator[int | str]:
    if isinstance(value, Kept):
        yield value.name
    elif isinstance(value, dict):
        for item in value.values():
            yield from _names(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _names(item)
