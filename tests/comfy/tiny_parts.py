"""Tiny VAEs, ControlNets and whole checkpoints with random weights, which ComfyUI's own loaders read.

The diffusion models in them are demo.tiny_models' job. Text encoders are not here: none is small enough."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_AUDIO = {
    "audio_vae": {
        "model": {
            "params": {
                "ddconfig": {
                    "double_z": True, "mel_bins": 64, "z_channels": 8, "resolution": 64, "downsample_time": False,
                    "in_channels": 2, "out_ch": 2, "ch": 32, "ch_mult": [1, 1, 1], "num_res_blocks": 1,
                    "attn_resolutions": [], "dropout": 0.0, "mid_block_add_attention": False, "norm_type": "pixel",
                    "causality_axis": "height",
                },
                "sampling_rate": 16000,
            }
        },
        "preprocessing": {"stft": {"filter_length": 1024, "hop_length": 160}},
    },
    "vocoder": {"upsample_initial_channel": 64},
}  # fmt: skip


def random_weights(shapes: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """Random values for every tensor of a state dict, whose own values are not read."""
    from monarch_split.demo.tiny_models import random_weight

    made = {name: random_weight(name, tensor.shape, tensor.dtype, 0) for name, tensor in shapes.items()}
    return {prefix + name: tensor.to(shapes[name].dtype).contiguous() for name, tensor in made.items()}


def image_vae(channels: int) -> dict[str, Tensor]:
    """A TAESD for latents [B, channels, H, W], 8 pixels a cell."""
    return random_weights(importlib.import_module("comfy.taesd.taesd").TAESD(latent_channels=channels).state_dict())


def flux2_vae() -> dict[str, Tensor]:
    """The decoder of an AutoencoderKL for Flux2's latents [B, 128, H, W], a quarter as wide as the real one."""
    model = importlib.import_module("comfy.ldm.modules.diffusionmodules.model")
    sizes: dict[str, Any] = {
        "ch": 32, "out_ch": 3, "ch_mult": (1, 2, 4, 4), "num_res_blocks": 2, "attn_resolutions": [], "in_channels": 3,
        "resolution": 256, "z_channels": 32,
    }  # fmt: skip
    made = random_weights(model.Decoder(**sizes).state_dict(), "decoder.")
    made["post_quant_conv.weight"] = torch.eye(32)[:, :, None, None].contiguous()
    made["post_quant_conv.bias"] = torch.zeros(32)
    made["bn.running_mean"], made["bn.running_var"] = torch.zeros(128), torch.ones(128)
    return made


def video_vae(channels: int) -> dict[str, Tensor]:
    """A TAEHV for latents [B, channels, T, H, W]."""
    return random_weights(importlib.import_module("comfy.taesd.taehv").TAEHV(latent_channels=channels).state_dict())


def audio_vae() -> tuple[dict[str, Tensor], dict[str, str]]:
    """LTX-2's VAE for sound with its vocoder, and the metadata that says how large they are."""
    metadata = {"config": json.dumps(_AUDIO)}
    shapes = importlib.import_module("comfy.ldm.lightricks.vae.audio_vae").AudioVAE(metadata=metadata).state_dict()
    weights = {name.replace("autoencoder.", "audio_vae.", 1): tensor for name, tensor in random_weights(shapes).items()}
    return weights, metadata


def sd35_controlnet(blocks: int = 2) -> dict[str, Tensor]:
    """A ControlNet for a tiny SD3.5 of `blocks` blocks."""
    embedder = importlib.import_module("comfy.cldm.dit_embedder").ControlNetEmbedder(
        img_size=None, patch_size=2, in_chans=16, num_layers=blocks, main_model_double=blocks, double_y_emb=False,
        attention_head_dim=64, num_attention_heads=blocks, adm_in_channels=2048, device="cpu", dtype=torch.float32,
        operations=importlib.import_module("comfy.ops").disable_weight_init,
    )  # fmt: skip
    return random_weights(embedder.state_dict())


@contextmanager
def more_families() -> Iterator[None]:
    """Two more tiny families, which the templates alone need, for the length of a `with`."""
    from monarch_split.demo import tiny_configs
    from monarch_split.demo.tiny_families import FAMILIES

    # Wan 2.2 takes the first frame as more channels, and no CLIP vision; a ControlNet wants SD3.5's full pooled text.
    added = {
        "wan22_i2v": dataclasses.replace(
            FAMILIES["wan"], name="wan22_i2v", config=lambda scale: tiny_configs.wan(scale, in_dim=36)
        ),
        "sd35_large": dataclasses.replace(
            FAMILIES["sd3"],
            name="sd35_large",
            config=lambda scale: {**tiny_configs.sd3(scale), "adm_in_channels": 2048},
            pooled=2048,
        ),
    }
    FAMILIES.update(added)
    try:
        yield
    finally:
        for name in added:
            del FAMILIES[name]


def write_checkpoint(
    path: Path, family: str, parts: Mapping[str, Mapping[str, Tensor]], metadata: Mapping[str, str] | None = None
) -> None:
    """A checkpoint of a tiny model of `family` and more parts, each below its prefix."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    from monarch_split.demo.tiny_models import read_metadata, write_model

    model = write_model(family, path.parent / "alone")
    with safe_open(model, framework="pt") as file:
        weights = {f"model.diffusion_model.{name}": file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for prefix, part in parts.items():
        weights.update({prefix + name: tensor for name, tensor in part.items()})
    save_file(weights, path, metadata={**read_metadata(model), **(metadata or {})})
    model.unlink()
    model.parent.rmdir()
