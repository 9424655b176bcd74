"""The templates that make images: one function each, with the settings of the model's own template in ComfyUI."""

from __future__ import annotations

from . import files
from .graph import Column, Node, Output, Space, Workflow
from .notes import BATCH, PROMPTS, TOKENS, note

SEED = 20260822
BUTTERFLY = (
    "a monarch butterfly on a thistle, macro photograph, morning dew, shallow depth of field, soft light, every scale "
    "of its wings sharp"
)
BAD = "blurry, lowres, watermark, text, oversaturated"
# A link from the loader at the left to the sampler at the right passes above the prompts.
PASSAGE = Space(40)


def prompts(clip: Node | Output, positive: str = BUTTERFLY, negative: str = BAD) -> tuple[Node, Node]:
    return (
        Node("CLIPTextEncode", positive, clip=clip, title="Positive prompt"),
        Node("CLIPTextEncode", negative, clip=clip, title="Negative prompt"),
    )


def monarch_sampler(
    steps: int, cfg: float, sampler: str, scheduler: str, *, control: str = "randomize", split: str = "auto",
    title: str | None = None, **links: Node | Output,
) -> Node:  # fmt: skip
    return Node("MonarchSampler", SEED, control, steps, cfg, sampler, scheduler, 1.0, split, title=title, **links)


def _picture(name: str, samples: Node | Output, vae: Node | Output) -> Column:
    image = Node("VAEDecode", samples=samples, vae=vae)
    return Column("Picture", image, Node("SaveImage", f"monarch/{name}", images=image))


def _flux_loaders(model: files.ModelFile) -> tuple[Node, Node, Node]:
    return (
        Node("UNETLoader", model, "default"),
        Node("DualCLIPLoader", files.CLIP_L, files.T5XXL, "flux", "default"),
        Node("VAELoader", files.FLUX_VAE),
    )


def flux_dev() -> Workflow:
    model, clip, vae = _flux_loaders(files.FLUX_DEV)
    text = Node("CLIPTextEncode", BUTTERFLY, clip=clip, title="Prompt")
    guided = Node("FluxGuidance", 3.5, conditioning=text)
    nothing = Node("ConditioningZeroOut", conditioning=text)
    size = Node("EmptySD3LatentImage", 1024, 1024, 2, title="Two images")
    sampler = monarch_sampler(
        20, 1.0, "euler", "simple", model=model, positive=guided, negative=nothing, latent_image=size
    )
    listed = [files.FLUX_DEV, files.CLIP_L, files.T5XXL, files.FLUX_VAE]
    return Workflow(
        "flux_dev",
        note("Flux dev: two images at once", BATCH, listed, measured=True),
        [
            Column("Models", model, clip),
            Column("Prompt and size", PASSAGE, text, guided, nothing, size),
            Column("Sampling on two machines", sampler, vae),
            _picture("flux_dev", sampler, vae),
        ],
    )


def flux_schnell() -> Workflow:
    model, clip, vae = _flux_loaders(files.FLUX_SCHNELL)
    text = Node("CLIPTextEncode", BUTTERFLY, clip=clip, title="Prompt")
    nothing = Node("ConditioningZeroOut", conditioning=text)
    size = Node("EmptySD3LatentImage", 1024, 1024, 2, title="Two images")
    sampler = monarch_sampler(
        4, 1.0, "euler", "simple", model=model, positive=text, negative=nothing, latent_image=size
    )
    listed = [files.FLUX_SCHNELL, files.CLIP_L, files.T5XXL, files.FLUX_VAE]
    more = "Text encoder and VAE are not split. With four steps they are a larger part of the whole than with twenty."
    return Workflow(
        "flux_schnell",
        note("Flux schnell: two images at once", BATCH, listed, more=more),
        [
            Column("Models", model, clip),
            Column("Prompt and size", PASSAGE, text, nothing, size),
            Column("Sampling on two machines", sampler, vae),
            _picture("flux_schnell", sampler, vae),
        ],
    )


def flux2_dev() -> Workflow:
    model, vae = Node("UNETLoader", files.FLUX2_DEV, "default"), Node("VAELoader", files.FLUX2_VAE)
    clip = Node("CLIPLoader", files.MISTRAL, "flux2", "default")
    split = Node("MonarchSplit", "auto", model=model)
    text = Node("CLIPTextEncode", BUTTERFLY, clip=clip, title="Prompt")
    guided = Node("FluxGuidance", 4.0, conditioning=text)
    size = Node("EmptyFlux2LatentImage", 1024, 1024, 2, title="Two images")
    noise = Node("RandomNoise", SEED, "randomize")
    guider = Node("BasicGuider", model=split, conditioning=guided)
    method = Node("KSamplerSelect", "euler")
    sigmas = Node("Flux2Scheduler", 20, 1024, 1024)
    sampler = Node(
        "SamplerCustomAdvanced", noise=noise, guider=guider, sampler=method, sigmas=sigmas, latent_image=size
    )
    listed = [files.FLUX2_DEV, files.MISTRAL, files.FLUX2_VAE]
    more = "Flux2 has a scheduler of its own, so **Monarch Split** on the model's line takes the place of a sampler."
    return Workflow(
        "flux2_dev",
        note("Flux2 dev: two images at once", BATCH, listed, more=more, node=True),
        [
            Column("Models", model, clip),
            Column("Prompt and size", split, text, guided, size),
            Column("Settings of the sampler", noise, guider, method, sigmas),
            Column("Sampling on two machines", sampler, vae),
            _picture("flux2_dev", sampler, vae),
        ],
    )


def sdxl() -> Workflow:
    loader = Node("CheckpointLoaderSimple", files.SDXL)
    positive, negative = prompts(loader[1])
    size = Node("EmptyLatentImage", 1024, 1024, 1)
    sampler = monarch_sampler(
        25, 7.0, "dpmpp_2m", "karras", model=loader, positive=positive, negative=negative, latent_image=size
    )
    return Workflow(
        "sdxl",
        note("SDXL: one image on two machines", PROMPTS, [files.SDXL]),
        [
            Column("Model", loader),
            Column("Prompts and size", PASSAGE, positive, negative, size),
            Column("Sampling on two machines", sampler),
            _picture("sdxl", sampler, loader[2]),
        ],
    )


def sd35() -> Workflow:
    loader = Node("CheckpointLoaderSimple", files.SD35_LARGE)
    positive, negative = prompts(loader[1])
    size = Node("EmptySD3LatentImage", 1024, 1024, 1)
    sampler = monarch_sampler(
        20, 4.0, "euler", "sgm_uniform", model=loader, positive=positive, negative=negative, latent_image=size
    )
    more = "The file holds the text encoders and the VAE, too."
    return Workflow(
        "sd3.5",
        note("SD3.5 large: one image on two machines", PROMPTS, [files.SD35_LARGE], more=more),
        [
            Column("Model", loader),
            Column("Prompts and size", PASSAGE, positive, negative, size),
            Column("Sampling on two machines", sampler),
            _picture("sd3.5", sampler, loader[2]),
        ],
    )


def _qwen_loaders() -> tuple[Node, Node, Node]:
    return (
        Node("UNETLoader", files.QWEN_IMAGE, "default"),
        Node("CLIPLoader", files.QWEN_VL, "qwen_image", "default"),
        Node("VAELoader", files.QWEN_VAE),
    )


def qwen_image() -> Workflow:
    model, clip, vae = _qwen_loaders()
    shifted = Node("ModelSamplingAuraFlow", 3.1, model=model)
    positive, negative = prompts(clip)
    size = Node("EmptySD3LatentImage", 1328, 1328, 1)
    sampler = monarch_sampler(
        20, 4.0, "euler", "simple", model=shifted, positive=positive, negative=negative, latent_image=size
    )
    listed = [files.QWEN_IMAGE, files.QWEN_VL, files.QWEN_VAE]
    return Workflow(
        "qwen_image",
        note("Qwen-Image: one image on two machines", PROMPTS, listed),
        [
            Column("Models", model, clip),
            Column("Prompts and size", shifted, positive, negative, size),
            Column("Sampling on two machines", sampler, vae),
            _picture("qwen_image", sampler, vae),
        ],
    )


def with_lora() -> Workflow:
    model, clip, vae = _qwen_loaders()
    lora = Node("LoraLoaderModelOnly", files.QWEN_LIGHTNING, 1.0, model=model)
    shifted = Node("ModelSamplingAuraFlow", 3.1, model=lora)
    text = Node("CLIPTextEncode", BUTTERFLY, clip=clip, title="Prompt")
    nothing = Node("ConditioningZeroOut", conditioning=text)
    size = Node("EmptySD3LatentImage", 1328, 1328, 2, title="Two images")
    sampler = monarch_sampler(
        8, 1.0, "euler", "simple", model=shifted, positive=text, negative=nothing, latent_image=size
    )
    listed = [files.QWEN_IMAGE, files.QWEN_LIGHTNING, files.QWEN_VL, files.QWEN_VAE]
    more = (
        "A **LoRA** stays where it is: the worker gets its weights and applies them to its own copy of the model. Any "
        "number of them will do, before or after other model nodes."
    )
    return Workflow(
        "with_lora",
        note("With a LoRA: Qwen-Image in eight steps", BATCH, listed, more=more),
        [
            Column("Models", model, clip),
            Column("LoRA", lora),
            Column("Prompt and size", shifted, text, nothing, size),
            Column("Sampling on two machines", sampler, vae),
            _picture("with_lora", sampler, vae),
        ],
    )


def with_controlnet() -> Workflow:
    loader = Node("CheckpointLoaderSimple", files.SD35_LARGE)
    control = Node("ControlNetLoader", files.SD35_BLUR)
    picture = Node("LoadImage", "example.png", "image", title="Picture to follow")
    positive, negative = prompts(
        loader[1], "a glass bottle with a galaxy inside, on a wooden table, mountains behind, photograph"
    )
    scaled = Node("ImageScale", "bilinear", 1024, 1024, "center", image=picture)
    size = Node("EmptySD3LatentImage", 1024, 1024, 1)
    applied = Node(
        "ControlNetApplyAdvanced", 0.8, 0.0, 1.0, positive=positive, negative=negative, control_net=control,
        image=scaled, vae=loader[2],
    )  # fmt: skip
    sampler = monarch_sampler(
        30, 4.0, "euler", "simple", model=loader, positive=applied, negative=applied[1], latent_image=size
    )
    more = (
        "The **ControlNet** runs on this machine, and the worker is sent what it says. This one follows the colours "
        "and shapes of a blurred or small picture; one for edges or depth goes in the same place, behind its "
        "preprocessor."
    )
    return Workflow(
        "with_controlnet",
        note("With a ControlNet: SD3.5 large", PROMPTS, [files.SD35_LARGE, files.SD35_BLUR], more=more),
        [
            Column("Models and picture", loader, control, picture),
            Column("Prompts and size", PASSAGE, positive, negative, scaled, size),
            Column("ControlNet", PASSAGE, applied),
            Column("Sampling on two machines", sampler),
            _picture("with_controlnet", sampler, loader[2]),
        ],
    )


def z_image_turbo() -> Workflow:
    model, vae = Node("UNETLoader", files.Z_IMAGE_TURBO, "default"), Node("VAELoader", files.Z_IMAGE_VAE)
    clip = Node("CLIPLoader", files.QWEN3_4B, "lumina2", "default")
    shifted = Node("ModelSamplingAuraFlow", 3.0, model=model)
    text = Node("CLIPTextEncode", BUTTERFLY, clip=clip, title="Prompt")
    nothing = Node("ConditioningZeroOut", conditioning=text)
    size = Node("EmptySD3LatentImage", 1024, 1024, 2, title="Two images")
    sampler = monarch_sampler(
        8, 1.0, "res_multistep", "simple", model=shifted, positive=text, negative=nothing, latent_image=size
    )
    listed = [files.Z_IMAGE_TURBO, files.QWEN3_4B, files.Z_IMAGE_VAE]
    return Workflow(
        "z_image_turbo",
        note("Z-Image Turbo: two images at once", BATCH, listed),
        [
            Column("Models", model, clip),
            Column("Prompt and size", shifted, text, nothing, size),
            Column("Sampling on two machines", sampler, vae),
            _picture("z_image_turbo", sampler, vae),
        ],
    )


def chroma() -> Workflow:
    model, vae = Node("UNETLoader", files.CHROMA, "default"), Node("VAELoader", files.FLUX_VAE)
    clip = Node("CLIPLoader", files.T5XXL_FP8, "chroma", "default")
    padded = Node("T5TokenizerOptions", 0, 0, clip=clip)
    shifted = Node("ModelSamplingAuraFlow", 1.0, model=model)
    positive, negative = prompts(padded)
    size = Node("EmptySD3LatentImage", 1024, 1024, 1)
    sampler = monarch_sampler(
        26, 3.5, "euler", "beta", model=shifted, positive=positive, negative=negative, latent_image=size
    )
    listed = [files.CHROMA, files.T5XXL_FP8, files.FLUX_VAE]
    return Workflow(
        "chroma",
        note("Chroma: one image on two machines", PROMPTS, listed),
        [
            Column("Models", model, clip, padded),
            Column("Prompts and size", shifted, positive, negative, size),
            Column("Sampling on two machines", sampler, vae),
            _picture("chroma", sampler, vae),
        ],
    )


def with_sampler_custom_advanced() -> Workflow:
    model, clip, vae = _flux_loaders(files.FLUX_DEV)
    split = Node("MonarchSplit", "auto", model=model)
    text = Node("CLIPTextEncode", BUTTERFLY, clip=clip, title="Prompt")
    guided = Node("FluxGuidance", 3.5, conditioning=text)
    size = Node("EmptySD3LatentImage", 1024, 1024, 1)
    noise = Node("RandomNoise", SEED, "randomize")
    guider = Node("BasicGuider", model=split, conditioning=guided)
    method = Node("KSamplerSelect", "euler")
    sigmas = Node("BasicScheduler", "simple", 20, 1.0, model=split)
    sampler = Node(
        "SamplerCustomAdvanced", noise=noise, guider=guider, sampler=method, sigmas=sigmas, latent_image=size
    )
    listed = [files.FLUX_DEV, files.CLIP_L, files.T5XXL, files.FLUX_VAE]
    more = (
        "**Monarch Split** on the model's line is all that is added to a graph with SamplerCustomAdvanced; any guider, "
        "sampler and scheduler will do."
    )
    return Workflow(
        "with_sampler_custom_advanced",
        note(
            "Any sampler, through Monarch Split: Flux dev",
            TOKENS.format(thing="image"),
            listed,
            more=more,
            node=True,
            measured=True,
        ),
        [
            Column("Models", model, clip),
            Column("Split, prompt and size", split, text, guided, size),
            Column("Settings of the sampler", noise, guider, method, sigmas),
            Column("Sampling on two machines", sampler, vae),
            _picture("with_sampler_custom_advanced", sampler, vae),
        ],
    )


def compare() -> Workflow:
    loader = Node("CheckpointLoaderSimple", files.SDXL)
    positive, negative = prompts(loader[1])
    size = Node("EmptyLatentImage", 1024, 1024, 1)
    links = {"model": loader, "positive": positive, "negative": negative, "latent_image": size}
    settings = (25, 7.0, "dpmpp_2m", "karras")
    one = monarch_sampler(*settings, control="fixed", split="off", title="On one machine", **links)
    two = monarch_sampler(*settings, control="fixed", split="rows", title="On two machines", **links)
    decoded = [Node("VAEDecode", samples=sampler, vae=loader[2]) for sampler in (one, two)]
    more = "Both samplers have the **same seed**. The same picture comes twice, once from each of them."
    closing = (
        "To compare, run it twice with different seeds (the same in both samplers): the second run has no loading in "
        "it. **On two machines** shows the seconds per step and the speed-up; ComfyUI's log shows the time of **On one "
        "machine** beside its progress bar. The two pictures are the same up to rounding."
    )
    return Workflow(
        "compare_one_and_two_machines",
        note("One and two machines side by side: SDXL", PROMPTS, [files.SDXL], more=more, closing=closing),
        [
            Column("Model", loader),
            Column("Prompts and size", PASSAGE, positive, negative, size),
            Column("The same sampling twice", one, two),
            Column("Decoding", decoded[0], Space(288), decoded[1]),
            Column(
                "The same picture twice",
                Node("SaveImage", "monarch/one_machine", images=decoded[0], title="From one machine"),
                Node("SaveImage", "monarch/two_machines", images=decoded[1], title="From two machines"),
            ),
        ],
    )


IMAGES = (
    flux_dev, flux_schnell, flux2_dev, sdxl, sd35, qwen_image, z_image_turbo, chroma, with_lora, with_controlnet,
    with_sampler_custom_advanced, compare,
)  # fmt: skip
