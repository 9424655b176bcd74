"""What a worker computes with, as its serving loop sees it: a runtime builds replicas, which compute forwards."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Protocol

import torch

from .families import Family
from .files import FileRef
from .versions import Versions

# (model, arguments, keyword arguments) -> output
Through = Callable[[Any, list[Any], dict[str, Any]], Any]


def run_model(model: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The stock forward."""
    return model(*args, **kwargs)


class Replica(Protocol):
    """A model that this worker built from a recipe."""

    patched: int
    device: torch.device
    # None: its tokens cannot be split.
    family: Family | None

    def forward(self, args: list[Any], kwargs: dict[str, Any], through: Through = run_model) -> Any:
        """Output of `through(model, args, kwargs)`, tensors on any device."""
        ...


class Runtime(Protocol):
    """What a worker computes with."""

    versions: Versions

    def describe(self) -> dict[str, str]:
        """Name of the device, its memory and so on, for people."""
        ...

    def find(self, ref: FileRef) -> Path | None:
        """The file in this machine's model folders, if it is the same one."""
        ...

    def build(self, tree: dict[str, Any], path: Path, key: str) -> Replica:
        """Build the replica of a recipe, whose tensors are in place; `key` names the recipe. Raises with a sentence."""
        ...

    def release(self, files: Collection[str]) -> int:
        """Let go of the models that were built from files with these digests. Returns how many there were."""
        ...

    def interrupt(self, on: bool) -> None:
        """Have the running forward stop soon (True), or forget about it (False). Called from another thread."""
        ...
