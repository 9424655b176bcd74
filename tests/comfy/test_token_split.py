"""Token splits between real ComfyUI processes give the stock sampler's latent for every family, engine and LoRA."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from monarch_split.distributed import plan

SAME = 1e-5

pytestmark = [pytest.mark.comfyui, pytest.mark.timeout(180)]


def assert_same(driver: Any, it: Any, model: Any = None, expected: Any = None, **sampling: Any) -> None:
    """Every step but the first, which proves the worker, is split by tokens, and the latent is the stock one."""
    sampling = {"cfg": 1.0, "steps": 2, **sampling}
    expected = it.sample(model, **sampling) if expected is None else expected
    latent = it.sample(driver.split(model or it.model, "tokens"), **sampling)
    driver.assert_split("tokens")
    assert driver.report.forwards_split >= driver.report.forwards - 1, driver.report.line()
    for one, other in zip(tensors(latent), tensors(expected), strict=True):
        assert (one - other).abs().max().item() <= SAME


def tensors(latent: Any) -> list[torch.Tensor]:
    return list(latent.unbind()) if getattr(latent, "is_nested", False) else [latent]


# Of the forward that proves the workers, and of the steps after it.
HALVES, TWO = (0.5, 0.5), ((0.37, 0.63), (0.1, 0.9))
THIRDS, THREE = (1 / 3, 1 / 3, 1 / 3), ((0.25, 0.35, 0.4), (0.1, 0.2, 0.7))

FAMILIES = [
    *("flux", "flux_schnell", "flux2", "chroma", "sd3", "sd35_medium", "qwen_image", "lumina2", "z_image", "krea2"),
    *(
        "wan",
        "wan_i2v",
        "wan22_5b",
        "wan_vace",
        "wan_camera",
        "wan_scail",
        "wan_scail2",
        "hunyuan_video",
        "hunyuan_video15",
        "ltxv",
        "ltxav",
        "kandinsky5",
        "ideogram4",
    ),
    *("minimax_h3", "hidream", "cosmos_predict2"),
]
# Each is split in a way of its own.
KINDS = ["flux", "wan", "z_image", "ltxav", "kandinsky5", "minimax_h3"]


@pytest.fixture(scope="module")
def third_worker(start_worker: Callable[..., Any]) -> Iterator[Any]:
    with start_worker(name="third") as worker:
        yield worker


@pytest.fixture
def shares(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """shares(*parts) has the split forwards that follow give these parts to the machines, whatever their pace."""

    def follow(*parts: tuple[float, ...]) -> None:
        coming = iter(parts)
        monkeypatch.setattr(plan, "fractions", lambda costs, nodes: next(coming))

    return follow


def assert_same_over(engine: str, driver: Any, it: Any, expected: Any, **sampling: Any) -> None:
    driver.configuration.write_text(
        driver.configuration.read_text().partition("exchange")[0] + f'exchange = "{engine}"\n'
    )
    assert_same(driver, it, expected=expected, **sampling)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_single_row_at_cfg_1_at_any_shares_over_either_engine(
    driver: Any, tiny: Callable[..., Any], shares: Callable[..., None], family: str
) -> None:
    it = tiny(family, tokens=7)
    # The first sigma of Cosmos amplifies rounding.
    sampling = {"cfg": 1.0, "steps": 3, **({"denoise": 0.3} if family == "cosmos_predict2" else {})}
    expected = it.sample(**sampling)
    for engine in ("lanes", "gloo"):
        # What was proven over one engine is computed over the other from the first step.
        shares(HALVES, *TWO)
        assert_same_over(engine, driver, it, expected, **sampling)
        assert driver.report.tokens == {"this machine": 0.1, "second": 0.9}


@pytest.mark.parametrize("family", KINDS)
def test_three_machines(
    driver: Any,
    shared_worker: Any,
    third_worker: Any,
    tiny: Callable[..., Any],
    shares: Callable[..., None],
    family: str,
) -> None:
    driver.use(shared_worker.address, third_worker.address)
    it = tiny(family, tokens=7)
    expected = it.sample(cfg=1.0, steps=3)
    for engine in ("lanes", "gloo"):
        shares(THIRDS, *THREE)
        assert_same_over(engine, driver, it, expected, cfg=1.0, steps=3)
        assert driver.report.tokens == {"this machine": 0.1, "second": 0.2, "third": 0.7}


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


def test_a_worker_lost_in_the_middle_costs_one_forward(
    idle_driver: Any, start_worker: Callable[..., Any], tiny: Callable[..., Any]
) -> None:
    it = tiny("flux", scale="deep")
    expected = it.sample(cfg=1.0, steps=8)
    with start_worker(name="mortal") as worker:
        idle_driver.use(worker.address)

        def callback(step: int, *_: Any) -> None:
            if step == 3:
                worker.kill()

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
