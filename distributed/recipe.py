"""Recipe: how to rebuild a MODEL elsewhere, as plain data with tensors named by the digest of their content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from . import limits
from .codec import NotPlainData, pack_plain, tensor_bytes
from .files import FileRef


@dataclass(frozen=True)
class Recipe:
    """A MODEL as loader, file and weight patches.

    `tree` is plain data with Kept(digest) in place of tensors; `tensors` holds them by digest; `path` is the file here;
    `notes` are sentences about the MODEL for its user.
    """

    tree: dict[str, Any]
    file: FileRef
    path: Path
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def patched(self) -> int:
        """How many weights the recipe patches."""
        return len(self.tree.get("patches", []))

    @cached_property
    def digest(self) -> str:
        return tree_digest(self.tree, self.file)

    def tensor_batches(self, digests: list[str]) -> Iterator[dict[str, torch.Tensor]]:
        """The tensors named by `digests`, in batches that fit a message."""
        batch: dict[str, torch.Tensor] = {}
        size = 0
        for digest in digests:
            tensor = self.tensors[digest]
            if batch and size + tensor.nbytes > limits.TENSOR_BATCH_BYTES:
                yield batch
                batch, size = {}, 0
            batch[digest] = tensor
            size += tensor.nbytes
        if batch:
            yield batch


def tree_digest(tree: dict[str, Any], file: FileRef) -> str:
    """Digest of a recipe's content. Raises NotPlainData if it holds tensors or code."""
    packed, tensors = pack_plain(tree, "recipe")
    if tensors:
        raise NotPlainData("recipe", tensors[0])
    text = json.dumps([packed, file.bytes, file.digest], sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=20).hexdigest()


def tensor_digest(tensor: torch.Tensor) -> str:
    """Digest of a tensor's dtype, shape and bytes."""
    digest = hashlib.blake2b(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), digest_size=20)
    digest.update(tensor_bytes(tensor))
    return digest.hexdigest()
