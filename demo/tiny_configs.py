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
        global_modulation=True,
        mlp_silu_act=True,
        ops_bias=False,
        default_ref_method="index",
        ref_index_scale=10.0,
    )


def sd3(scale: Scale, blocks: int = 2, self_attention: int = 0) -> dict[str, Any]:
    """The first `self_attention` blocks attend to the image alone as well, as in SD3.5 medium."""
    # The width of SD3 is 64 per block, so that heads and blocks cannot be chosen apart.
    depth = blocks * scale.heads * scale.depth
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
        "x_block_self_attn_layers": list(range(self_attention)),
    }


def wan(scale: Scale, **changes: Any) -> dict[str, Any]:
    common = {
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
    return {**common, **changes}


def hunyuan_video(scale: Scale, **changes: Any) -> dict[str, Any]:
    common = {
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
        "depth": 2 * scale.depth,
        "depth_single_blocks": 2 * scale.depth,
        "theta": 256,
        "qkv_bias": True,
        "byt5": False,
        "guidance_embed": True,
        "use_cond_type_embedding": False,
        "vision_in_dim": None,
        "meanflow_sum": False,
    }
    return {**common, **changes}


def hunyuan_video15(scale: Scale) -> dict[str, Any]:
    # No ByT5 projection: its fixed widths alone are 30 MB, and it only makes more text tokens.
    return hunyuan_video(
        scale,
        in_channels=65,
        patch_size=[1, 1, 1],
        out_channels=32,
        vec_in_dim=None,
        axes_dim=[8, 12, 12],
        hidden_size=96 * scale.heads,
        num_heads=3 * scale.heads,
        depth=3 * scale.depth,
        depth_single_blocks=0,
        guidance_embed=False,
        use_cond_type_embedding=True,
        vision_in_dim=40,
        meanflow_sum=True,
    )


def ltxv(scale: Scale) -> dict[str, Any]:
    # ComfyUI takes 32 heads for granted and reads their width from the file.
    return {
        "image_model": "ltxv",
        "num_layers": 2 * scale.depth,
        "attention_head_dim": 4 * scale.heads,
        "cross_attention_dim": 128 * scale.heads,
        "use_keyframes_abs_pos_embedding": False,
    }


def ltxav(scale: Scale) -> dict[str, Any]:
    return {
        "image_model": "ltxav",
        "num_layers": 3 * scale.depth,
        "num_attention_heads": 3 * scale.heads,
        "attention_head_dim": 32,
        "cross_attention_dim": 96 * scale.heads,
        "caption_channels": 48,
        "audio_num_attention_heads": 2 * scale.heads,
        "audio_attention_head_dim": 16,
        "audio_cross_attention_dim": 32 * scale.heads,
        "connector_attention_head_dim": 24,
        "connector_num_attention_heads": 2,
        "connector_num_layers": 1,
        "use_keyframes_abs_pos_embedding": False,
    }


def qwen_image(scale: Scale) -> dict[str, Any]:
    return {
        "image_model": "qwen_image",
        "in_channels": 64,
        "num_layers": 3 * scale.depth,
        "num_attention_heads": 3 * scale.heads,
        "attention_head_dim": 32,
        "axes_dims_rope": [8, 12, 12],
        "joint_attention_dim": 48,
    }


def lumina2(scale: Scale, **changes: Any) -> dict[str, Any]:
    common = {
        "image_model": "lumina2",
        "patch_size": 2,
        "in_channels": 16,
        "dim": 96 * scale.heads,
        "cap_feat_dim": 32,
        "n_layers": 3 * scale.depth,
        "qk_norm": True,
        "n_heads": 4 * scale.heads,
        "n_kv_heads": 2 * scale.heads,
        "axes_dims": [8, 8, 8],
        "axes_lens": [300, 512, 512],
        "rope_theta": 10000.0,
        "ffn_dim_multiplier": 1.0,
    }
    return {**common, **changes}


def z_image(scale: Scale) -> dict[str, Any]:
    # Its modulation is 256 wide, and so must the model be.
    return lumina2(
        scale,
        dim=256 * scale.heads,
        n_heads=4 * scale.heads,
        n_kv_heads=4 * scale.heads,
        axes_dims=[16, 24, 24],
        axes_lens=[1536, 512, 512],
        rope_theta=256.0,
        z_image_modulation=True,
        time_scale=1000.0,
        pad_tokens_multiple=32,
    )


def chroma(scale: Scale) -> dict[str, Any]:
    width = 96 * scale.heads
    return {
        "image_model": "chroma",
        "in_channels": 64,
        "out_channels": 64,
        "in_dim": 64,
        "out_dim": width,
        "hidden_dim": 64,
        "n_layers": 2,
        "context_in_dim": 32,
        "hidden_size": width,
        "mlp_ratio": 4.0,
        "num_heads": 3 * scale.heads,
        "depth": 2 * scale.depth,
        "depth_single_blocks": 3 * scale.depth,
        "axes_dim": [8, 12, 12],
        "theta": 10000,
        "patch_size": 2,
        "qkv_bias": True,
        "txt_ids_dims": [],
        "vec_in_dim": None,
    }


def krea2(scale: Scale) -> dict[str, Any]:
    return {
        "image_model": "krea2",
        "features": 128 * scale.heads,
        "channels": 16,
        "patch": 2,
        "layers": 3 * scale.depth,
        "heads": 4 * scale.heads,
        "kvheads": 2 * scale.heads,
        "txtlayers": 2,
        "txtdim": 40,
        "txtheads": 2,
        "txtkvheads": 2,
    }


def hidream(scale: Scale) -> dict[str, Any]:
    blocks = 2 * scale.depth
    return {
        "image_model": "hidream",
        "in_channels": 16,
        "out_channels": 16,
        "patch_size": 2,
        "attention_head_dim": 32,
        "num_attention_heads": 3 * scale.heads,
        "axes_dims_rope": [16, 8, 8],
        "caption_channels": [48, 40],
        "max_resolution": [128, 128],
        "llama_layers": [index % 4 for index in range(2 * blocks)],
        "num_routed_experts": 4,
        "num_activated_experts": 2,
        "num_layers": blocks,
        "num_single_layers": blocks,
        "text_emb_dim": 32,
    }


def cosmos_predict2(scale: Scale) -> dict[str, Any]:
    return {
        "image_model": "cosmos_predict2",
        "max_img_h": 240,
        "max_img_w": 240,
        "max_frames": 128,
        "in_channels": 16,
        "out_channels": 16,
        "patch_spatial": 2,
        "patch_temporal": 1,
        "model_channels": 96 * scale.heads,
        "crossattn_emb_channels": 48,
        "pos_emb_cls": "rope3d",
        "use_adaln_lora": True,
        "adaln_lora_dim": 16,
        "num_blocks": 3 * scale.depth,
        "num_heads": 3 * scale.heads,
    }


def kandinsky5(scale: Scale) -> dict[str, Any]:
    return {
        "model_dim": 96 * scale.heads,
        "axes_dims": [8, 12, 12],
        "time_dim": 64,
        "ff_dim": 128,
        "visual_embed_dim": 132,
        "in_text_dim": 48,
        "in_text_dim2": 32,
        "num_text_blocks": 2,
        "num_visual_blocks": 3 * scale.depth,
    }


def ideogram4(scale: Scale) -> dict[str, Any]:
    return {
        "image_model": "ideogram4",
        "in_channels": 128,
        "num_layers": 3 * scale.depth,
        "num_attention_heads": 3 * scale.heads,
        "attention_head_dim": 64,
        "intermediate_size": 64,
        "adaln_dim": 32,
        "llm_features_dim": 48,
        "mrope_section": [12, 10, 10],
    }


def minimax_h3(scale: Scale) -> dict[str, Any]:
    return {
        "image_model": "minimax_h3",
        "hidden_size": 96 * scale.heads,
        "num_layers": 3 * scale.depth,
        "token_refiner_num_layers": 2,
        "num_attention_heads": 3 * scale.heads,
        "attention_head_dim": 32,
        "ffn_hidden_size": 96,
        "latents_dim": 24,
        "audio_latents_dim": 32,
        "text_dim": 48,
        "timestep_input_dim": 32,
        "time_embed_hidden_size": 32,
        "time_embed_dim": 32,
        "rope_inv_freq_len": 4,
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
