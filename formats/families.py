"""The architecture that a file's diffusion model belongs to, by names of tensors that only that one has.

The names are those by which ComfyUI tells them apart (detect_unet_config in comfy/model_detection.py).
"""

from __future__ import annotations

from collections.abc import Container

# What stands in front of a diffusion model's names in a checkpoint (unet_prefix_from_state_dict, same file).
PREFIXES = ("model.diffusion_model.", "model.model.", "net.", "model.")

# Family -> names that must all be there. The first match counts: one that has another's names comes before it.
_SIGNATURES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("SD3", ("joint_blocks.0.context_block.attn.qkv.weight",)),
    ("AuraFlow", ("double_layers.0.attn.w1q.weight",)),
    ("HunyuanDiT", ("mlp_t5.0.weight",)),
    ("HunyuanVideo 1.5", ("txt_in.individual_token_refiner.blocks.0.norm1.weight", "vision_in.proj.0.weight")),
    ("HunyuanVideo", ("txt_in.individual_token_refiner.blocks.0.norm1.weight",)),
    ("Flux2", ("double_stream_modulation_img.lin.weight", "double_blocks.0.img_attn.norm.key_norm.weight")),
    ("Flux2", ("double_stream_modulation_img.lin.weight", "double_blocks.0.img_attn.norm.key_norm.scale")),
    ("Chroma", ("distilled_guidance_layer.norms.0.weight", "double_blocks.0.img_attn.norm.key_norm.weight")),
    ("Chroma", ("distilled_guidance_layer.norms.0.scale", "double_blocks.0.img_attn.norm.key_norm.scale")),
    ("Flux", ("double_blocks.0.img_attn.norm.key_norm.weight", "img_in.weight")),
    ("Flux", ("double_blocks.0.img_attn.norm.key_norm.scale", "img_in.weight")),
    ("Mochi", ("t5_yproj.weight",)),
    ("MiniMax H3", ("video_patch_proj.weight", "audio_patch_proj.weight")),
    ("LTXAV", ("adaln_single.emb.timestep_embedder.linear_1.bias", "audio_adaln_single.linear.weight")),
    ("LTXV", ("adaln_single.emb.timestep_embedder.linear_1.bias",)),
    ("PixArt", ("t_block.1.weight",)),
    ("Cosmos", ("blocks.block0.blocks.0.block.attn.to_q.0.weight",)),
    ("PixelDiT", ("core.pixel_embedder.proj.weight",)),
    ("Z-Image", ("cap_embedder.1.weight", "noise_refiner.0.attention.k_norm.weight", "cap_pad_token")),
    ("Lumina2", ("cap_embedder.1.weight", "noise_refiner.0.attention.k_norm.weight")),
    ("CogVideoX", ("blocks.0.norm1.linear.weight",)),
    ("SeedVR2", ("blocks.31.mlp.all.proj_in_gate.weight",)),
    ("Wan", ("head.modulation",)),
    ("HiDream-O1", ("t_embedder1.mlp.0.weight", "x_embedder.proj1.weight")),
    ("HiDream", ("caption_projection.0.linear.weight",)),
    ("Anima", ("blocks.0.mlp.layer1.weight", "llm_adapter.blocks.0.cross_attn.q_proj.weight")),
    ("Cosmos-Predict2", ("blocks.0.mlp.layer1.weight",)),
    ("OmniGen2", ("time_caption_embed.timestep_embedder.linear_1.bias",)),
    ("Qwen-Image", ("txt_norm.weight", "transformer_blocks.0.attn.norm_added_q.weight")),
    ("Ideogram4", ("embed_image_indicator.weight",)),
    ("Krea2", ("txtfusion.projector.weight",)),
    ("Kandinsky5", ("visual_transformer_blocks.0.cross_attention.key_norm.weight",)),
    ("Ernie", ("layers.0.mlp.linear_fc2.weight",)),
    ("SVD", ("input_blocks.0.0.weight", "input_blocks.1.0.time_stack.in_layers.0.weight")),
    ("SDXL", ("input_blocks.0.0.weight", "label_emb.0.0.weight")),
    ("SD1/SD2", ("input_blocks.0.0.weight",)),
)


def family_of(names: Container[str]) -> str | None:
    """The family of the model whose tensors have these names, with or without a prefix; None if it is not known."""
    for prefix in ("", *PREFIXES):
        for family, signature in _SIGNATURES:
            if all(prefix + name in names for name in signature):
                return family
    return None
