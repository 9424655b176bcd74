"""The table of tiny model families: what each takes as latent and conditioning, and its usual CFG.

Sizes of the models are in tiny_configs; writing files is tiny_models' job. Standard library only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from . import tiny_configs
from .tiny_configs import SCALES, Scale

__all__ = ["FAMILIES", "SCALES", "Family", "Scale"]


@dataclass(frozen=True)
class Family:
    """One model family. Lengths are latent cells and tokens; 0 means "this family takes none of it".

    class_path: module and class of the diffusion model in ComfyUI. config: Scale -> keyword arguments of that class.
    latent: shape of one default latent without the batch, [C, H, W] or [C, T, H, W].
    empty_node: stock node for an empty latent; downscale: pixels per latent cell; frames: latent T of a length L
    is (L - 1) // frames + 1. output_gain: factor on the weights of the output layer, which keeps latents near 1.
    override, overridden: class in comfy.supported_models and config keys that only family_override can bring about.
    """

    name: str
    class_path: tuple[str, str]
    config: Callable[[Scale], dict[str, Any]]
    latent: tuple[int, ...]
    context_width: int
    cfg: float = 4.0
    pooled: int = 0
    guidance: float = 0.0
    attention_mask: bool = False
    frame_rate: int = 0
    empty_node: str = "EmptySD3LatentImage"
    downscale: int = 8
    frames: int = 0
    output_layer: str = "final_layer.linear.weight"
    output_gain: float = 0.08
    override: str = ""
    overridden: tuple[str, ...] = field(default=())

    @property
    def pixels(self) -> dict[str, int]:
        """width and height in pixels (and length in frames for video) of the default latent."""
        size = {"width": self.latent[-1] * self.downscale, "height": self.latent[-2] * self.downscale}
        if self.frames:
            size["length"] = (self.latent[1] - 1) * self.frames + 1
        return size


_FLUX = ("comfy.ldm.flux.model", "Flux")
_UNET = ("comfy.ldm.modules.diffusionmodules.openaimodel", "UNetModel")
_SD3 = ("comfy.ldm.modules.diffusionmodules.mmdit", "OpenAISignatureMMDITWrapper")
_HUNYUAN = ("comfy.ldm.hunyuan_video.model", "HunyuanVideo")
_SDXL_SIZES = (
    "model_channels",
    "num_res_blocks",
    "channel_mult",
    "transformer_depth",
    "transformer_depth_output",
    "transformer_depth_middle",
    "context_dim",
    "num_head_channels",
    "adm_in_channels",
)

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("flux", _FLUX, tiny_configs.flux, (16, 8, 8), 32, cfg=1.0, pooled=16, guidance=3.5),
        Family("flux_schnell", _FLUX, lambda s: tiny_configs.flux(s, guidance_embed=False), (16, 8, 8), 32, pooled=16),
        Family(
            "flux2",
            _FLUX,
            tiny_configs.flux2,
            (128, 4, 4),
            48,
            cfg=1.0,
            guidance=4.0,
            empty_node="EmptyFlux2LatentImage",
            downscale=16,
            output_gain=0.4,
        ),
        Family("sd3", _SD3, tiny_configs.sd3, (16, 8, 8), 48, pooled=32),
        Family(
            "wan",
            ("comfy.ldm.wan.model", "WanModel"),
            tiny_configs.wan,
            (16, 3, 8, 8),
            4096,
            empty_node="EmptyHunyuanLatentVideo",
            frames=4,
            output_layer="head.head.weight",
        ),
        Family(
            "hunyuan_video",
            _HUNYUAN,
            tiny_configs.hunyuan_video,
            (16, 3, 8, 8),
            32,
            cfg=1.0,
            pooled=768,
            guidance=6.0,
            empty_node="EmptyHunyuanLatentVideo",
            frames=4,
        ),
        Family(
            "ltxv",
            ("comfy.ldm.lightricks.model", "LTXVModel"),
            tiny_configs.ltxv,
            (128, 2, 4, 4),
            4096,
            attention_mask=True,
            frame_rate=25,
            empty_node="EmptyLTXVLatentVideo",
            downscale=32,
            frames=8,
            output_layer="proj_out.weight",
        ),
        Family(
            "sd15",
            _UNET,
            tiny_configs.sd15,
            (4, 8, 8),
            768,
            empty_node="EmptyLatentImage",
            output_layer="out.2.weight",
            output_gain=0.002,
        ),
        Family(
            "sdxl",
            _UNET,
            tiny_configs.sdxl,
            (4, 8, 8),
            48,
            pooled=1280,
            empty_node="EmptyLatentImage",
            output_layer="out.2.weight",
            output_gain=0.002,
            override="SDXL",
            overridden=_SDXL_SIZES,
        ),
    )
}
