"""Full-size ComfyUI diffusion models with random weights, the same ones in every process, for GPU measurements.

Needs ComfyUI's `comfy` on sys.path. Nothing is read from disk.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..distributed.families import find_family
from ..distributed.files import FileRef
from ..distributed.recipe import Recipe
from ..distributed.runtime import Through, run_model
from ..distributed.versions import own_versions

NULL = "null"


@dataclass(frozen=True)
class Shape:
    """A model and the inputs of one forward at a size that people render."""

    label: str
    build: Callable[[], torch.nn.Module]
    inputs: Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]


def _randn(*shape: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator)


def _flux() -> torch.nn.Module:
    import comfy.ops
    from comfy.ldm.flux.model import Flux

    return Flux(
        image_model="flux", in_channels=16, out_channels=16, vec_in_dim=768, context_in_dim=4096, hidden_size=3072,
        mlp_ratio=4.0, num_heads=24, depth=19, depth_single_blocks=38, axes_dim=[16, 56, 56], theta=10000, patch_size=2,
        qkv_bias=True, guidance_embed=True, txt_ids_dims=[], dtype=torch.bfloat16, device="cuda",
        operations=comfy.ops.disable_weight_init,
    )  # fmt: skip


def _flux_inputs(rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    sigma = torch.full((rows,), 0.7, device="cuda")
    return (_randn(rows, 16, 128, 128), sigma), {
        "context": _randn(rows, 512, 4096, seed=2),
        "y": _randn(rows, 768, seed=3),
        "guidance": torch.full((rows,), 3.5, device="cuda"),
        "transformer_options": {"cond_or_uncond": list(range(rows)), "sigmas": sigma[:1]},
    }


def _wan() -> torch.nn.Module:
    import comfy.ops
    from comfy.ldm.wan.model import WanModel

    return WanModel(
        model_type="t2v", dim=5120, out_dim=16, num_heads=40, ffn_dim=13824, num_layers=40, patch_size=(1, 2, 2),
        freq_dim=256, window_size=(-1, -1), qk_norm=True, cross_attn_norm=True, eps=1e-6, in_dim=16,
        image_model="wan2.1", dtype=torch.bfloat16, device="cuda", operations=comfy.ops.disable_weight_init,
    )  # fmt: skip


def _wan_inputs(rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    sigma = torch.full((rows,), 700.0, device="cuda")
    return (_randn(rows, 16, 21, 60, 104), sigma), {
        "context": _randn(rows, 512, 4096, seed=2),
        "transformer_options": {"cond_or_uncond": list(range(rows)), "sigmas": sigma[:1] / 1000},
    }


SHAPES = {
    "flux": Shape("Flux dev, 1024x1024, BF16", _flux, _flux_inputs),
    "wan": Shape("Wan 2.1 14B, 480x832, 81 frames, BF16", _wan, _wan_inputs),
}


class _Null(torch.nn.Module):
    """Takes a model's inputs and gives its latent back: what remains is the cost of the engine."""

    def forward(self, x: torch.Tensor, timestep: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return x * 1.0


def build(name: str) -> torch.nn.Module:
    """The model `name` with weights that depend on nothing but the kind of GPU."""
    if name == NULL:
        return _Null()
    model = SHAPES[name].build()
    generator = torch.Generator(device="cuda").manual_seed(0)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim == 1 and "norm" in key:
                parameter.fill_(1)
            else:
                parameter.normal_(0, 0.02, generator=generator)
    return model.eval().requires_grad_(False)


def recipe(name: str) -> Recipe:
    return Recipe({"loader": "random", "model": name}, FileRef(None, name, 8, "0" * 40), Path(__file__))


class RandomRuntime:
    """A worker's runtime that builds the models above."""

    def __init__(self) -> None:
        self.versions = own_versions(None)

    def describe(self) -> dict[str, str]:
        return {"device": torch.cuda.get_device_name(), "memory": ""}

    def find(self, ref: FileRef) -> Path | None:
        return Path(__file__)

    def build(self, tree: dict[str, Any], path: Path, key: str) -> _RandomReplica:
        torch.cuda.empty_cache()
        return _RandomReplica(build(tree["model"]))

    def release(self, files: Collection[str]) -> int:
        return 0

    def interrupt(self, on: bool) -> None:
        """Forwards here are not interrupted."""


class _RandomReplica:
    patched = 0
    device = torch.device("cuda", 0)

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.family = find_family(model)

    def forward(self, args: list[Any], kwargs: dict[str, Any], through: Through = run_model) -> Any:
        placed = {name: v.to("cuda") if isinstance(v, torch.Tensor) else v for name, v in kwargs.items()}
        options = kwargs["transformer_options"]
        placed["transformer_options"] = {**options, "sigmas": options["sigmas"].to("cuda")}
        with torch.inference_mode():
            return through(self._model, [value.to("cuda") for value in args], placed)
