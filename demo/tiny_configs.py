"""Constructor arguments of ComfyUI's diffusion model classes at tiny sizes, one function per family.

The smallest that ComfyUI's own detection reads back from a file. What a family takes as input is in tiny_families."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Scale:
    """How large a family is built: heads (and with them the width) and blocks, as multiples of the tiny size."""

    heads: int = 1
    depth: int = 1


SCALES: dict[str, Scale] = {"tiny": Scale(), "deep": Scale(depth=4), "heavy": Scale(heads=2, depth=1)}


def flux(scale: Scale, **changes: Any) -> dict[str, Any]:
    common = {
        "image_model": "flux",
        "in_channels": 16,
        "out_channels": 16,
        "vec_in_dim": 16,
        "context_in_dim": 32,
        "mlp_ratio": 4.0,
        "axes_dim": [16, 56, 56],
        "theta": 10000,
        "patch_size": 2,
        "qkv_bias": True,
        "guidance_embed": True,
        "txt_ids_dims": [],
    }
    size = {
        "hidden_size": 256 * scale.heads,
        "num_heads": 2 * scale.heads,
        "depth": 2 * scale.depth,
        "depth_single_blocks": 2 * scale.depth,
    }
    return {**common, **size, **changes}


def flux2(scale: Scale) -> dict[str, Any]:
    return flux(
        scale,
        image_model="flux2",
        in_channels=128,
        out_channels=128,
        vec_in_dim=None,
        context_in_dim=48,
        mlp_ratio=3.0,
        axes_dim=[32, 32, 32, 32],
        theta=2000,
        patch_size=1,
        qkv_bias=False,
        txt_ids_dims=[3],
        depth=scale.depth,
        depth_single_blocks=scale.depth,
        global_modulation=True,
        mlp_silu_act=True,
        ops_bias=False,
        default_ref_method="index",
        ref_index_scale=10.0,
    )


def sd3(scale: Scale) -> dict[str, Any]:
    # The width of SD3 is 64 per block, so that heads and blocks cannot be chosen apart.
    depth = 2 * scale.heads * scale.depth
    embedder = {"target": "torch.nn.Linear", "params": {"in_features": 48, "out_features": 64 * depth}}
    return {
        "in_channels": 16,
        "patch_size": 2,
        "out_channels": 16,
        "depth": depth,
        "input_size": None,
        "adm_in_channels": 32,
        "context_embedder_config": embedder,
        "num_patches": 1024,
        "pos_embed_max_size": 32,
        "pos_embed_scaling_factor": None,
        "qk_norm": "rms",
        "x_block_self_attn_layers": [],
    }


def wan(scale: Scale) -> dict[str, Any]:
    return {
        "image_model": "wan2.1",
        "model_type": "t2v",
        "dim": 256 * scale.heads,
        "out_dim": 16,
        "num_heads": 2 * scale.heads,
        "ffn_dim": 256 * scale.heads,
        "num_layers": 2 * scale.depth,
        "patch_size": (1, 2, 2),
        "freq_dim": 256,
        "window_size": (-1, -1),
        "qk_norm": True,
        "cross_attn_norm": True,
        "eps": 1e-6,
        "in_dim": 16,
    }


def hunyuan_video(scale: Scale) -> dict[str, Any]:
    return {
        "image_model": "hunyuan_video",
        "in_channels": 16,
        "patch_size": [1, 2, 2],
        "out_channels": 16,
        "vec_in_dim": 768,
        "axes_dim": [16, 56, 56],
        "meanflow": False,
        "context_in_dim": 32,
        "hidden_size": 256 * scale.heads,
        "mlp_ratio": 4.0,
        "num_heads": 2 * scale.heads,
        "depth": scale.depth,
        "depth_single_blocks": scale.depth,
        "theta": 256,
        "qkv_bias": True,
        "byt5": False,
        "guidance_embed": True,
        "use_cond_type_embedding": False,
        "vision_in_dim": None,
        "meanflow_sum": False,
    }


def ltxv(scale: Scale) -> dict[str, Any]:
    # ComfyUI takes 32 heads for granted and reads their width from the file.
    return {
        "image_model": "ltxv",
        "num_layers": 2 * scale.depth,
        "attention_head_dim": 4 * scale.heads,
        "cross_attention_dim": 128 * scale.heads,
        "use_keyframes_abs_pos_embedding": False,
    }


def _unet(**changes: Any) -> dict[str, Any]:
    common = {
        "image_size": 32,
        "in_channels": 4,
        "out_channels": 4,
        "use_spatial_transformer": True,
        "use_checkpoint": False,
        "legacy": False,
        "use_temporal_attention": False,
        "use_temporal_resblock": False,
    }
    return {**common, **changes}


def sd15(scale: Scale) -> dict[str, Any]:
    blocks = scale.depth
    return _unet(
        model_channels=320,
        num_res_blocks=[blocks],
        channel_mult=[1],
        transformer_depth=[1] * blocks,
        transformer_depth_output=[1] * (blocks + 1),
        transformer_depth_middle=1,
        context_dim=768,
        num_heads=8,
        num_head_channels=-1,
        use_linear_in_transformer=False,
        adm_in_channels=None,
    )


def sdxl(scale: Scale) -> dict[str, Any]:
    return _unet(
        model_channels=128 * scale.heads,
        num_res_blocks=[1, 1],
        channel_mult=[1, 1],
        transformer_depth=[0, scale.depth],
        transformer_depth_output=[0, 0, scale.depth, scale.depth],
        transformer_depth_middle=scale.depth,
        context_dim=48,
        num_head_channels=64,
        use_linear_in_transformer=True,
        adm_in_channels=2816,
        num_classes="sequential",
    )
