"""Write tiny models with random weights as safetensors files that a real ComfyUI loads, and make their conditioning.

ComfyUI is imported only inside functions. Sizes are in tiny_families, LoRA files in tiny_loras."""

from __future__ import annotations

import importlib
import json
import math
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from .family_override import METADATA_KEY
from .nodes import random_conditioning
from .tiny_families import FAMILIES, SCALES, Family, Scale

__all__ = ["FAMILIES", "SCALES", "Family", "conditioning", "empty_latent", "weight_shapes", "write_model"]

# Bumped when the weights of an unchanged configuration change, so that old files are not taken for new ones.
WEIGHTS_VERSION = 2
_OWN_KEY = "monarch_tiny_model"
_GAIN = 0.7
UNET_OUTPUT = "out.2.weight"


def conditioning(
    family: str,
    seed: int,
    tokens: int = 8,
    *,
    masked: int = 0,
    references: Sequence[Sequence[int]] = (),
    reference_method: str | None = None,
) -> list:
    """ComfyUI CONDITIONING with everything the family needs; a random context [1, tokens, context_width].

    masked: so many of the last tokens are padding by an integer attention mask. references: a size in latent cells, as
    for empty_latent, of each random reference latent (Kontext, Edit); reference_method: how ComfyUI places them.
    """
    entry = FAMILIES[family]
    made = random_conditioning(
        seed,
        tokens,
        entry.context_width,
        pooled=entry.pooled,
        guidance=entry.guidance,
        attention_mask=entry.attention_mask or masked > 0,
        frame_rate=entry.frame_rate,
    )
    extra = made[0][1]
    generator = torch.Generator().manual_seed(seed)
    if masked:
        extra["attention_mask"][:, tokens - masked :] = 0
    if entry.llama:
        layers, width = entry.llama
        extra["conditioning_llama3"] = torch.randn(1, layers, tokens, width, generator=generator)
    if entry.vision:
        states = torch.randn(1, *entry.vision, generator=generator)
        extra["clip_vision_output"] = SimpleNamespace(penultimate_hidden_states=states, last_hidden_state=states)
    if references:
        shapes = [_latent_shape(entry, size) for size in references]
        extra["reference_latents"] = [torch.randn(1, *shape, generator=generator) for shape in shapes]
    if reference_method is not None:
        extra["reference_latents_method"] = reference_method
    return made


def empty_latent(family: str, batch: int = 1, size: Sequence[int] | None = None, audio: int | None = None) -> Any:
    """Zeros [batch, C, (T,) H, W] of `size`, (H, W) or (T, H, W) in latent cells; None: the family's default.

    For a family with sound a ComfyUI NestedTensor of picture and sound; `audio` is then the length of the sound.
    """
    entry = FAMILIES[family]
    picture = torch.zeros(batch, *_latent_shape(entry, size or ()))
    if not entry.audio:
        return picture
    from comfy.nested_tensor import NestedTensor

    shape = list(entry.audio)
    if audio is not None:
        shape[entry.audio_time] = audio
    return NestedTensor([picture, torch.zeros(batch, *shape)])


def _latent_shape(entry: Family, size: Sequence[int]) -> tuple[int, ...]:
    """Shape without the batch of a latent of `size` (see empty_latent). ValueError for too many numbers."""
    if len(size) >= len(entry.latent):
        raise ValueError(f"{entry.name} has latents like {list(entry.latent)}; a size of {list(size)} does not fit")
    return (*entry.latent[: len(entry.latent) - len(size)], *size)


def weight_shapes(family: str, scale: str = "tiny") -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of every tensor of the model's state dict, without making one. Needs ComfyUI importable."""
    import comfy.ops

    entry = FAMILIES[family]
    model_class = getattr(importlib.import_module(entry.class_path[0]), entry.class_path[1])
    config = entry.config(SCALES[scale])
    model = model_class(**config, dtype=torch.float32, device="meta", operations=comfy.ops.disable_weight_init)
    return {name: (tensor.shape, tensor.dtype) for name, tensor in model.state_dict().items()}


def random_weight(name: str, shape: torch.Size, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A float32 weight that keeps activations near 1, so that outputs depend on every input and stay finite."""
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype)
    if len(shape) == 1 and name.endswith((".weight", ".scale")):
        return torch.ones(shape)  # a norm
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) ^ seed)
    deviation = 0.1
    if len(shape) > 1 and name.endswith(".weight"):
        deviation = _GAIN / math.sqrt(math.prod(shape[1:]))
    elif name.endswith(".bias"):
        deviation = 0.02
    return torch.randn(shape, generator=generator) * deviation


def pass_input_through(weights: dict[str, torch.Tensor], anchor: float = 3.0) -> None:
    """Let a UNet answer its input plus something small and random, as a trained one does at high noise.

    It predicts noise: any other answer leaves noise of a standard deviation of up to 15 in the latent, and float32 then
    has no digits left for a comparison to 1e-5. `anchor`: a constant that keeps GroupNorm from rescaling the input.
    """
    first, norm, last = weights["input_blocks.0.0.weight"], weights["out.0.weight"], weights[UNET_OUTPUT]
    block = f"output_blocks.{max(int(key.split('.')[1]) for key in weights if key.startswith('output_blocks.'))}"
    # The last output block sees [hidden, first layer's output] and has a 1 x 1 convolution as its skip connection.
    skip, bias = weights[f"{block}.0.skip_connection.weight"], weights[f"{block}.0.skip_connection.bias"]
    hidden, middle = skip.shape[1] - first.shape[0], first.shape[-1] // 2
    group = first.shape[0] // 32  # channels of one group of ComfyUI's GroupNorm(32, ...)
    for channel in range(first.shape[1]):
        lanes = slice(group * channel, group * (channel + 1))
        for name in (f"{block}.0.skip_connection", f"{block}.0.out_layers.3", f"{block}.1.proj_out"):
            if f"{name}.weight" in weights:
                weights[f"{name}.weight"][lanes] *= 0.002
                weights[f"{name}.bias"][lanes] = 0.0
        first[lanes], last[:, lanes] = 0.0, 0.0
        plus, minus = lanes.start, lanes.start + 1
        bias[lanes.start + 2], bias[lanes.start + 3] = anchor, -anchor
        norm[lanes] = math.sqrt(2 * (1 + anchor**2) / group)
        # silu(a) - silu(-a) = a carries a value through the activation between the norm and the last layer.
        for lane, sign in ((plus, 1.0), (minus, -1.0)):
            first[lane, channel, middle, middle] = sign
            skip[lane, hidden + lane] = 1.0
            last[channel, lane, middle, middle] = sign


def write_model(name: str, folder: Path, *, scale: str = "tiny", seed: int = 0, file: str | None = None) -> Path:
    """Write family `name` as a float32 safetensors file into `folder` and return its path.

    `scale` is a key of SCALES; `file` the file's name (default: name, or name_scale). A file that already holds the
    same configuration is left as it is. Needs ComfyUI importable; a family with `override` loads only under
    family_override. Raises KeyError for an unknown family or scale.
    """
    from safetensors.torch import save_file

    family, size = FAMILIES[name], SCALES[scale]
    metadata = _metadata(family, size, seed)
    folder = Path(folder)
    path = folder / (file or f"{name if scale == 'tiny' else f'{name}_{scale}'}.safetensors")
    if path.exists() and read_metadata(path).get(_OWN_KEY) == metadata[_OWN_KEY]:
        return path
    weights = {key: random_weight(key, *entry, seed) for key, entry in weight_shapes(name, scale).items()}
    weights[family.output_layer] *= family.output_gain
    if family.output_layer == UNET_OUTPUT:
        pass_input_through(weights)
    folder.mkdir(parents=True, exist_ok=True)
    # Several test processes may share the folder: a file appears under its name only when it is whole.
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    save_file(weights, partial, metadata=metadata)
    os.replace(partial, path)
    return path


def read_metadata(path: Path) -> dict[str, str]:
    """The "__metadata__" of a safetensors file's header, empty when there is none."""
    with open(path, "rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        return json.loads(stream.read(length)).get("__metadata__", {})


def _metadata(family: Family, size: Scale, seed: int) -> dict[str, str]:
    config: dict[str, Any] = family.config(size)
    own = {
        "family": family.name,
        "scale": asdict(size),
        "seed": seed,
        "version": WEIGHTS_VERSION,
        "output_gain": family.output_gain,
        "config": config,
    }
    metadata = {_OWN_KEY: json.dumps(own, sort_keys=True)}
    if family.override:
        metadata[METADATA_KEY] = json.dumps({"class": family.override, "unet_config": config})
    return metadata
