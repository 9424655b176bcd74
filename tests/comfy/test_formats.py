"""Every weight format that ComfyUI reads: split as exactly as any other, with and without LoRA, on one compute path."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_split.tests.comfy.test_model_changes import largest_difference, rows_one_by_one
from monarch_split.tests.worker_process import until

pytestmark = [pytest.mark.comfyui, pytest.mark.timeout(300)]

STEPS = {"cfg": 3.0, "steps": 2}
FORMATS = [
    *["bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "scaled_fp8", "scaled_fp8_dequantised"],
    *["layered_fp8_e4m3", "layered_fp8_e4m3_header", "layered_fp8_e5m2", "mixed"],
    *["nvfp4", "nvfp4_header", "mxfp8", "int8", "int8_rowwise", "int8_convrot", "convrot_w4a4", "asym_w4a8_int8"],
]
# Their layers also round what they are given.
ROUNDED = ["mixed", "int8", "int8_rowwise", "int8_convrot", "convrot_w4a4", "asym_w4a8_int8"]
# What distinguishes the files for ComfyUI, so that a writer that misses its format fails here and not silently passes.
QUANTISED = {
    "scaled_fp8": {"float8_e4m3fn"},
    "scaled_fp8_dequantised": {"float8_e4m3fn"},
    "layered_fp8_e4m3": {"float8_e4m3fn"},
    "layered_fp8_e4m3_header": {"float8_e4m3fn"},
    "layered_fp8_e5m2": {"float8_e5m2"},
    "mixed": {"float8_e4m3fn", "float8_e5m2", "nvfp4", "int8_tensorwise"},
    "nvfp4": {"nvfp4"},
    "nvfp4_header": {"nvfp4"},
    "mxfp8": {"mxfp8"},
    "int8": {"int8_tensorwise"},
    "int8_rowwise": {"int8_tensorwise"},
    "int8_convrot": {"int8_tensorwise"},
    "convrot_w4a4": {"convrot_w4a4"},
    "asym_w4a8_int8": {"asym_w4a8_int8"},
}


@pytest.fixture(autouse=True)
def as_in_a_prompt() -> Iterator[None]:
    """ComfyUI runs nodes in inference mode. Outside of it torch takes the layers behind attention apart for a batch,
    and comfy-kitchen multiplies what is left of them with dequantised weights."""
    import torch

    with torch.inference_mode():
        yield


@pytest.fixture
def quantised(comfy: Any, models_folder: Path, tiny: Callable[..., Any]) -> Callable[..., Any]:
    """quantised(format, **how) -> Tiny of a file in this format; `how` goes to tiny."""
    from monarch_split.demo import tiny_formats

    def load(name: str, **how: Any) -> Any:
        from comfy.quant_ops import QUANT_ALGOS

        unknown = sorted(QUANTISED.get(name, set()) - set(QUANT_ALGOS))
        if unknown:
            pytest.skip(f"this ComfyUI does not know {', '.join(unknown)}")
        it = tiny(tiny_formats.FAMILY, **how)
        it.path = tiny_formats.write_format(name, models_folder)
        it.model = comfy.sd.load_diffusion_model(str(it.path))
        return it

    return load


@pytest.fixture
def lora(comfy: Any, models_folder: Path) -> Callable[..., Any]:
    """lora(model) -> MODEL with a LoRA, as LoraLoaderModelOnly does; `rename` changes its keys."""
    from monarch_split.demo import tiny_formats
    from monarch_split.demo.tiny_loras import write_lora

    def apply(model: Any, rename: Callable[[str], str] = lambda key: key) -> Any:
        weights = comfy.utils.load_torch_file(str(write_lora(tiny_formats.FAMILY, models_folder)))
        weights = {rename(key): tensor for key, tensor in weights.items()}
        return comfy.sd.load_lora_for_models(model, None, weights, 1.0, 0)[0]

    return apply


def layer_formats(model: Any) -> set[str]:
    layers = model.model.diffusion_model.modules()
    return {layer.quant_format for layer in layers if getattr(layer, "quant_format", None)}


def test_every_format_is_written_and_listed() -> None:
    from monarch_split.demo import tiny_formats

    assert list(tiny_formats.FORMATS) == FORMATS


@pytest.mark.parametrize("name", FORMATS)
def test_split_as_on_one_process_with_and_without_lora(
    driver: Any, quantised: Callable[..., Any], lora: Callable[..., Any], name: str
) -> None:
    it = quantised(name)
    assert layer_formats(it.model) == QUANTISED.get(name, set())
    results = []
    for model in (it.model, lora(it.model)):
        results.append(it.sample(model, **STEPS))
        latent = it.sample(driver.split(model), **STEPS)
        driver.assert_split()
        assert largest_difference(latent, results[-1]) <= 1e-5
    assert largest_difference(*results) > 1e-3


@pytest.mark.parametrize("name", ROUNDED)
def test_outside_of_inference_mode_a_split_is_still_what_its_rows_are_one_at_a_time(
    driver: Any, quantised: Callable[..., Any], name: str
) -> None:
    import torch

    with torch.inference_mode(False):
        it = quantised(name)
        expected = it.sample(rows_one_by_one(it.model), **STEPS)
        latent = it.sample(driver.split(it.model), **STEPS)
        driver.assert_split()
        assert largest_difference(latent, expected) <= 1e-5


@pytest.mark.parametrize("name", ["layered_fp8_e5m2", "nvfp4", "int8_rowwise"])
def test_a_model_still_splits_after_its_worker_let_go_of_another(
    driver: Any, quantised: Callable[..., Any], shared_worker: Any, name: str
) -> None:
    it, other = quantised(name), quantised("mxfp8")
    latents = []
    for each in (it, other):
        latents.append(each.sample(driver.split(each.model), **STEPS))
        driver.assert_split()
    told = shared_worker.output.count("Let go of")
    other.model = None
    del each, other
    driver.reports.clear()
    gc.collect()
    until(lambda: shared_worker.output.count("Let go of") > told, "the worker to let go of a model")
    assert largest_difference(it.sample(driver.split(it.model), **STEPS), latents[0]) == 0
    driver.assert_split()


@pytest.mark.parametrize("name", ROUNDED)
def test_formats_that_round_what_they_are_given_split_by_conditionings(
    driver: Any, quantised: Callable[..., Any], name: str
) -> None:
    it = quantised(name, negative_tokens=12)
    expected = it.sample(**STEPS)
    latent = it.sample(driver.split(it.model), **STEPS)
    driver.assert_split("conditionings")
    assert largest_difference(latent, expected) <= 1e-5


@pytest.mark.parametrize("name", ["bf16", "nvfp4"])
def test_a_lora_of_which_no_key_matches_is_named(
    driver: Any, quantised: Callable[..., Any], lora: Callable[..., Any], name: str
) -> None:
    it = quantised(name)
    for model in (
        driver.split(lora(it.model, lambda key: f"other_{key}")),
        lora(driver.split(it.model), lambda key: key.replace("blocks", "stones")),
        lora(lora(driver.split(it.model)), lambda key: f"other_{key}"),
    ):
        it.sample(model, **STEPS)
        assert driver.report.forwards_split > 0
        assert [event for event in driver.report.events if "LoRA has no effect" in event], driver.report.line()
    driver.reports.clear()
    it.sample(lora(driver.split(it.model)), **STEPS)
    driver.assert_split()
