"""A worker's runtime without ComfyUI: computes with the reference DiT, from a file that holds its sizes and weights."""

from __future__ import annotations

import json
import platform
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ..distributed.codec import ProtocolError
from ..distributed.families import Blocks, Family
from ..distributed.files import FileRef, file_digest
from ..distributed.recipe import Recipe
from ..distributed.runtime import Through, run_model
from ..distributed.versions import own_versions
from .reference import ReferenceConfig, ReferenceDiT

_TOKENS = ("x",)
FAMILY = Family(
    blocks=(Blocks("blocks", {"x": _TOKENS}, returns=(_TOKENS,), attention={"self_attention": (_TOKENS,)}),),
    result=_TOKENS,
    control={"output": "x"},
)
_CONFIG_KEY = "reference_config"
LOADER = "reference"


def write_reference_model(config: ReferenceConfig, path: Path) -> Recipe:
    """Write the reference DiT of `config` to a safetensors file and give its recipe."""
    save_file(ReferenceDiT(config).state_dict(), path, metadata={_CONFIG_KEY: json.dumps(config.to_json())})
    ref = FileRef(None, path.name, path.stat().st_size, file_digest(path))
    return Recipe({"loader": LOADER}, ref, path)


def load_reference_model(path: Path) -> ReferenceDiT:
    """The model in a file that `write_reference_model` wrote. Raises ValueError for another file."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
    if _CONFIG_KEY not in metadata:
        raise ValueError(f"{path.name} is not a file of the reference model")
    model = ReferenceDiT(ReferenceConfig.from_json(json.loads(metadata[_CONFIG_KEY])))
    model.load_state_dict(load_file(path))
    return model


class ReferenceRuntime:
    """A runtime (see distributed.runtime) for machines without ComfyUI."""

    def __init__(self) -> None:
        self.versions = own_versions(None)
        self._interrupted = threading.Event()

    def describe(self) -> dict[str, str]:
        return {"device": f"CPU of {platform.machine()}", "memory": "reference model only"}

    def find(self, ref: FileRef) -> Path | None:
        return None

    def build(self, tree: dict[str, Any], path: Path, key: str) -> _ReferenceReplica:
        if tree.get("loader") != LOADER:
            raise ProtocolError("this worker only computes the reference model; start it with ComfyUI")
        return _ReferenceReplica(load_reference_model(path), self._interrupted)

    def release(self, files: Collection[str]) -> int:
        return 0  # a replica belongs to its run and goes with it

    def interrupt(self, on: bool) -> None:
        if on:
            self._interrupted.set()
        else:
            self._interrupted.clear()


class _ReferenceReplica:
    patched = 0
    device = torch.device("cpu")
    family: Family | None = FAMILY

    def __init__(self, model: ReferenceDiT, interrupted: threading.Event) -> None:
        self._model = model
        self._interrupted = interrupted

    def forward(self, args: list[Any], kwargs: dict[str, Any], through: Through = run_model) -> torch.Tensor:
        options = {**(kwargs.get("transformer_options") or {}), "should_stop": self._interrupted.is_set}
        with torch.inference_mode():
            return through(self._model, args, {**kwargs, "transformer_options": options})
