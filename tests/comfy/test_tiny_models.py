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
}
LORA_KINDS = ("lora", "loha", "lokr", "glora", "oft", "boft", "diff", "set")
UNETS = ("sd15", "sdxl")


def largest_difference(one: Any, other: Any) -> float:
    return (one - other).abs().max().item()


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
    assert latent.shape == (1, *tiny_models.FAMILIES[family].latent)
    assert torch.isfinite(latent).all()
    assert 0.3 < latent.std() < 5
    other = it.sample(positive=tiny_models.conditioning(family, 3))
    assert largest_difference(latent, other) > 1e-3


@pytest.mark.parametrize("family", EXPECTED)
def test_rows_one_by_one_give_the_same_latent(tiny: Callable[..., Any], plain_convolutions: None, family: str) -> None:
    it = tiny(family)
    # A UNet predicts noise: from the full noise (standard deviation 15) float32 rounding alone exceeds 1e-5.
    more = {"denoise": 0.3} if family in UNETS else {}
    together = it.sample(cfg=4.0, batch=2, **more)
    apart = it.sample(evaluate_rows_one_by_one(it.model), cfg=4.0, batch=2, **more)
    assert largest_difference(together, apart) <= 1e-5


@pytest.mark.parametrize("kind", LORA_KINDS)
@pytest.mark.parametrize("family", ["flux", "wan", "sd15", "sdxl"])
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
