"""The templates that make videos: one function each, with the settings of the model's own template in ComfyUI."""

from __future__ import annotations

from . import files
from .graph import Column, Node, Output, Space, Workflow
from .images import PASSAGE, SEED, monarch_sampler, prompts
from .notes import PROMPTS, TOKENS, note

_FLIGHT = (
    "A swarm of monarch butterflies lifts off from a pine forest at sunrise, the camera glides slowly between the "
    "trees, volumetric light, cinematic"
)
_BAD = "still image, overexposed, blurry, low quality, jpeg artifacts, subtitles, watermark, deformed"


def _video(name: str, fps: float, samples: Node | Output, vae: Node | Output) -> tuple[Column, Column]:
    images = Node("VAEDecode", samples=samples, vae=vae)
    video = Node("CreateVideo", fps, images=images)
    saved = Node("SaveVideo", f"monarch/{name}", "auto", "auto", video=video)
    return Column("Decoding", images, video), Column("Video", saved)


def wan21_text_to_video() -> Workflow:
    model, vae = Node("UNETLoader", files.WAN21_T2V, "default"), Node("VAELoader", files.WAN21_VAE)
    clip = Node("CLIPLoader", files.UMT5, "wan", "default")
    shifted = Node("ModelSamplingSD3", 8.0, model=model)
    positive, negative = prompts(clip, _FLIGHT, _BAD)
    size = Node("EmptyHunyuanLatentVideo", 832, 480, 81, 1, title="Five seconds at 16 per second")
    sampler = monarch_sampler(
        30, 6.0, "uni_pc", "simple", model=shifted, positive=positive, negative=negative, latent_image=size
    )
    listed = [files.WAN21_T2V, files.UMT5, files.WAN21_VAE]
    more = "For a quick try set `length` to 33."
    return Workflow(
        "wan_2.1_text_to_video",
        note("Wan 2.1 14B: one video on two machines", PROMPTS, listed, more=more, measured=True),
        [
            Column("Models", model, clip),
            Column("Prompts and size", shifted, positive, negative, size),
            Column("Sampling on two machines", sampler, vae),
            *_video("wan", 16.0, sampler, vae),
        ],
    )


_STAGES = (
    "Wan 2.2 is two models: one for the first half of the steps, one for the rest. **Monarch Split** stands on both "
    "lines, and the worker holds both models if its memory allows. For a quick try set `length` to 33."
)


def _experts(task: str) -> tuple[list[files.ModelFile], list[Node], list[Node]]:
    """Files, loaders and split models of the experts for much and for little noise."""
    listed = [files.wan22(task, noise) for noise in ("high", "low")]
    titles = ("Model for the first steps", "Model for the last steps")
    loaders = [Node("UNETLoader", file, "default", title=title) for file, title in zip(listed, titles, strict=True)]
    shifted = [Node("ModelSamplingSD3", 5.0, model=loader) for loader in loaders]
    return listed, [*loaders, *shifted], [Node("MonarchSplit", "auto", model=model) for model in shifted]


def _two_stages(
    first: Node, last: Node, positive: Node | Output, negative: Node | Output, latent: Node | Output
) -> tuple[Node, Node]:
    """Ten steps of twenty with each model; the noise comes with the first, and is passed on."""
    begun = Node(
        "KSamplerAdvanced", "enable", SEED, "randomize", 20, 3.5, "euler", "simple", 0, 10, "enable",
        title="First steps", model=first, positive=positive, negative=negative, latent_image=latent,
    )  # fmt: skip
    ended = Node(
        "KSamplerAdvanced", "disable", 0, "fixed", 20, 3.5, "euler", "simple", 10, 10000, "disable",
        title="Last steps", model=last, positive=positive, negative=negative, latent_image=begun,
    )  # fmt: skip
    return begun, ended


def wan22_text_to_video() -> Workflow:
    listed, (high, low, high_shift, low_shift), (first, last) = _experts("t2v")
    clip, vae = Node("CLIPLoader", files.UMT5, "wan", "default"), Node("VAELoader", files.WAN22_VAE)
    positive, negative = prompts(clip, _FLIGHT, _BAD)
    size = Node("EmptyHunyuanLatentVideo", 640, 640, 81, 1, title="Five seconds at 16 per second")
    begun, ended = _two_stages(first, last, positive, negative, size)
    return Workflow(
        "wan_2.2_text_to_video",
        note(
            "Wan 2.2 14B: text to video on two machines",
            PROMPTS,
            [*listed, files.UMT5, files.WAN22_VAE],
            more=_STAGES,
            node=True,
        ),
        [
            Column("Models", high, low, clip),
            Column("Prompts", high_shift, low_shift, positive, negative),
            Column("Split and size", first, last, size),
            Column("Sampling on two machines", begun, ended, vae),
            *_video("wan22", 16.0, ended, vae),
        ],
    )


def wan22_image_to_video() -> Workflow:
    listed, (high, low, high_shift, low_shift), (first, last) = _experts("i2v")
    clip, vae = Node("CLIPLoader", files.UMT5, "wan", "default"), Node("VAELoader", files.WAN22_VAE)
    start = Node("LoadImage", "example.png", "image", title="First frame")
    positive, negative = prompts(clip, "The camera moves slowly around the scene, soft light, gentle motion", _BAD)
    conditioned = Node(
        "WanImageToVideo", 640, 640, 81, 1, positive=positive, negative=negative, vae=vae, start_image=start,
        title="Five seconds at 16 per second",
    )  # fmt: skip
    begun, ended = _two_stages(first, last, conditioned, conditioned[1], conditioned[2])
    return Workflow(
        "wan_2.2_image_to_video",
        note(
            "Wan 2.2 14B: image to video on two machines",
            PROMPTS,
            [*listed, files.UMT5, files.WAN22_VAE],
            more=_STAGES,
            node=True,
        ),
        [
            Column("Models and first frame", high, low, clip, vae, start),
            Column("Prompts", high_shift, low_shift, positive, negative),
            Column("Split and size", first, last, conditioned),
            Column("Sampling on two machines", begun, ended),
            *_video("wan22_i2v", 16.0, ended, vae),
        ],
    )


def hunyuan_video() -> Workflow:
    model, vae = Node("UNETLoader", files.HUNYUAN_VIDEO, "default"), Node("VAELoader", files.HUNYUAN_VAE)
    clip = Node("DualCLIPLoader", files.CLIP_L, files.LLAVA, "hunyuan_video", "default")
    shifted = Node("ModelSamplingSD3", 7.0, model=model)
    text = Node("CLIPTextEncode", _FLIGHT, clip=clip, title="Prompt")
    guided = Node("FluxGuidance", 6.0, conditioning=text)
    nothing = Node("ConditioningZeroOut", conditioning=text)
    size = Node("EmptyHunyuanLatentVideo", 848, 480, 73, 1, title="Three seconds at 24 per second")
    sampler = monarch_sampler(
        20, 1.0, "euler", "simple", model=shifted, positive=guided, negative=nothing, latent_image=size
    )
    listed = [files.HUNYUAN_VIDEO, files.CLIP_L, files.LLAVA, files.HUNYUAN_VAE]
    return Workflow(
        "hunyuan_video",
        note("HunyuanVideo: one video on two machines", TOKENS.format(thing="video"), listed),
        [
            Column("Models", model, clip),
            Column("Prompt and size", shifted, text, guided, nothing, size),
            Column("Sampling on two machines", sampler, vae),
            *_video("hunyuan_video", 24.0, sampler, vae),
        ],
    )


def ltx2() -> Workflow:
    loader = Node("CheckpointLoaderSimple", files.LTX2)
    clip = Node("LTXAVTextEncoderLoader", files.GEMMA3, files.LTX2, "default")
    audio_vae = Node("LTXVAudioVAELoader", files.LTX2)
    positive, negative = prompts(
        clip,
        "A swarm of monarch butterflies lifts off from a pine forest at sunrise. The rustling of thousands of wings, "
        "birds far away. The camera glides slowly between the trees.",
        "blurry, low quality, still frame, watermark, overlay, titles, subtitles",
    )
    split = Node("MonarchSplit", "auto", model=loader)
    rated = Node("LTXVConditioning", 25.0, positive=positive, negative=negative)
    picture = Node("EmptyLTXVLatentVideo", 768, 512, 97, 1, title="Four seconds at 25 per second")
    sound = Node("LTXVEmptyLatentAudio", 97, 25, 1, audio_vae=audio_vae, title="Their sound")
    both = Node("LTXVConcatAVLatent", video_latent=picture, audio_latent=sound)
    guider = Node("CFGGuider", 4.0, model=split, positive=rated, negative=rated[1])
    noise = Node("RandomNoise", SEED, "randomize")
    method = Node("KSamplerSelect", "euler")
    sigmas = Node("LTXVScheduler", 20, 2.05, 0.95, True, 0.1, latent=both)
    sampler = Node(
        "SamplerCustomAdvanced", noise=noise, guider=guider, sampler=method, sigmas=sigmas, latent_image=both
    )
    apart = Node("LTXVSeparateAVLatent", av_latent=sampler)
    images = Node("VAEDecode", samples=apart, vae=loader[2])
    heard = Node("LTXVAudioVAEDecode", samples=apart[1], audio_vae=audio_vae)
    video = Node("CreateVideo", 25.0, images=images, audio=heard)
    more = "Length and frame rate stand in two nodes each, for picture and sound: change both."
    return Workflow(
        "ltx_2",
        note("LTX-2: one video with sound on two machines", PROMPTS, [files.LTX2, files.GEMMA3], more=more, node=True),
        [
            Column("Models", loader, clip, audio_vae),
            Column("Prompts", PASSAGE, positive, negative),
            Column("Split and size", split, rated, picture, sound),
            Column("Settings of the sampler", guider, noise, method, both, sigmas),
            Column("Sampling on two machines", Space(60), sampler, apart),
            Column("Decoding", images, heard, video),
            Column("Video", Node("SaveVideo", "monarch/ltx_2", "auto", "auto", video=video)),
        ],
    )


VIDEOS = (wan21_text_to_video, wan22_text_to_video, wan22_image_to_video, hunyuan_video, ltx2)
