"""Cases of test_token_families for image models and HunyuanVideo: Flux, Chroma, Qwen-Image, Lumina, Z-Image and SD3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .token_ranks import Case


def _residuals(tokens: int, width: int, **blocks: int) -> Callable[[Any, dict[str, Any]], None]:
    """A ControlNet's residuals [B, tokens, width] for so many blocks of each list; of several, the first has none."""

    def add(_: Any, kwargs: dict[str, Any]) -> None:
        import torch

        generator = torch.Generator().manual_seed(5)
        control: dict[str, list[Any]] = {"input": [], "middle": [], "output": []}
        for name, count in blocks.items():
            shape = (kwargs["context"].shape[0], tokens, width)
            control[name] = [torch.randn(shape, generator=generator) for _ in range(count)]
            if count > 1:
                control[name][0] = None
        kwargs["control"] = control

    return add


def _style_mask(tokens: int, height: int, width: int) -> Callable[[dict[str, Any]], None]:
    """A mask [1, L, L] over text and image (height x width tokens), as Apply Style Model makes it, all of it random."""

    def add(options: dict[str, Any]) -> None:
        import torch

        length = tokens + height * width
        options["attention_mask"] = torch.randn(1, length, length, generator=torch.Generator().manual_seed(6)) * 3
        options["attention_mask_img_shape"] = (height, width)

    return add


def _option(**values: Any) -> Callable[[dict[str, Any]], None]:
    """Plain options of the conditioning."""
    return lambda options: options.update(values)


def _reference_frame(options: dict[str, Any]) -> None:
    """HunyuanVideo: a latent whose tokens go in front of the video's."""
    import torch

    options["ref_latent"] = torch.randn(1, 16, 1, 6, 10, generator=torch.Generator().manual_seed(7))


def _text_references(options: dict[str, Any]) -> None:
    """Z-Image omni: a caption for the reference, and one more behind the prompt's own."""
    import torch

    generator = torch.Generator().manual_seed(8)
    options["reference_latents_text_embeds"] = [torch.randn(1, length, 32, generator=generator) for length in (5, 3)]


def _references(method: str | None, *sizes: tuple[int, ...]) -> dict[str, Any]:
    return {"references": sizes, "reference_method": method}


# Latents of 7 x 9 cells have 4 x 5 tokens where patches are 2 x 2, those of 2 x 26 the prime number 13.
_TWO = ((5, 7), (9, 4))
_REF = ("ref_latents",)
_METHOD = ("ref_latents", "ref_latents_method")

_FLUX = [
    Case("flux", "prime-1-token", (2, 26), tokens=1),
    Case("flux", "odd-2-tokens", (7, 9), tokens=2),
    Case("flux", "batch", (7, 9), batch=2),
    Case("flux", "kontext-default", (7, 9), conditioning=_references(None, (5, 7)), matters=_REF),
    Case("flux", "kontext-index", (7, 9), conditioning=_references("index", *_TWO), matters=_METHOD),
    Case("flux", "kontext-offset", (7, 9), conditioning=_references("offset", *_TWO), matters=_REF),
    Case("flux", "kontext-uxo", (7, 9), batch=2, conditioning=_references("uxo", *_TWO), matters=_METHOD),
    Case("flux", "style-mask", (7, 9), more=_style_mask(9, 4, 5), matters=("attention_mask",)),
    Case("flux", "control", (7, 9), batch=2, change=_residuals(20, 256, input=2, output=2), matters=("control",)),
    Case(
        "flux",
        "kontext-control",
        (7, 9),
        conditioning=_references("index", *_TWO),
        change=_residuals(20, 256, input=1, output=3),
        matters=("control", "ref_latents"),
    ),
    Case("flux2", "prime", (1, 13)),
    Case("flux2", "references", (3, 5), batch=2, conditioning=_references("index", (2, 3), (3, 2)), matters=_REF),
    Case(
        "flux2",
        "timestep-zero-control",
        (3, 5),
        conditioning=_references("index_timestep_zero", (2, 3), (3, 2)),
        change=_residuals(15, 256, input=2, output=2),
        matters=("control", *_METHOD),
    ),
    Case("chroma", "prime-1-token", (2, 26), tokens=1),
    Case("chroma", "odd-control", (7, 9), change=_residuals(20, 96, input=2, output=3), matters=("control",)),
    Case("chroma", "batch-mask", (7, 9), batch=2, more=_style_mask(9, 4, 5), matters=("attention_mask",)),
]

_HUNYUAN = [
    Case("hunyuan_video", "odd-batch", (3, 6, 10), batch=2),
    Case("hunyuan_video", "prime-1-token", (1, 2, 26), tokens=1),
    Case("hunyuan_video", "mask", (3, 6, 10), conditioning={"masked": 4}, matters=("attention_mask",)),
    Case(
        "hunyuan_video",
        "first-frame",
        (3, 6, 10),
        more=_option(guiding_frame_index=0),
        matters=("guiding_frame_index",),
    ),
    Case("hunyuan_video", "first-frame-2-tokens", (2, 2, 26), tokens=2, more=_option(guiding_frame_index=0)),
    Case("hunyuan_video", "reference", (3, 6, 10), more=_reference_frame, matters=("ref_latent",)),
    Case(
        "hunyuan_video",
        "reference-control",
        (2, 6, 10),
        more=_reference_frame,
        change=_residuals(45, 256, input=2, output=2),
        matters=("control",),
    ),
    Case("hunyuan_video15", "vision-batch", (3, 3, 5), batch=2, matters=("clip_fea",)),
    Case("hunyuan_video15", "prime-1-token", (1, 1, 13), tokens=1),
    Case(
        "hunyuan_video15",
        "first-frame-control",
        (3, 3, 5),
        more=_option(guiding_frame_index=0),
        change=_residuals(45, 96, input=3),
        matters=("guiding_frame_index", "control"),
    ),
]

_QWEN = [
    Case("qwen_image", "prime-1-token", (2, 26), tokens=1),
    Case("qwen_image", "odd-2-tokens", (7, 9), tokens=2),
    Case("qwen_image", "mask", (7, 9), batch=2, conditioning={"masked": 4}, matters=("attention_mask",)),
    Case("qwen_image", "mask-3-tokens", (7, 9), tokens=3, conditioning={"masked": 1}, matters=("attention_mask",)),
    Case("qwen_image", "edit-index", (7, 9), batch=2, conditioning=_references("index", *_TWO), matters=_REF),
    Case("qwen_image", "edit-negative", (7, 9), conditioning=_references("negative_index", *_TWO), matters=_METHOD),
    Case("qwen_image", "edit-offset", (7, 9), conditioning=_references("offset", *_TWO), matters=_METHOD),
    Case(
        "qwen_image",
        "edit-timestep-zero-mask-control",
        (7, 9),
        batch=2,
        conditioning={**_references("index_timestep_zero", *_TWO), "masked": 4},
        change=_residuals(20, 96, input=3),
        matters=("attention_mask", "control", *_METHOD),
    ),
]

_LUMINA = [
    Case("lumina2", "odd-batch", (7, 9), batch=2),
    Case("lumina2", "prime-1-token", (2, 26), tokens=1),
    Case("lumina2", "mask-2-tokens", (7, 9), tokens=2, conditioning={"masked": 1}),
    Case("z_image", "odd-batch", (7, 9), batch=2),
    Case("z_image", "prime-1-token", (2, 26), tokens=1),
    Case("z_image", "omni", (7, 9), batch=2, conditioning=_references(None, (6, 8), (10, 4)), matters=_REF),
    Case(
        "z_image",
        "omni-captions",
        (7, 9),
        conditioning=_references(None, (6, 8)),
        more=_text_references,
        matters=("ref_latents", "ref_contexts"),
    ),
]

_SD3 = [
    Case("sd3", "prime-1-token", (2, 26), tokens=1),
    Case("sd3", "odd-2-tokens", (7, 9), tokens=2),
    Case("sd3", "control-batch", (7, 9), batch=2, change=_residuals(20, 128, output=2), matters=("control",)),
    Case("sd35_medium", "prime-1-token", (2, 26), tokens=1),
    Case("sd35_medium", "control-batch", (7, 9), batch=2, change=_residuals(20, 192, output=3), matters=("control",)),
]

CASES = [*_FLUX, *_HUNYUAN, *_QWEN, *_LUMINA, *_SD3]
