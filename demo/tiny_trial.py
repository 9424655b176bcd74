"""The tiny models that `monarch doctor` splits for a trial: a Wan with ComfyUI, the reference DiT without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..distributed.doctor import TinyModel
from ..distributed.model_store import ComfyRuntime
from .reference import TINY
from .reference_runtime import ReferenceRuntime, write_reference_model

# A family whose sizes every ComfyUI since 0.8.0 reads from the file.
_FAMILY = "wan"
_TOKENS = 8


def reference_trial(runtime: ReferenceRuntime, folder: Path) -> TinyModel:
    """Writes the reference DiT into `folder`."""
    recipe = write_reference_model(TINY, folder / "monarch_trial.safetensors")
    replica = runtime.build(recipe.tree, recipe.path, recipe.digest)
    size = 8 * TINY.patch

    def inputs(rows: int) -> tuple[list[Any], dict[str, Any]]:
        return _inputs((rows, TINY.channels, size, size), TINY.context_width, 0.5, torch.float32)

    return TinyModel(recipe, replica, inputs)


def comfyui_trial(runtime: ComfyRuntime, folder: Path) -> TinyModel:
    """Writes a tiny Wan with random weights into `folder`, and loads it with ComfyUI's own loader."""
    import comfy.sd

    from ..distributed.loading import load_checked
    from ..distributed.replica import LOADED_WITH, describe
    from .tiny_models import FAMILIES, write_model

    path = write_model(_FAMILY, folder, file="monarch_trial.safetensors")
    options: dict[str, Any] = {}
    with torch.inference_mode():
        patcher = load_checked(path, lambda: comfy.sd.load_diffusion_model(str(path), model_options=options))
    patcher.set_attachments(LOADED_WITH, (comfy.sd.load_diffusion_model, (str(path), options)))
    recipe = describe(patcher)
    replica = runtime.build(recipe.tree, path, recipe.digest)
    family, dtype = FAMILIES[_FAMILY], recipe.tree["compute_dtype"] or recipe.tree["dtype"]

    def inputs(rows: int) -> tuple[list[Any], dict[str, Any]]:
        return _inputs((rows, *family.latent), family.context_width, 500.0, dtype)

    return TinyModel(recipe, replica, inputs)


def _inputs(latent: tuple[int, ...], width: int, time: float, dtype: torch.dtype) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of a forward: a latent, timesteps [rows], and a context [rows, tokens, width]."""
    generator = torch.Generator().manual_seed(0)
    rows = latent[0]
    x = torch.randn(latent, generator=generator).to(dtype)
    context = torch.randn(rows, _TOKENS, width, generator=generator).to(dtype)
    return [x, torch.full((rows,), time)], {
        "context": context,
        "transformer_options": {"cond_or_uncond": list(range(rows))},
    }
