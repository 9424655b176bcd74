"""Proves that what the other tests render with is what it claims: families, conditioning, LoRA kinds, row tolerance."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.comfyui

EXPECTED = {
    "flux": "Flux",
    "flux_schnell": "FluxSchnell",
    "flux2": "Flux2",
    "sd3": "SD3",
    "wan": "WAN21_T2V",
    "hunyuan_video": "HunyuanVideo",
    "ltxv": "LTXV",
    "sd15": "SD15",
    "sdxl": "SDXL",
    "sd35_medium": "SD3",
    "wan_i2v": "WAN21_I2V",
    "wan22_5b": "WAN22_T2V",
    "wan_vace": "WAN21_Vace",
    "wan_camera": "WAN21_Camera",
    "wan_scail": "WAN21_SCAIL",
    "wan_scail2": "WAN21_SCAIL2",
    "qwen_image": "QwenImage",
    "lumina2": "Lumina2",
    "z_image": "ZImage",
    "hunyuan_video15": "HunyuanVideo15",
    "ltxav": "LTXAV",
    "chroma": "Chroma",
    "krea2": "Krea2",
    "hidream": "HiDream",
    "cosmos_predict2": "CosmosT2IPredict2",
    "kandinsky5": "Kandinsky5",
    "ideogram4": "Ideogram4",
    "minimax_h3": "MiniMaxH3",
}
LORA_KINDS = ("lora", "loha", "lokr", "glora", "oft", "boft", "diff", "set")
UNETS = ("sd15", "sdxl")
TRANSFORMERS = [family for family in EXPECTED if family not in UNETS]
# A prime number of tokens, or three frames of an odd one; an odd number of cells where ComfyUI pads them.
ODD_SIZES = {
    **dict.fromkeys(TRANSFORMERS, (2, 25)),
    **dict.fromkeys(("flux2", "ideogram4"), (1, 13)),
    **dict.fromkeys(("ltxv", "ltxav", "hunyuan_video15"), (3, 1, 5)),
    **{family: (3, 2, 9) for family in TRANSFORMERS if family.startswith(("wan", "minimax", "cosmos"))},
    **dict.fromkeys(("hunyuan_video", "kandinsky5", "wan_vace"), (3, 2, 10)),
}


def tensors(latent: Any) -> list[Any]:
    """The tensors of a latent: one, or picture and sound of a NestedTensor."""
    return latent.unbind() if latent.is_nested else [latent]


def largest_difference(one: Any, other: Any) -> float:
    """The largest of a latent; of picture and sound, that of the one that differs less."""
    return min((a - b).abs().max().item() for a, b in zip(tensors(one), tensors(other), strict=True))


def sample_latent(it: Any, latent: Any, *, roll: int = 0, model: Any = None, positive: Any = None, **more: Any) -> Any:
    """Two steps at CFG 1 from `latent`, its noise rolled by so many cells along the width."""
    import comfy.sample
    from comfy.nested_tensor import NestedTensor

    noise = [tensor.clone() for tensor in tensors(comfy.sample.prepare_noise(latent, 0))]
    noise[0] = noise[0].roll(roll, -1)
    return comfy.sample.sample(
        model or it.model,
        NestedTensor(noise) if latent.is_nested else noise[0],
        2,
        1.0,
        "euler",
        "simple",
        positive or it.positive,
        it.negative,
        latent,
        seed=0,
        disable_pbar=True,
        **more,
    )


def evaluate_rows_one_by_one(model: Any) -> Any:
    """A clone of `model` whose diffusion model sees one row at a time: all that a perfect row split would change."""
    import torch

    forward = model.model.diffusion_model.forward

    def by_rows(x: Any, timestep: Any, **arguments: Any) -> Any:
        def row(value: Any, index: int) -> Any:
            is_batched = isinstance(value, torch.Tensor) and value.ndim and value.shape[0] == x.shape[0]
            return value[index : index + 1] if is_batched else value

        rows = range(x.shape[0])
        return torch.cat(
            [forward(row(x, i), row(timestep, i), **{k: row(v, i) for k, v in arguments.items()}) for i in rows]
        )

    model = model.clone()
    model.add_object_patch("diffusion_model.forward", by_rows)
    return model


@pytest.mark.parametrize("family", EXPECTED)
def test_family_is_detected_samples_finite_and_follows_its_conditioning(
    tiny: Callable[..., Any], family: str, caplog: pytest.LogCaptureFixture
) -> None:
    import torch

    from monarch_split.demo import tiny_models

    with caplog.at_level(logging.INFO):
        it = tiny(family)
    assert type(it.model.model.model_config).__name__ == EXPECTED[family]
    assert not [message for message in caplog.messages if "missing" in message or "unexpected" in message]
    latent = it.sample()
    entry = tiny_models.FAMILIES[family]
    assert [tuple(tensor.shape[1:]) for tensor in tensors(latent)] == [
        shape for shape in (entry.latent, entry.audio) if shape
    ]
    for tensor in tensors(latent):
        assert torch.isfinite(tensor).all()
        assert 0.3 < tensor.std() < 5
    other = it.sample(positive=tiny_models.conditioning(family, 3))
    assert largest_difference(latent, other) > 1e-3


@pytest.mark.parametrize("family", [family for family in EXPECTED if family not in ("ltxav", "minimax_h3")])
def test_rows_one_by_one_give_the_same_latent(tiny: Callable[..., Any], plain_convolutions: None, family: str) -> None:
    it = tiny(family)
    # From the full noise (standard deviation 15 or 80) float32 rounding alone exceeds 1e-5.
    more = {"denoise": 0.3} if family in UNETS or family == "cosmos_predict2" else {}
    together = it.sample(cfg=4.0, batch=2, **more)
    apart = it.sample(evaluate_rows_one_by_one(it.model), cfg=4.0, batch=2, **more)
    assert largest_difference(together, apart) <= 1e-5


@pytest.mark.parametrize("family", TRANSFORMERS)
def test_latent_depends_on_every_block_and_token_on_places_and_on_attention(
    comfy: Any, tiny: Callable[..., Any], family: str
) -> None:
    import torch
    from comfy.nested_tensor import NestedTensor

    from monarch_split.demo.tiny_models import conditioning, empty_latent

    it = tiny(family)
    latent = empty_latent(family)
    expected = sample_latent(it, latent)
    for name, blocks in it.model.model.diffusion_model.named_children():
        if isinstance(blocks, torch.nn.ModuleList) and name != "caption_projection":
            assert len(blocks) != 1
            for block in blocks:
                kept = [(weight, weight.data) for weight in block.parameters() if weight.ndim > 1]
                for weight, value in kept:
                    weight.data = value * 1.2
                assert largest_difference(sample_latent(it, latent), expected) > 1e-3, name
                for weight, value in kept:
                    weight.data = value

    for token in (0, -1):
        positive = conditioning(family, 1)
        positive[0][0][:, token] *= -1
        assert largest_difference(sample_latent(it, latent, positive=positive), expected) > 1e-3

    # Without positions a transformer's answer moves with its input.
    rolled = tensors(sample_latent(it, latent, roll=2))
    back = NestedTensor([rolled[0].roll(-2, -1), *rolled[1:]])
    assert largest_difference(back, expected if latent.is_nested else NestedTensor([expected])) > 1e-3

    heads = set()

    def attend_evenly(function: Callable[..., Any], q: Any, k: Any, v: Any, *more: Any, **named: Any) -> Any:
        heads.add(named["heads"] if "heads" in named else more[0])
        return function(q * 0, k, v, *more, **named)

    model = it.model.clone()
    model.model_options["transformer_options"]["optimized_attention_override"] = attend_evenly
    assert largest_difference(sample_latent(it, latent, model=model), expected) > 1e-3
    assert min(heads) >= 2


@pytest.mark.parametrize("family", TRANSFORMERS)
def test_odd_sizes_and_a_prompt_of_one_token_sample_finite(tiny: Callable[..., Any], family: str) -> None:
    import torch

    from monarch_split.demo.tiny_models import empty_latent

    it = tiny(family, tokens=1)
    latent = empty_latent(family, size=ODD_SIZES[family], audio=5)
    sampled = sample_latent(it, latent)
    assert tensors(sampled)[0].shape[-len(ODD_SIZES[family]) :] == ODD_SIZES[family]
    for made, empty in zip(tensors(sampled), tensors(latent), strict=True):
        assert made.shape == empty.shape
        assert torch.isfinite(made).all()


@pytest.mark.parametrize(
    ("family", "method"),
    [
        ("flux", None),
        *((family, method) for family in ("flux2", "qwen_image") for method in (None, "index_timestep_zero")),
        *(("krea2", method) for method in ("index", "index_timestep_zero")),
    ],
)
def test_latent_follows_the_reference_latents(tiny: Callable[..., Any], family: str, method: str | None) -> None:
    from monarch_split.demo.tiny_models import conditioning, empty_latent

    it, latent = tiny(family), empty_latent(family)
    one, two = (
        conditioning(family, 1, references=sizes, reference_method=method) for sizes in ([(6, 4)], [(6, 4), (2, 10)])
    )
    latents = [sample_latent(it, latent, positive=positive) for positive in (it.positive, one, two)]
    assert largest_difference(latents[0], latents[1]) > 1e-3
    assert largest_difference(latents[1], latents[2]) > 1e-3


@pytest.mark.parametrize("family", ["hunyuan_video", "ltxv", "ltxav", "qwen_image", "ideogram4"])
def test_latent_follows_the_attention_mask(tiny: Callable[..., Any], family: str) -> None:
    from monarch_split.demo.tiny_models import conditioning, empty_latent

    it, latent = tiny(family), empty_latent(family)
    masked = sample_latent(it, latent, positive=conditioning(family, 1, masked=3))
    assert largest_difference(masked, sample_latent(it, latent)) > 1e-3


@pytest.mark.parametrize("family", ["ltxv", "wan22_5b", "cosmos_predict2"])
def test_frames_that_are_kept_have_a_time_of_their_own(tiny: Callable[..., Any], family: str) -> None:
    from monarch_split.demo.tiny_models import empty_latent

    it, latent = tiny(family), empty_latent(family)
    times = []
    it.model.model.diffusion_model.register_forward_pre_hook(lambda module, given: times.append(given[1]))
    mask = latent[:, :1] + 1
    mask[:, :, 0] = 0
    sample_latent(it, latent, noise_mask=mask)
    assert all(time.ndim > 1 and len(time.unique()) == 2 for time in times)


def test_a_size_with_too_many_numbers_is_an_error() -> None:
    from monarch_split.demo.tiny_models import empty_latent

    with pytest.raises(ValueError, match="flux has latents like"):
        empty_latent("flux", size=(3, 8, 8))


@pytest.mark.parametrize(
    ("family", "kind"),
    [(family, kind) for family in ("flux", "wan", *UNETS) for kind in LORA_KINDS]
    + [(family, "lora") for family in TRANSFORMERS if family not in ("flux", "wan")],
)
def test_lora_kind_is_recognised_and_changes_the_latent(
    comfy: Any, tiny: Callable[..., Any], tmp_path: Path, family: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    from monarch_split.demo.tiny_loras import lora_layers, write_lora

    it = tiny(family)
    lora = comfy.utils.load_torch_file(str(write_lora(family, tmp_path, kind)))
    patched, _ = comfy.sd.load_lora_for_models(it.model, None, lora, 1.0, 0)
    assert set(patched.patches) == {f"diffusion_model.{layer}.weight" for layer in lora_layers(family)}
    value = next(iter(patched.patches.values()))[0][1]
    assert (value[0] if isinstance(value, tuple) else value.name) == kind
    assert largest_difference(it.sample(patched, cfg=3.0), tiny(family).sample(cfg=3.0)) > 1e-3
    # The adapters log what goes wrong and leave the weight as it was.
    assert not [message for message in caplog.messages if "ERROR" in message or "not loaded" in message]


def test_lora_with_missing_keys_is_warned_about(
    comfy: Any, tiny: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from monarch_split.demo.tiny_loras import write_lora

    lora = comfy.utils.load_torch_file(str(write_lora("flux", tmp_path, missing_keys=2)))
    comfy.sd.load_lora_for_models(tiny("flux").model, None, lora, 1.0, 0)
    assert sum("lora key not loaded" in message for message in caplog.messages) == 2


def test_a_file_is_written_once_for_one_configuration(comfy: Any, tmp_path: Path) -> None:
    from monarch_split.demo.tiny_models import write_model

    first = write_model("flux", tmp_path)
    written = first.stat().st_mtime_ns
    assert write_model("flux", tmp_path) == first
    assert first.stat().st_mtime_ns == written
    assert write_model("flux", tmp_path, seed=1).stat().st_mtime_ns != written
    assert [path.name for path in tmp_path.iterdir()] == ["flux.safetensors"]
