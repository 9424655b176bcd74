"""The table of tiny model families: what each takes as latent and conditioning, and its usual CFG.

Sizes of the models are in tiny_configs; writing files is tiny_models' job. Standard library only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import tiny_configs
from .tiny_configs import SCALES, Scale

__all__ = ["FAMILIES", "SCALES", "Family", "Scale"]


@dataclass(frozen=True)
class Family:
    """One model family. Lengths are latent cells and tokens; 0 or () means "this family takes none of it".

    class_path: module and class of the diffusion model in ComfyUI. config: Scale -> keyword arguments of that class.
    latent: shape of one default latent without the batch, [C, H, W] or [C, T, H, W]. audio: the same of its sound,
    [C, ...] with the time at audio_time. llama: layers and width of conditioning_llama3. vision: tokens and width
    of the CLIP vision output. Graphs know neither these three nor a family whose empty_node is "".
    empty_node: stock node for an empty latent; downscale: pixels per latent cell; frames: latent T of a length L
    is (L - 1) // frames + 1. output_gain: factor on the weights of the output layer, which keeps latents near 1.
    override: class in comfy.supported_models that only family_override gives these sizes.
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
    audio: tuple[int, ...] = ()
    audio_time: int = 0
    llama: tuple[int, ...] = ()
    vision: tuple[int, ...] = ()
    empty_node: str = "EmptySD3LatentImage"
    downscale: int = 8
    frames: int = 0
    output_layer: str = "final_layer.linear.weight"
    output_gain: float = 0.08
    override: str = ""

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
_WAN = ("comfy.ldm.wan.model", "WanModel")
_LUMINA = ("comfy.ldm.lumina.model", "NextDiT")

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
            _WAN,
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
        ),
        Family("sd35_medium", _SD3, lambda s: tiny_configs.sd3(s, 3, 2), (16, 8, 8), 48, pooled=32, output_gain=0.5),
        Family(
            "wan_i2v",
            _WAN,
            lambda s: tiny_configs.wan(s, model_type="i2v", in_dim=36, num_layers=3 * s.depth),
            (16, 3, 8, 8),
            4096,
            vision=(257, 1280),
            empty_node="EmptyHunyuanLatentVideo",
            frames=4,
            output_layer="head.head.weight",
            output_gain=0.5,
        ),
        Family(
            "wan22_5b",
            _WAN,
            lambda s: tiny_configs.wan(s, in_dim=48, out_dim=48, num_layers=3 * s.depth),
            (48, 3, 8, 8),
            4096,
            empty_node="",
            downscale=16,
            frames=4,
            output_layer="head.head.weight",
            output_gain=0.5,
        ),
        Family(
            "wan_vace",
            ("comfy.ldm.wan.model", "VaceWanModel"),
            lambda s: tiny_configs.wan(s, model_type="vace", vace_layers=2 * s.depth, vace_in_dim=96),
            (16, 3, 8, 8),
            4096,
            empty_node="EmptyHunyuanLatentVideo",
            frames=4,
            output_layer="head.head.weight",
            output_gain=0.5,
        ),
        Family(
            "wan_camera",
            ("comfy.ldm.wan.model", "CameraWanModel"),
            lambda s: tiny_configs.wan(s, model_type="camera", in_dim=32),
            (16, 3, 8, 8),
            4096,
            vision=(257, 1280),
            empty_node="EmptyHunyuanLatentVideo",
            frames=4,
            output_layer="head.head.weight",
            output_gain=0.5,
        ),
        Family(
            "wan_scail",
            ("comfy.ldm.wan.model", "SCAILWanModel"),
            lambda s: tiny_configs.wan(s, model_type="scail", in_dim=20),
            (16, 3, 8, 8),
            4096,
            vision=(257, 1280),
            empty_node="EmptyHunyuanLatentVideo",
            frames=4,
            output_layer="head.head.weight",
            output_gain=0.5,
        ),
        Family(
            "wan_scail2",
            ("comfy.ldm.wan.model", "SCAIL2WanModel"),
            lambda s: tiny_configs.wan(s, model_type="scail2", in_dim=20),
            (16, 3, 8, 8),
            4096,
            vision=(257, 1280),
            empty_node="EmptyHunyuanLatentVideo",
            frames=4,
            output_layer="head.head.weight",
            output_gain=0.5,
        ),
        Family(
            "qwen_image",
            ("comfy.ldm.qwen_image.model", "QwenImageTransformer2DModel"),
            tiny_configs.qwen_image,
            (16, 1, 8, 8),
            48,
            output_layer="proj_out.weight",
            output_gain=0.5,
            override="QwenImage",
        ),
        Family("lumina2", _LUMINA, tiny_configs.lumina2, (16, 8, 8), 32, output_gain=0.5, override="Lumina2"),
        Family("z_image", _LUMINA, tiny_configs.z_image, (16, 8, 8), 32, cfg=1.0, output_gain=0.5, override="ZImage"),
        Family(
            "hunyuan_video15",
            _HUNYUAN,
            tiny_configs.hunyuan_video15,
            (32, 3, 4, 4),
            32,
            pooled=32,
            vision=(6, 40),
            empty_node="EmptyHunyuanVideo15Latent",
            downscale=16,
            frames=4,
            output_gain=0.5,
            override="HunyuanVideo15",
        ),
        Family(
            "ltxav",
            ("comfy.ldm.lightricks.av_model", "LTXAVModel"),
            tiny_configs.ltxav,
            (128, 2, 4, 4),
            96,
            attention_mask=True,
            frame_rate=25,
            audio=(8, 7, 16),
            audio_time=1,
            empty_node="",
            downscale=32,
            frames=8,
            output_layer="proj_out.weight",
            output_gain=0.5,
            override="LTXAV",
        ),
        Family(
            "chroma",
            ("comfy.ldm.chroma.model", "Chroma"),
            tiny_configs.chroma,
            (16, 8, 8),
            32,
            output_gain=0.5,
            override="Chroma",
        ),
        Family(
            "krea2",
            ("comfy.ldm.krea2.model", "SingleStreamDiT"),
            tiny_configs.krea2,
            (16, 1, 8, 8),
            80,
            cfg=1.0,
            output_layer="last.linear.weight",
            output_gain=0.25,
            override="Krea2",
        ),
        Family(
            "hidream",
            ("comfy.ldm.hidream.model", "HiDreamImageTransformer2DModel"),
            tiny_configs.hidream,
            (16, 8, 8),
            48,
            pooled=32,
            llama=(4, 40),
            output_gain=0.5,
            override="HiDream",
        ),
        Family(
            "cosmos_predict2",
            ("comfy.ldm.cosmos.predict2", "MiniTrainDIT"),
            tiny_configs.cosmos_predict2,
            (16, 2, 8, 8),
            48,
            empty_node="EmptyCosmosLatentVideo",
            frames=8,
            output_gain=0.08,
            override="CosmosT2IPredict2",
        ),
        Family(
            "kandinsky5",
            ("comfy.ldm.kandinsky5.model", "Kandinsky5"),
            tiny_configs.kandinsky5,
            (16, 2, 8, 8),
            48,
            pooled=32,
            empty_node="EmptyHunyuanLatentVideo",
            frames=4,
            output_layer="out_layer.out_layer.weight",
            output_gain=0.5,
            override="Kandinsky5",
        ),
        Family(
            "ideogram4",
            ("comfy.ldm.ideogram4.model", "Ideogram4Transformer2DModel"),
            tiny_configs.ideogram4,
            (128, 4, 4),
            48,
            empty_node="EmptyFlux2LatentImage",
            downscale=16,
            output_gain=0.5,
            override="Ideogram4",
        ),
        Family(
            "minimax_h3",
            ("comfy.ldm.minimax.model", "MiniMaxH3Model"),
            tiny_configs.minimax_h3,
            (24, 2, 8, 8),
            48,
            cfg=1.0,
            audio=(32, 2, 7),
            audio_time=2,
            empty_node="",
            downscale=16,
            frames=4,
            output_layer="final_layer.video_out.weight",
            output_gain=0.5,
        ),
    )
}
