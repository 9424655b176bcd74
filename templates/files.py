"""The model files of the templates: the names that people have, where each goes, and where ComfyUI's own point to."""

from __future__ import annotations

from dataclasses import dataclass

_HUB = "https://huggingface.co"


@dataclass(frozen=True)
class ModelFile:
    """A file in models/<folder>; `page` is its address below Hugging Face."""

    folder: str
    page: str

    @property
    def name(self) -> str:
        return self.page.rpartition("/")[2]

    @property
    def url(self) -> str:
        return f"{_HUB}/{self.page}"


def _split(repository: str, folder: str, name: str) -> ModelFile:
    return ModelFile(folder, f"Comfy-Org/{repository}/resolve/main/split_files/{folder}/{name}")


def _encoder(name: str) -> ModelFile:
    return ModelFile("text_encoders", f"comfyanonymous/flux_text_encoders/resolve/main/{name}")


FLUX_DEV = ModelFile("diffusion_models", "Comfy-Org/flux1-dev/resolve/main/flux1-dev.safetensors")
FLUX_SCHNELL = ModelFile("diffusion_models", "Comfy-Org/flux1-schnell/resolve/main/flux1-schnell.safetensors")
CLIP_L = _encoder("clip_l.safetensors")
T5XXL = _encoder("t5xxl_fp16.safetensors")
T5XXL_FP8 = _encoder("t5xxl_fp8_e4m3fn_scaled.safetensors")
FLUX_VAE = _split("Lumina_Image_2.0_Repackaged", "vae", "ae.safetensors")

FLUX2_DEV = _split("flux2-dev", "diffusion_models", "flux2_dev_fp8mixed.safetensors")
MISTRAL = _split("flux2-dev", "text_encoders", "mistral_3_small_flux2_fp8.safetensors")
FLUX2_VAE = _split("flux2-dev", "vae", "flux2-vae.safetensors")

SDXL = ModelFile("checkpoints", "stabilityai/stable-diffusion-xl-base-1.0/resolve/main/sd_xl_base_1.0.safetensors")
SD35_LARGE = ModelFile(
    "checkpoints", "Comfy-Org/stable-diffusion-3.5-fp8/resolve/main/sd3.5_large_fp8_scaled.safetensors"
)
SD35_BLUR = _split(
    "stable-diffusion-3.5-controlnets_ComfyUI_repackaged", "controlnet", "sd3.5_large_controlnet_blur.safetensors"
)

QWEN_IMAGE = _split("Qwen-Image_ComfyUI", "diffusion_models", "qwen_image_fp8_e4m3fn.safetensors")
QWEN_VL = _split("Qwen-Image_ComfyUI", "text_encoders", "qwen_2.5_vl_7b_fp8_scaled.safetensors")
QWEN_VAE = _split("Qwen-Image_ComfyUI", "vae", "qwen_image_vae.safetensors")
QWEN_LIGHTNING = ModelFile(
    "loras", "lightx2v/Qwen-Image-Lightning/resolve/main/Qwen-Image-Lightning-8steps-V1.0.safetensors"
)

Z_IMAGE_TURBO = _split("z_image_turbo", "diffusion_models", "z_image_turbo_bf16.safetensors")
QWEN3_4B = _split("z_image_turbo", "text_encoders", "qwen_3_4b.safetensors")
Z_IMAGE_VAE = _split("z_image_turbo", "vae", "ae.safetensors")

CHROMA = _split("Chroma1-HD_repackaged", "diffusion_models", "Chroma1-HD-fp8mixed.safetensors")

WAN21_T2V = _split("Wan_2.1_ComfyUI_repackaged", "diffusion_models", "wan2.1_t2v_14B_bf16.safetensors")
UMT5 = _split("Wan_2.1_ComfyUI_repackaged", "text_encoders", "umt5_xxl_fp8_e4m3fn_scaled.safetensors")
WAN21_VAE = _split("Wan_2.1_ComfyUI_repackaged", "vae", "wan_2.1_vae.safetensors")
WAN22_VAE = _split("Wan_2.2_ComfyUI_Repackaged", "vae", "wan_2.1_vae.safetensors")


def wan22(task: str, noise: str) -> ModelFile:
    """One of the two experts of Wan 2.2 14B: task "t2v" or "i2v", noise "high" or "low"."""
    name = f"wan2.2_{task}_{noise}_noise_14B_fp8_scaled.safetensors"
    return _split("Wan_2.2_ComfyUI_Repackaged", "diffusion_models", name)


HUNYUAN_VIDEO = _split("HunyuanVideo_repackaged", "diffusion_models", "hunyuan_video_t2v_720p_bf16.safetensors")
LLAVA = _split("HunyuanVideo_repackaged", "text_encoders", "llava_llama3_fp8_scaled.safetensors")
HUNYUAN_VAE = _split("HunyuanVideo_repackaged", "vae", "hunyuan_video_vae_bf16.safetensors")

LTX2 = ModelFile("checkpoints", "Lightricks/LTX-2/resolve/main/ltx-2-19b-dev-fp8.safetensors")
GEMMA3 = _split("ltx-2", "text_encoders", "gemma_3_12B_it_fp4_mixed.safetensors")
