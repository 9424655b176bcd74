"""Write LoRA-like files that ComfyUI's own LoRA loader applies to a tiny model: one kind of weight adapter per file.

Keys are ComfyUI's generic ones, "diffusion_model.<layer>.<part>"; the models themselves are tiny_models' job."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from .tiny_models import random_weight, weight_shapes

# Layers whose change shows in the output: attention and MLP of the blocks.
_PARTS = ("attn", "attention", "mlp", "ff", "feed_forward", "linear1", "linear2")
_NOT = ("mod", "norm", "emb")
_RANK = 4


class _Random:
    """Random tensors whose products change a weight by about a quarter of its own size."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, deviation: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=self._generator) * deviation


def _factor(size: int) -> int:
    """The largest of 8, 4, 2, 1 that divides `size`."""
    return next(factor for factor in (8, 4, 2, 1) if size % factor == 0)


def _lora(shape: tuple[int, int], change: float, random: _Random, weight: Tensor) -> dict[str, Tensor]:
    rows, columns = shape
    up, down = random(rows, _RANK, deviation=change / _RANK**0.5), random(_RANK, columns)
    return {"lora_up.weight": up, "lora_down.weight": down, "alpha": torch.tensor(float(_RANK))}


def _loha(shape: tuple[int, int], change: float, random: _Random, weight: Tensor) -> dict[str, Tensor]:
    rows, columns = shape
    return {
        "hada_w1_a": random(rows, _RANK, deviation=change / _RANK),
        "hada_w1_b": random(_RANK, columns),
        "hada_w2_a": random(rows, _RANK),
        "hada_w2_b": random(_RANK, columns),
        "alpha": torch.tensor(float(_RANK)),
    }


def _lokr(shape: tuple[int, int], change: float, random: _Random, weight: Tensor) -> dict[str, Tensor]:
    rows, columns = shape
    a, b = _factor(rows), _factor(columns)
    return {"lokr_w1": random(a, b), "lokr_w2": random(rows // a, columns // b, deviation=change)}


def _glora(shape: tuple[int, int], change: float, random: _Random, weight: Tensor) -> dict[str, Tensor]:
    rows, columns = shape
    return {
        "a1.weight": random(columns, _RANK, deviation=0.1 / columns**0.5),
        "a2.weight": random(_RANK, columns),
        "b1.weight": random(rows, _RANK, deviation=change / _RANK**0.5),
        "b2.weight": random(_RANK, columns),
        "alpha": torch.tensor(float(_RANK)),
    }


def _oft(shape: tuple[int, int], change: float, random: _Random, weight: Tensor) -> dict[str, Tensor]:
    size = _factor(shape[0])
    return {"oft_blocks": random(shape[0] // size, size, size, deviation=0.1)}


def _boft(shape: tuple[int, int], change: float, random: _Random, weight: Tensor) -> dict[str, Tensor]:
    size = _factor(shape[0])
    # The loader compares alpha with 0 and fails on a missing one; 0 means "no constraint".
    return {"oft_blocks": random(2, shape[0] // size, size, size, deviation=0.1), "alpha": torch.tensor(0.0)}


def _diff(shape: tuple[int, int], change: float, random: _Random, weight: Tensor) -> dict[str, Tensor]:
    return {"diff": random(*shape, deviation=change)}


def _set(shape: tuple[int, int], change: float, random: _Random, weight: Tensor) -> dict[str, Tensor]:
    return {"set_weight": weight + random(*shape, deviation=change)}


_Maker = Callable[[tuple[int, int], float, _Random, Tensor], dict[str, Tensor]]
KINDS: dict[str, _Maker] = {
    "lora": _lora,
    "loha": _loha,
    "lokr": _lokr,
    "glora": _glora,
    "oft": _oft,
    "boft": _boft,
    "diff": _diff,
    "set": _set,
}


def lora_layers(name: str, limit: int = 6) -> list[str]:
    """Linear layers (names without ".weight") of family `name` that write_lora changes, spread over its depth."""
    names = [
        key.removesuffix(".weight")
        for key, (shape, dtype) in weight_shapes(name).items()
        if key.endswith(".weight")
        and len(shape) == 2
        and ("block" in key or "layers." in key)
        and any(part in key for part in _PARTS)
        and not any(part in key for part in _NOT)
    ]
    count = min(limit, len(names))
    return [names[index * len(names) // count] for index in range(count)]


def write_lora(name: str, folder: Path, kind: str = "lora", *, seed: int = 0, missing_keys: int = 0) -> Path:
    """Write a LoRA-like file of `kind` (a key of KINDS) for the tiny model of family `name`; return its path.

    `missing_keys` adds that many layers that the model does not have. Needs ComfyUI importable.
    Raises KeyError for an unknown family or kind.
    """
    from safetensors.torch import save_file

    make = KINDS[kind]
    random = _Random(zlib.crc32(f"{name}/{kind}".encode()) ^ seed)
    shapes, tensors = weight_shapes(name), {}
    for layer in lora_layers(name):
        shape, dtype = shapes[f"{layer}.weight"]
        change = 0.25 / shape[1] ** 0.5
        weight = random_weight(f"{layer}.weight", shape, dtype, 0)
        parts = make((shape[0], shape[1]), change, random, weight)
        tensors.update({f"diffusion_model.{layer}.{part}": tensor for part, tensor in parts.items()})
    for index in range(missing_keys):
        tensors[f"diffusion_model.no_such_layer.{index}.diff"] = torch.ones(1)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}_{kind}_{seed}{f'_missing{missing_keys}' if missing_keys else ''}.safetensors"
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, partial)
    os.replace(partial, path)
    return path
