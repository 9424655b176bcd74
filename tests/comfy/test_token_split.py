"""Token splits between real ComfyUI processes give the stock sampler's latent for every family, engine and LoRA."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

SAME = 1e-5

pytestmark = [pytest.mark.comfyui, pytest.mark.timeout(180)]


def assert_same(driver: Any, it: Any, model: Any = None, **sampling: Any) -> None:
    """Every step but the first, which proves the worker, is split by tokens, and the latent is the stock one."""
    sampling = {"cfg": 1.0, "steps": 2, **sampling}
    expected = it.sample(model, **sampling)
    latent = it.sample(driver.split(model or it.model, "tokens"), **sampling)
    driver.assert_split("tokens")
    assert driver.report.forwards_split >= driver.report.forwards - 1, driver.report.line()
    for one, other in zip(tensors(latent), tensors(expected), strict=True):
        assert (one - other).abs().max().item() <= SAME


def tensors(latent: Any) -> list[torch.Tensor]:
    return list(latent.unbind()) if getattr(latent, "is_nested", False) else [latent]


FAMILIES = [
    *("flux", "flux_schnell", "flux2", "chroma", "sd3", "sd35_medium", "qwen_image", "lumina2", "z_image", "krea2"),
    *("wan", "wan_i2v", "wan22_5b", "hunyuan_video", "hunyuan_video15", "ltxv", "ltxav", "kandinsky5", "ideogram4"),
    *("minimax_h3", "hidream"),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_single_row_at_cfg_1(driver: Any, tiny: Callable[..., Any], family: str) -> None:
    assert_same(driver, tiny(family, tokens=7))


def test_a_family_whose_first_sigma_amplifies_rounding(driver: Any, tiny: Callable[..., Any]) -> None:
    assert_same(driver, tiny("cosmos_predict2", tokens=7), denoise=0.3)


@pytest.mark.parametrize(("batch", "cfg"), [(1, 4.0), (3, 1.0), (2, 4.0)])
def test_batches_and_guidance_split_by_tokens(driver: Any, tiny: Callable[..., Any], batch: int, cfg: float) -> None:
    assert_same(driver, tiny("flux_schnell", tokens=5), batch=batch, cfg=cfg)


@pytest.mark.parametrize("family", ["flux", "wan"])
def test_with_lora(driver: Any, tiny: Callable[..., Any], tmp_path: Path, family: str) -> None:
    import comfy.sd
    import comfy.utils

    from monarch_split.demo import tiny_loras

    it = tiny(family)
    weights = comfy.utils.load_torch_file(str(tiny_loras.write_lora(family, tmp_path)))
    patched, _ = comfy.sd.load_lora_for_models(it.model, None, weights, 1.0, 0)
    without = it.sample(cfg=1.0)
    assert (it.sample(patched, cfg=1.0) - without).abs().max().item() > 1e-3
    assert_same(driver, it, patched)


def test_two_workers(
    driver: Any, start_worker: Callable[..., Any], shared_worker: Any, tiny: Callable[..., Any]
) -> None:
    with start_worker(name="third") as third:
        driver.use(shared_worker.address, third.address)
        for family in ("flux", "wan"):
            assert_same(driver, tiny(family, tokens=7))
            assert set(driver.report.tokens) == {"this machine", "second", "third"}


@pytest.mark.parametrize("family", ["flux", "wan"])
def test_over_gloo(driver: Any, tiny: Callable[..., Any], family: str) -> None:
    text = driver.configuration.read_text()
    driver.configuration.write_text(text + 'exchange = "gloo"\n')
    assert_same(driver, tiny(family, tokens=7))


def test_other_code_in_the_forward_keeps_it_on_one_machine(driver: Any, tiny: Callable[..., Any]) -> None:
    it = tiny("flux")
    patched = it.model.clone()
    patched.set_model_attn1_patch(lambda q, k, v, **_: {"q": q * 1.01, "k": k, "v": v})
    expected = it.sample(patched, cfg=1.0)
    latent = it.sample(driver.split(patched, "tokens"), cfg=1.0)
    assert torch.equal(latent, expected)
    assert driver.report.forwards_split == 0
    assert "a patch runs inside the forward" in driver.report.line()


def test_a_family_that_is_not_known_runs_on_one_machine_with_the_reason(driver: Any, tiny: Callable[..., Any]) -> None:
    it = tiny("sd15")
    latent = it.sample(driver.split(it.model, "tokens"), cfg=1.0)
    assert torch.equal(latent, it.sample(cfg=1.0))
    assert "the tokens of UNetModel cannot be split" in driver.report.line()


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_a_worker_lost_in_the_middle_costs_one_forward(
    idle_driver: Any, start_worker: Callable[..., Any], tiny: Callable[..., Any], how: str
) -> None:
    it = tiny("flux", scale="deep")
    expected = it.sample(cfg=1.0, steps=8)
    with start_worker(name="mortal") as worker:
        idle_driver.use(worker.address)

        def callback(step: int, *_: Any) -> None:
            if step == 3:
                getattr(worker, how)()

        began = time.monotonic()
        latent = it.sample(idle_driver.split(it.model, "tokens"), cfg=1.0, steps=8, callback=callback)
        assert time.monotonic() - began < 60
    assert (latent - expected).abs().max().item() <= SAME
    assert 1 <= idle_driver.report.forwards_split < 8
    assert "mortal" in idle_driver.report.line()


def test_an_interrupt_reaches_both_sides_and_the_next_prompt_is_right(driver: Any, tiny: Callable[..., Any]) -> None:
    import comfy.model_management as model_management

    it = tiny("flux", scale="deep")
    steps: list[int] = []

    def callback(step: int, *_: Any) -> None:
        steps.append(step)
        if step == 3:
            model_management.interrupt_current_processing()

    with pytest.raises(model_management.InterruptProcessingException):
        it.sample(driver.split(it.model, "tokens"), cfg=1.0, steps=50, callback=callback)
    assert steps[-1] <= 5
    assert_same(driver, it)
