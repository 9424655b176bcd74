"""A split render gives the latent of the stock sampler: every family, guidance, batch, sampler and prompt length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("plain_convolutions")]

FAMILIES = ("flux", "flux_schnell", "flux2", "sd3", "wan", "hunyuan_video", "ltxv", "sd15", "sdxl")
TOLERANCE = 1e-5


def largest_difference(one: Any, other: Any) -> float:
    return (one - other).abs().max().item()


def settings(family: str, **more: Any) -> dict[str, Any]:
    # A UNet starts from noise of standard deviation 15: float32 rounding of any kind exceeds 1e-5 there.
    return {**({"denoise": 0.3} if family in ("sd15", "sdxl") else {}), **more}


def assert_same(driver: Any, it: Any, by: str = "rows", **sampling: Any) -> None:
    expected = it.sample(**sampling)
    latent = it.sample(driver.split(it.model), **sampling)
    driver.assert_split(by)
    assert largest_difference(latent, expected) <= TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("cfg", "batch"), [(7.0, 1), (1.0, 2), (7.0, 3)])
def test_every_family(driver: Any, tiny: Callable[..., Any], family: str, cfg: float, batch: int) -> None:
    assert_same(driver, tiny(family), **settings(family, cfg=cfg, batch=batch, steps=3))


@pytest.mark.parametrize("family", ["flux_schnell", "sd15"])
@pytest.mark.parametrize("cfg", [1.0, 1.0001, 7.0])
@pytest.mark.parametrize("batch", [2, 3, 5])
def test_batches(driver: Any, tiny: Callable[..., Any], family: str, cfg: float, batch: int) -> None:
    assert_same(driver, tiny(family), **settings(family, cfg=cfg, batch=batch, steps=3))


@pytest.mark.parametrize("family", ["flux_schnell", "sd15"])
@pytest.mark.parametrize("sampler", ["euler", "euler_ancestral", "dpmpp_2m_sde", "uni_pc"])
def test_samplers(driver: Any, tiny: Callable[..., Any], family: str, sampler: str) -> None:
    assert_same(driver, tiny(family), **settings(family, cfg=5.0, batch=2, steps=5, sampler=sampler))


@pytest.mark.parametrize("family", ["flux_schnell", "sd3", "wan", "hunyuan_video"])
@pytest.mark.parametrize("batch", [1, 2])
def test_prompts_of_unequal_length_go_side_by_side(
    driver: Any, tiny: Callable[..., Any], family: str, batch: int
) -> None:
    it = tiny(family, tokens=8, negative_tokens=13)
    assert_same(driver, it, "conditionings", cfg=4.0, batch=batch, steps=3)


def test_prompts_of_unequal_length_in_a_batch_of_three(driver: Any, tiny: Callable[..., Any]) -> None:
    assert_same(driver, tiny("flux_schnell", negative_tokens=13), "conditionings", cfg=4.0, batch=3, steps=3)


def test_a_single_row_runs_here_and_says_so(driver: Any, tiny: Callable[..., Any]) -> None:
    it = tiny("flux")
    expected = it.sample(cfg=1.0)
    assert largest_difference(it.sample(driver.split(it.model), cfg=1.0), expected) == 0
    assert driver.report.forwards == 2
    assert driver.report.forwards_split == 0
    assert "nothing to split" in driver.report.line()


def test_three_workers(idle_driver: Any, start_worker: Callable[..., Any], tiny: Callable[..., Any]) -> None:
    with start_worker(name="b") as b, start_worker(name="c") as c, start_worker(name="d") as d:
        idle_driver.use(b.address, c.address, d.address)
        for cfg, batch in ((1.0, 5), (7.0, 3)):
            assert_same(idle_driver, tiny("flux_schnell"), cfg=cfg, batch=batch, steps=6)
            assert sum(idle_driver.report.rows.values()) == batch * (2 if cfg > 1 else 1)
            assert set(idle_driver.report.rows) - {"this machine"} <= {"b", "c", "d"}
            assert len(idle_driver.report.rows) > 2


def test_auto_does_not_go_on_with_a_split_that_is_slower(driver: Any, tiny: Callable[..., Any]) -> None:
    it = tiny("flux_schnell")
    expected = it.sample(cfg=5.0, steps=12)
    latent = it.sample(driver.split(it.model, "auto"), cfg=5.0, steps=12)
    assert largest_difference(latent, expected) <= TOLERANCE
    assert driver.report.forwards_split < 12


def test_off_leaves_the_model_alone(driver: Any, tiny: Callable[..., Any]) -> None:
    it = tiny("flux_schnell")
    expected = it.sample(cfg=5.0)
    assert largest_difference(it.sample(driver.split(driver.split(it.model), "off"), cfg=5.0), expected) == 0
    assert not driver.reports
