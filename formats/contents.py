"""What a file holds when that is no diffusion model: a LoRA, a text encoder, a VAE, …; told by names of its tensors.

The names are those by which ComfyUI tells them apart (comfy/sd.py, controlnet.py, clip_vision.py, weight_adapter).
Diffusion models are the business of families.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """name: in reports; title: "the file is a <title>"; use: what to do with it, and what a split has to do with it."""

    name: str
    title: str
    use: str

    def problem(self, file: str) -> str:
        """What to tell somebody who takes the file for a diffusion model."""
        return f"{file} is a {self.title}, not a diffusion model. {self.use}"


_HERE = "It runs on the machine that runs ComfyUI."
CONTENTS = {
    content.name: content
    for content in (
        Content("lora", "LoRA", "Load it with a LoRA loader; workers are sent it with the model that it changes."),
        Content("text_encoder", "text encoder", f"Load it with a CLIP loader. {_HERE}"),
        Content("vision_encoder", "vision encoder", f"Load it with Load CLIP Vision. {_HERE}"),
        Content("vae", "VAE", f"Load it with Load VAE. {_HERE}"),
        Content("controlnet", "ControlNet", f"Load it with Load ControlNet Model. {_HERE}"),
    )
}

# A ControlNet holds a copy of parts of its diffusion model, so these are looked for before any family is.
_CONTROLNET = (
    "controlnet_blocks.0.weight",
    "controlnet_cond_embedding.conv_in.weight",
    "input_hint_block.0.weight",
    "control_model.input_hint_block.0.weight",
    "after_proj_list.18.bias",
    "lora_controlnet",
)
_LORA_PREFIXES = ("lora_", "lokr_", "hada_")
_LORA_PARTS = frozenset({"alpha", "dora_scale", "diff", "diff_b", "oft_blocks", "a1", "a2", "b1", "b2"})
_TEXT_ENCODER = (
    "text_model.encoder.layers.0.mlp.fc1.weight",  # CLIP
    "model.encoder.layers.0.mixer.Wqkv.weight",  # Jina CLIP
    "encoder.block.0.layer.0.SelfAttention.k.weight",  # T5
    "model.encoder.layers.0.pre_self_attn_layernorm.weight",  # T5Gemma
    "model.layers.0.post_attention_layernorm.weight",  # Llama, Qwen, Gemma, Mistral
    "model.language_model.layers.0.input_layernorm.weight",  # Qwen 3.5, Qwen-VL
    "layers.0.self_attn.sinks",  # GPT-OSS
)
_VISION_ENCODER = (
    "vision_model.encoder.layers.0.layer_norm1.weight",
    "visual.transformer.resblocks.0.attn.in_proj_weight",
    "encoder.layer.0.layer_scale2.lambda1",  # DINOv2
)
_VAE = (
    "decoder.conv_in.weight",
    "decoder.conv_in.conv.weight",
    "decoder.up_blocks.0.resnets.0.norm1.weight",
    "decoder.up_blocks.0.res_blocks.0.conv1.conv.weight",
    "decoder.middle.0.residual.0.gamma",  # Wan, Qwen-Image
    "decoder.unpatcher3d.wavelets",  # Cosmos
    "decoder.layers.1.layers.0.beta",  # Stable Audio
    "decoder.transformer_blocks.0.scale1",  # MiniMax H3
    "taesd_decoder.1.weight",
)


def content_of(names: Collection[str], family: str | None) -> Content | None:
    """What a file with these tensors holds in place of a diffusion model; None if it holds one, or who knows what.

    `family`: the architecture that its names were taken for.
    """
    if any(name in names for name in _CONTROLNET):
        return CONTENTS["controlnet"]
    if family is not None:
        return None
    if 2 * sum(map(_is_of_lora, names)) > len(names):
        return CONTENTS["lora"]
    for content, marks in (("vae", _VAE), ("text_encoder", _TEXT_ENCODER), ("vision_encoder", _VISION_ENCODER)):
        if any(mark in names for mark in marks):
            return CONTENTS[content]
    return None


def _is_of_lora(name: str) -> bool:
    # lora_A.weight, lora_B, lora_up.weight, lora.up.weight, to_q_lora.down.weight, lokr_w1_a, hada_w2_b, alpha, …
    if "lora." in name or "lora_linear_layer" in name:
        return True
    part = name.removesuffix(".weight").removesuffix(".default").rpartition(".")[2]
    return part.startswith(_LORA_PREFIXES) or part in _LORA_PARTS
