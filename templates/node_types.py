"""The stock nodes that the templates use: sockets, widgets and outputs in ComfyUI's order, and how much room they take.

tests/comfy/test_example_workflows.py compares each row with a real ComfyUI."""

from __future__ import annotations

from dataclasses import dataclass

TITLE = 30  # a node's title bar lies above its position
_ROW, _WIDGET, _MARGIN = 20, 24, 12
_TEXT, _PREVIEW = 110, 290


@dataclass(frozen=True)
class NodeType:
    """sockets and outputs: "name TYPE", optional sockets "name? TYPE". widgets: names in the order of widgets_values.

    Widgets that ComfyUI 0.8 lacks stay out (bit_depth of CreateVideo), or the graph does not load there. extra: height
    in pixels beyond rows and widgets; width: pixels.
    """

    sockets: tuple[str, ...] = ()
    widgets: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    width: int = 360
    extra: int = 0

    @property
    def height(self) -> int:
        """Pixels below the title bar."""
        rows = max(len(self.sockets), len(self.outputs))
        return _ROW * rows + _WIDGET * len(self.widgets) + _MARGIN + self.extra


_SAMPLED = ("model MODEL", "positive CONDITIONING", "negative CONDITIONING", "latent_image LATENT")
_SEED = ("seed", "control_after_generate")
_CONDITIONINGS = ("positive CONDITIONING", "negative CONDITIONING")
_IMAGE_SIZE = ("width", "height", "batch_size")
_VIDEO_SIZE = ("width", "height", "length", "batch_size")
_ANSWER = 40  # room for the line that a Monarch node shows after a run

NODE_TYPES: dict[str, NodeType] = {
    "BasicGuider": NodeType(("model MODEL", "conditioning CONDITIONING"), (), ("GUIDER GUIDER",), 320),
    "BasicScheduler": NodeType(("model MODEL",), ("scheduler", "steps", "denoise"), ("SIGMAS SIGMAS",), 320),
    "CFGGuider": NodeType(("model MODEL", *_CONDITIONINGS), ("cfg",), ("GUIDER GUIDER",), 320),
    "CheckpointLoaderSimple": NodeType((), ("ckpt_name",), ("MODEL MODEL", "CLIP CLIP", "VAE VAE")),
    "CLIPLoader": NodeType((), ("clip_name", "type", "device"), ("CLIP CLIP",)),
    "CLIPTextEncode": NodeType(("clip CLIP",), ("text",), ("CONDITIONING CONDITIONING",), 400, _TEXT),
    "ConditioningZeroOut": NodeType(("conditioning CONDITIONING",), (), ("CONDITIONING CONDITIONING",), 400),
    "ControlNetApplyAdvanced": NodeType(
        (*_CONDITIONINGS, "control_net CONTROL_NET", "image IMAGE", "vae? VAE"),
        ("strength", "start_percent", "end_percent"),
        _CONDITIONINGS,
        320,
    ),
    "ControlNetLoader": NodeType((), ("control_net_name",), ("CONTROL_NET CONTROL_NET",)),
    "CreateVideo": NodeType(("images IMAGE", "audio? AUDIO"), ("fps",), ("VIDEO VIDEO",), 280, _WIDGET),
    "DualCLIPLoader": NodeType((), ("clip_name1", "clip_name2", "type", "device"), ("CLIP CLIP",)),
    "EmptyFlux2LatentImage": NodeType((), _IMAGE_SIZE, ("LATENT LATENT",), 400),
    "EmptyHunyuanLatentVideo": NodeType((), _VIDEO_SIZE, ("LATENT LATENT",), 400),
    "EmptyLatentImage": NodeType((), _IMAGE_SIZE, ("LATENT LATENT",), 400),
    "EmptyLTXVLatentVideo": NodeType((), _VIDEO_SIZE, ("LATENT LATENT",), 320),
    "EmptySD3LatentImage": NodeType((), _IMAGE_SIZE, ("LATENT LATENT",), 400),
    "Flux2Scheduler": NodeType((), ("steps", "width", "height"), ("SIGMAS SIGMAS",), 320),
    "FluxGuidance": NodeType(("conditioning CONDITIONING",), ("guidance",), ("CONDITIONING CONDITIONING",), 400),
    "ImageScale": NodeType(("image IMAGE",), ("upscale_method", "width", "height", "crop"), ("IMAGE IMAGE",), 400),
    "KSamplerAdvanced": NodeType(
        _SAMPLED,
        (
            "add_noise",
            "noise_seed",
            "control_after_generate",
            "steps",
            "cfg",
            "sampler_name",
            "scheduler",
            "start_at_step",
            "end_at_step",
            "return_with_leftover_noise",
        ),
        ("LATENT LATENT",),
        340,
    ),
    "KSamplerSelect": NodeType((), ("sampler_name",), ("SAMPLER SAMPLER",), 320),
    "LoadImage": NodeType((), ("image", "upload"), ("IMAGE IMAGE", "MASK MASK"), 360, _PREVIEW),
    "LoraLoaderModelOnly": NodeType(("model MODEL",), ("lora_name", "strength_model"), ("MODEL MODEL",)),
    "LTXAVTextEncoderLoader": NodeType((), ("text_encoder", "ckpt_name", "device"), ("CLIP CLIP",)),
    "LTXVAudioVAEDecode": NodeType(("samples LATENT", "audio_vae VAE"), (), ("Audio AUDIO",), 260),
    "LTXVAudioVAELoader": NodeType((), ("ckpt_name",), ("Audio VAE VAE",)),
    "LTXVConcatAVLatent": NodeType(("video_latent LATENT", "audio_latent LATENT"), (), ("latent LATENT",), 320),
    "LTXVConditioning": NodeType(_CONDITIONINGS, ("frame_rate",), _CONDITIONINGS, 320),
    "LTXVEmptyLatentAudio": NodeType(
        ("audio_vae VAE",), ("frames_number", "frame_rate", "batch_size"), ("Latent LATENT",), 320
    ),
    "LTXVScheduler": NodeType(
        ("latent? LATENT",), ("steps", "max_shift", "base_shift", "stretch", "terminal"), ("SIGMAS SIGMAS",), 320
    ),
    "LTXVSeparateAVLatent": NodeType(("av_latent LATENT",), (), ("video_latent LATENT", "audio_latent LATENT"), 260),
    "ModelSamplingAuraFlow": NodeType(("model MODEL",), ("shift",), ("MODEL MODEL",), 400),
    "ModelSamplingSD3": NodeType(("model MODEL",), ("shift",), ("MODEL MODEL",), 400),
    "MonarchSampler": NodeType(
        _SAMPLED,
        (*_SEED, "steps", "cfg", "sampler_name", "scheduler", "denoise", "split"),
        ("LATENT LATENT",),
        340,
        _ANSWER,
    ),
    "MonarchSplit": NodeType(("model MODEL",), ("split",), ("MODEL MODEL",), 320, _ANSWER),
    "RandomNoise": NodeType((), ("noise_seed", "control_after_generate"), ("NOISE NOISE",), 320),
    "SamplerCustomAdvanced": NodeType(
        ("noise NOISE", "guider GUIDER", "sampler SAMPLER", "sigmas SIGMAS", "latent_image LATENT"),
        (),
        ("output LATENT", "denoised_output LATENT"),
        300,
    ),
    "SaveImage": NodeType(("images IMAGE",), ("filename_prefix",), (), 400, _PREVIEW),
    "SaveVideo": NodeType(("video VIDEO",), ("filename_prefix", "format", "codec"), (), 400, _PREVIEW),
    "T5TokenizerOptions": NodeType(("clip CLIP",), ("min_padding", "min_length"), ("CLIP CLIP",)),
    "UNETLoader": NodeType((), ("unet_name", "weight_dtype"), ("MODEL MODEL",)),
    "VAEDecode": NodeType(("samples LATENT", "vae VAE"), (), ("IMAGE IMAGE",), 240),
    "VAELoader": NodeType((), ("vae_name",), ("VAE VAE",), 340),
    "WanImageToVideo": NodeType(
        (*_CONDITIONINGS, "vae VAE", "clip_vision_output? CLIP_VISION_OUTPUT", "start_image? IMAGE"),
        _VIDEO_SIZE,
        (*_CONDITIONINGS, "latent LATENT"),
        320,
    ),
}


def socket(entry: str) -> tuple[str, str, bool]:
    """Name, type and whether it is optional, of an entry of `sockets` or `outputs`."""
    name, _, kind = entry.rpartition(" ")
    return name.removesuffix("?"), kind, name.endswith("?")
