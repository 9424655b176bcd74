"""The table of tiny model families: how each is built, what it takes as latent and conditioning, its usual CFG.

Configurations are the smallest that ComfyUI's own detection reads back from a file; writing files is tiny_models' job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Scale:
    """How large a family is built: heads (and with them the width) and blocks, as multiples of the tiny size."""

    heads: int = 1
    depth: int = 1


SCALES: dict[str, Scale] = {"tiny": Scale(), "deep": Scale(depth=4), "heavy": Scale(heads=2, depth=1)}


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
    output_gain: float = 0.15
    override: str = ""
    overridden: tuple[str, ...] = field(default=())

    @property
    def pixels(self) -> dict[str, int]:
        """width and height in pixels (and length in frames for video) of the default latent."""
        size = {"width": self.latent[-1] * self.downscale, "height": self.latent[-2] * self.downscale}
        if self.frames:
            size["length"] = (self.latent[1] - 1) * self.frames + 1
        return size


def _flux(scale: Scale, **changes: Any) -> dict[str, Any]:
    common = dict(
        image_model="flux", in_channels=16, out_channels=16, vec_in_dim=16, context_in_dim=32, mlp_ratio=4.0,
        axes_dim=[16, 56, 56], theta=10000, patch_size=2, qkv_bias=True, guidance_embed=True, txt_ids_dims=[],
    )
    size = dict(
        hidden_size=256 * scale.heads, num_heads=2 * scale.heads, depth=2 * scale.depth,
        depth_single_blocks=2 * scale.depth,
    )
    return {**common, **size, **changes}


def _flux2(scale: Scale) -> dict[str, Any]:
    return _flux(
        scale, image_model="flux2", in_channels=128, out_channels=128, vec_in_dim=None, context_in_dim=48,
        mlp_ratio=3.0, axes_dim=[32, 32, 32, 32], theta=2000, patch_size=1, qkv_bias=False, txt_ids_dims=[3],
        depth=scale.depth, depth_single_blocks=scale.depth, global_modulation=True, mlp_silu_act=True,
        ops_bias=False, default_ref_method="index", ref_index_scale=10.0,
    )


def _sd3(scale: Scale) -> dict[str, Any]:
    # The width of SD3 is 64 per block, so that heads and blocks cannot be chosen apart.
    depth = 2 * scale.heads * scale.depth
    embedder = {"target": "torch.nn.Linear", "params": {"in_features": 48, "out_features": 64 * depth}}
    return dict(
        in_channels=16, patch_size=2, out_channels=16, depth=depth, input_size=None, adm_in_channels=32,
        context_embedder_config=embedder, num_patches=1024, pos_embed_max_size=32, pos_embed_scaling_factor=None,
        qk_norm="rms", x_block_self_attn_layers=[],
    )


def _wan(scale: Scale) -> dict[str, Any]:
    return dict(
        image_model="wan2.1", model_type="t2v", dim=256 * scale.heads, out_dim=16, num_heads=2 * scale.heads,
        ffn_dim=256 * scale.heads, num_layers=2 * scale.depth, patch_size=(1, 2, 2), freq_dim=256,
        window_size=(-1, -1), qk_norm=True, cross_attn_norm=True, eps=1e-6, in_dim=16,
    )


def _hunyuan_video(scale: Scale) -> dict[str, Any]:
    return dict(
        image_model="hunyuan_video", in_channels=16, patch_size=[1, 2, 2], out_channels=16, vec_in_dim=768,
        axes_dim=[16, 56, 56], meanflow=False, context_in_dim=32, hidden_size=256 * scale.heads, mlp_ratio=4.0,
        num_heads=2 * scale.heads, depth=scale.depth, depth_single_blocks=scale.depth, theta=256, qkv_bias=True,
        byt5=False, guidance_embed=True, use_cond_type_embedding=False, vision_in_dim=None, meanflow_sum=False,
    )


def _ltxv(scale: Scale) -> dict[str, Any]:
    # ComfyUI takes 32 heads for granted and reads their width from the file.
    return dict(
        image_model="ltxv", num_layers=2 * scale.depth, attention_head_dim=4 * scale.heads,
        cross_attention_dim=128 * scale.heads, use_keyframes_abs_pos_embedding=False,
    )


def _unet(**changes: Any) -> dict[str, Any]:
    common = dict(
        image_size=32, in_channels=4, out_channels=4, use_spatial_transformer=True, use_checkpoint=False,
        legacy=False, use_temporal_attention=False, use_temporal_resblock=False,
    )
    return {**common, **changes}


def _sd15(scale: Scale) -> dict[str, Any]:
    blocks = scale.depth
    return _unet(
        model_channels=320, num_res_blocks=[blocks], channel_mult=[1], transformer_depth=[1] * blocks,
        transformer_depth_output=[1] * (blocks + 1), transformer_depth_middle=1, context_dim=768, num_heads=8,
        num_head_channels=-1, use_linear_in_transformer=False, adm_in_channels=None,
    )


def _sdxl(scale: Scale) -> dict[str, Any]:
    return _unet(
        model_channels=128 * scale.heads, num_res_blocks=[1, 1], channel_mult=[1, 1], transformer_depth=[0, scale.depth],
        transformer_depth_output=[0, 0, scale.depth, scale.depth], transformer_depth_middle=scale.depth,
        context_dim=48, num_head_channels=64, use_linear_in_transformer=True, adm_in_channels=2816,
        num_classes="sequential",
    )


_FLUX = ("comfy.ldm.flux.model", "Flux")
_UNET = ("comfy.ldm.modules.diffusionmodules.openaimodel", "UNetModel")
_SD3 = ("comfy.ldm.modules.diffusionmodules.mmdit", "OpenAISignatureMMDITWrapper")
_HUNYUAN = ("comfy.ldm.hunyuan_video.model", "HunyuanVideo")
_SDXL_SIZES = (
    "model_channels", "num_res_blocks", "channel_mult", "transformer_depth", "transformer_depth_output",
    "transformer_depth_middle", "context_dim", "num_head_channels", "adm_in_channels",
)

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("flux", _FLUX, _flux, (16, 8, 8), 32, cfg=1.0, pooled=16, guidance=3.5),
        Family("flux_schnell", _FLUX, lambda s: _flux(s, guidance_embed=False), (16, 8, 8), 32, pooled=16),
        Family(
            "flux2", _FLUX, _flux2, (128, 4, 4), 48, cfg=1.0, guidance=4.0, empty_node="EmptyFlux2LatentImage",
            downscale=16, output_gain=0.6,
        ),
        Family("sd3", _SD3, _sd3, (16, 8, 8), 48, pooled=32),
        Family(
            "wan", ("comfy.ldm.wan.model", "WanModel"), _wan, (16, 3, 8, 8), 4096,
            empty_node="EmptyHunyuanLatentVideo", frames=4, output_layer="head.head.weight",
        ),
        Family(
            "hunyuan_video", _HUNYUAN, _hunyuan_video, (16, 3, 8, 8), 32, cfg=1.0, pooled=768, guidance=6.0,
            empty_node="EmptyHunyuanLatentVideo", frames=4,
        ),
        Family(
            "ltxv", ("comfy.ldm.lightricks.model", "LTXVModel"), _ltxv, (128, 2, 4, 4), 4096, attention_mask=True,
            frame_rate=25, empty_node="EmptyLTXVLatentVideo", downscale=32, frames=8,
            output_layer="proj_out.weight",
        ),
        Family(
            "sd15", _UNET, _sd15, (4, 8, 8), 768, empty_node="EmptyLatentImage", output_layer="out.2.weight", output_gain=0.002,
        ),
        Family(
            "sdxl", _UNET, _sdxl, (4, 8, 8), 48, pooled=1280, empty_node="EmptyLatentImage", output_layer="out.2.weight", output_gain=0.002,
            override="SDXL", overridden=_SDXL_SIZES,
        ),
    )
}
