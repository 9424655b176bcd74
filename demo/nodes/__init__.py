"""Helper nodes of the demo and the tests: random conditioning, a latent as file and picture, a log of the steps.

A pack of its own for custom_nodes of a test server; it imports nothing of Monarch, and Monarch registers none of it."""

from __future__ import annotations

import json
import os
import time

import torch

CATEGORY = "monarch/demo"
FRAME_RATE_NONE = 0


def random_conditioning(
    seed: int,
    tokens: int,
    width: int,
    *,
    pooled: int = 0,
    guidance: float = 0.0,
    attention_mask: bool = False,
    frame_rate: int = FRAME_RATE_NONE,
) -> list:
    """A ComfyUI CONDITIONING of one entry with a random context [1, tokens, width], the same for the same arguments.

    `pooled` is the width of pooled_output, 0 for none; `guidance` and `frame_rate` of 0 are left out.
    """
    generator = torch.Generator().manual_seed(seed)
    context = torch.randn(1, tokens, width, generator=generator)
    extra: dict = {}
    if pooled:
        extra["pooled_output"] = torch.randn(1, pooled, generator=generator)
    if guidance:
        extra["guidance"] = guidance
    if attention_mask:
        extra["attention_mask"] = torch.ones(1, tokens, dtype=torch.long)
    if frame_rate:
        extra["frame_rate"] = frame_rate
    return [[context, extra]]


def latent_to_rgb(latent: torch.Tensor, scale: int = 8) -> torch.Tensor:
    """Pictures [N, H * scale, W * scale, 3] in 0..1 of a latent [B, C, H, W] or [B, C, T, H, W] (then N = B * T).

    A fixed random projection of the channels stands in for a VAE; each picture is normalised by itself.
    Raises ValueError for a latent with NaN or infinity, which would otherwise pass as a black picture.
    """
    if not torch.isfinite(latent).all():
        raise ValueError("the latent holds NaN or infinity, so there is no picture of it")
    if latent.ndim == 5:
        latent = latent.movedim(2, 1).flatten(0, 1)
    latent = latent.detach().to(device="cpu", dtype=torch.float32)
    projection = torch.randn(latent.shape[1], 3, generator=torch.Generator().manual_seed(0))
    rgb = torch.einsum("bchw,cd->bdhw", latent, projection)
    rgb = torch.nn.functional.interpolate(rgb, scale_factor=scale, mode="bicubic", align_corners=False)
    spread = rgb.std(dim=(1, 2, 3), keepdim=True).clamp_min(1e-6)
    rgb = (rgb - rgb.mean(dim=(2, 3), keepdim=True)) / (4 * spread) + 0.5
    return rgb.clamp(0, 1).movedim(1, -1)


class RandomConditioning:
    """CONDITIONING without a text encoder; see random_conditioning."""

    CATEGORY = CATEGORY
    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "make"

    @classmethod
    def INPUT_TYPES(cls) -> dict:
        return {
            "required": {
                "seed": ("INT", {"default": 0, "min": 0, "max": 2**31 - 1}),
                "tokens": ("INT", {"default": 8, "min": 1, "max": 4096}),
                "width": ("INT", {"default": 32, "min": 1, "max": 65536}),
                "pooled": ("INT", {"default": 0, "min": 0, "max": 65536}),
                "guidance": ("FLOAT", {"default": 0.0, "min": 0.0, "max": 100.0}),
                "attention_mask": ("BOOLEAN", {"default": False}),
                "frame_rate": ("INT", {"default": FRAME_RATE_NONE, "min": 0, "max": 1000}),
            }
        }

    def make(self, seed, tokens, width, pooled, guidance, attention_mask, frame_rate):
        return (
            random_conditioning(
                seed,
                tokens,
                width,
                pooled=pooled,
                guidance=guidance,
                attention_mask=attention_mask,
                frame_rate=frame_rate,
            ),
        )


class SaveLatentTensor:
    """Save a LATENT's samples as float32 tensor "samples" in a .safetensors file of the output folder."""

    CATEGORY = CATEGORY
    RETURN_TYPES = ()
    FUNCTION = "save"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict:
        return {"required": {"samples": ("LATENT",), "filename_prefix": ("STRING", {"default": "monarch_latent"})}}

    def save(self, samples, filename_prefix):
        import folder_paths
        from safetensors.torch import save_file

        folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(
            filename_prefix, folder_paths.get_output_directory()
        )
        file = f"{name}_{counter:05}_.safetensors"
        tensor = samples["samples"].detach().to(device="cpu", dtype=torch.float32).contiguous()
        save_file({"samples": tensor}, os.path.join(folder, file))
        return {"ui": {"latents": [{"filename": file, "subfolder": subfolder, "type": "output"}]}}


class LatentPicture:
    """IMAGE of a LATENT without a VAE; see latent_to_rgb."""

    CATEGORY = CATEGORY
    RETURN_TYPES = ("IMAGE",)
    FUNCTION = "make"

    @classmethod
    def INPUT_TYPES(cls) -> dict:
        return {
            "required": {"samples": ("LATENT",), "scale": ("INT", {"default": 8, "min": 1, "max": 64})},
        }

    def make(self, samples, scale):
        return (latent_to_rgb(samples["samples"], scale),)


class StepLog:
    """Append one JSON line {"step", "time", "sigma"} per model evaluation to a file in the output folder.

    A callback after guidance, outside the model's forward; `delay` seconds of sleep make a run slow on purpose.
    """

    CATEGORY = CATEGORY
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "attach"

    @classmethod
    def INPUT_TYPES(cls) -> dict:
        return {
            "required": {
                "model": ("MODEL",),
                "file": ("STRING", {"default": "steps.jsonl"}),
                "delay": ("FLOAT", {"default": 0.0, "min": 0.0, "max": 60.0}),
            }
        }

    def attach(self, model, file, delay):
        import folder_paths

        folder = os.path.realpath(folder_paths.get_output_directory())
        path = os.path.realpath(os.path.join(folder, file))
        if os.path.dirname(path) != folder:
            raise ValueError(f"{file!r} is not a plain file name")
        seen = 0

        def after_guidance(args):
            nonlocal seen
            seen += 1
            line = {"step": seen, "time": time.time(), "sigma": float(args["sigma"].flatten()[0])}
            with open(path, "a", encoding="utf-8") as log:
                log.write(json.dumps(line) + "\n")
            if delay:
                time.sleep(delay)
            return args["denoised"]

        model = model.clone()
        model.set_model_sampler_post_cfg_function(after_guidance)
        return (model,)


NODE_CLASS_MAPPINGS = {
    "MonarchDemoConditioning": RandomConditioning,
    "MonarchDemoSaveLatent": SaveLatentTensor,
    "MonarchDemoLatentPicture": LatentPicture,
    "MonarchDemoStepLog": StepLog,
}
NODE_DISPLAY_NAME_MAPPINGS = {
    "MonarchDemoConditioning": "Random Conditioning (Monarch demo)",
    "MonarchDemoSaveLatent": "Save Latent Tensor (Monarch demo)",
    "MonarchDemoLatentPicture": "Latent Picture (Monarch demo)",
    "MonarchDemoStepLog": "Step Log (Monarch demo)",
}
