"""Masks, areas, time ranges, ControlNet, guiders and stages stay on the driver and give the stock result when split."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("plain_convolutions")]


def largest_difference(one: Any, other: Any) -> float:
    return (one - other).abs().max().item()


def assert_same(driver: Any, it: Any, by: str | None = "rows", **sampling: Any) -> Any:
    expected = it.sample(**sampling)
    latent = it.sample(driver.split(it.model), **sampling)
    assert driver.report.forwards_split >= 1, driver.report.line()
    assert not driver.report.events, driver.report.line()
    if by is not None:
        assert driver.report.split == by
    assert largest_difference(latent, expected) <= 1e-5
    return expected


def with_options(conditioning: list, **options: Any) -> list:
    return [[entry[0], {**entry[1], **options}] for entry in conditioning]


@pytest.mark.parametrize("family", ["flux_schnell", "wan"])
def test_inpaint_mask(driver: Any, tiny: Callable[..., Any], family: str) -> None:
    import torch

    it = tiny(family)
    mask = torch.zeros(1, 1, 8, 8)
    mask[..., 2:6, :] = 1
    assert_same(driver, it, cfg=4.0, steps=4, noise_mask=mask)


def test_two_areas_with_a_mask_and_a_time_range(driver: Any, tiny: Callable[..., Any]) -> None:
    import torch

    from monarch_split.demo.tiny_models import conditioning

    it = tiny("flux_schnell")
    mask = torch.zeros(1, 64, 64)
    mask[:, :, 16:] = 1
    left = with_options(conditioning("flux_schnell", 3), area=(8, 4, 0, 0), strength=1.0)
    right = with_options(conditioning("flux_schnell", 4), mask=mask, start_percent=0.0, end_percent=0.6)
    whole = with_options(conditioning("flux_schnell", 5), start_percent=0.4, end_percent=1.0)
    expected = assert_same(driver, it, None, cfg=4.0, steps=6, positive=left + right + whole)
    assert largest_difference(expected, it.sample(cfg=4.0, steps=6, positive=left + whole)) > 1e-3


def test_several_conditionings_per_side(driver: Any, tiny: Callable[..., Any]) -> None:
    from monarch_split.demo.tiny_models import conditioning

    it = tiny("flux_schnell")
    positive = conditioning("flux_schnell", 3) + conditioning("flux_schnell", 4) + conditioning("flux_schnell", 5)
    assert_same(driver, it, cfg=4.0, steps=3, positive=positive)
    longer = positive + conditioning("flux_schnell", 6, tokens=11)
    assert_same(driver, it, None, cfg=4.0, steps=3, positive=longer)


def test_missing_negative(driver: Any, tiny: Callable[..., Any]) -> None:
    it = tiny("flux_schnell")
    assert_same(driver, it, cfg=1.0, batch=2, steps=3, negative=[])


def make_control_net(comfy: Any, seed: int) -> Any:
    """A tiny SD1.5 ControlNet with random weights."""
    import torch
    from comfy.cldm.cldm import ControlNet as Network
    from comfy.controlnet import ControlNet

    from monarch_split.demo.tiny_families import FAMILIES, SCALES

    config = dict(FAMILIES["sd15"].config(SCALES["tiny"]))
    config.pop("out_channels")
    config.pop("transformer_depth_output")
    network = Network(
        **config, hint_channels=3, dtype=torch.float32, device="cpu", operations=comfy.ops.disable_weight_init
    )
    generator = torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.02
    network.eval().requires_grad_(False)
    return ControlNet(network, load_device=torch.device("cpu"), manual_cast_dtype=None)


def test_two_stacked_control_nets_with_start_and_end(driver: Any, tiny: Callable[..., Any], comfy: Any) -> None:
    import torch

    nodes = importlib.import_module("nodes")
    it = tiny("sd15")
    positive, negative = it.positive, it.negative
    for seed, (start, end) in ((1, (0.0, 1.0)), (2, (0.0, 0.5))):
        image = torch.rand(1, 64, 64, 3, generator=torch.Generator().manual_seed(seed))
        positive, negative = nodes.ControlNetApplyAdvanced().apply_controlnet(
            positive, negative, make_control_net(comfy, seed), image, 1.0, start, end
        )
    sampling: dict[str, Any] = {"cfg": 4.0, "steps": 4, "batch": 2, "denoise": 0.3}
    expected = assert_same(driver, it, positive=positive, negative=negative, **sampling)
    assert largest_difference(expected, it.sample(**sampling)) > 1e-4


def custom_sample(model: Any, it: Any, guider_class: Any, batch: int = 1, cfgs: tuple[float, ...] = (4.0,)) -> Any:
    """What SamplerCustomAdvanced does with `guider_class`."""
    import comfy.sample
    import comfy.samplers

    from monarch_split.demo.tiny_models import empty_latent

    guider = guider_class(model)
    guider.set_conds(*([it.positive, it.negative] if len(cfgs) == 1 else [it.positive, it.positive, it.negative]))
    guider.set_cfg(*cfgs)
    latent = empty_latent(it.family, batch)
    sigmas = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", 4)
    noise = comfy.sample.prepare_noise(latent, 0)
    return guider.sample(noise, latent, comfy.samplers.sampler_object("euler"), sigmas, seed=0, disable_pbar=True)


def test_sampler_custom_advanced_with_cfg_guider(driver: Any, tiny: Callable[..., Any], comfy: Any) -> None:
    it = tiny("flux_schnell")
    expected = custom_sample(it.model, it, comfy.samplers.CFGGuider)
    latent = custom_sample(driver.split(it.model), it, comfy.samplers.CFGGuider)
    driver.assert_split()
    assert largest_difference(latent, expected) <= 1e-5


def test_a_guider_with_three_conditionings(driver: Any, tiny: Callable[..., Any]) -> None:
    from comfy_extras.nodes_custom_sampler import Guider_DualCFG

    it = tiny("flux_schnell", negative_tokens=11)
    expected = custom_sample(it.model, it, Guider_DualCFG, cfgs=(4.0, 2.0))
    latent = custom_sample(driver.split(it.model), it, Guider_DualCFG, cfgs=(4.0, 2.0))
    assert driver.report.forwards_split >= 1, driver.report.line()
    assert largest_difference(latent, expected) <= 1e-5


def test_two_stages_of_ksampler_advanced(driver: Any, tiny: Callable[..., Any], comfy: Any) -> None:
    it = tiny("flux_schnell")

    def render(model: Any) -> Any:
        first = it.sample(model, cfg=4.0, steps=6, start_step=0, last_step=3, force_full_denoise=False)
        return comfy.sample.sample(
            model, first * 0, 6, 4.0, "euler", "simple", it.positive, it.negative, first, start_step=3, last_step=6,
            disable_noise=True, force_full_denoise=True, seed=0, disable_pbar=True,
        )  # fmt: skip

    expected = render(it.model)
    latent = render(driver.split(it.model))
    assert len(driver.reports) == 2
    assert all(report.forwards_split >= 1 for report in driver.reports)
    assert largest_difference(latent, expected) <= 1e-5


def test_context_windows(driver: Any, tiny: Callable[..., Any], comfy: Any) -> None:
    windows = importlib.import_module("comfy.context_windows")
    it = tiny("wan")

    def windowed(model: Any) -> Any:
        model = model.clone()
        model.model_options["context_handler"] = windows.IndexListContextHandler(
            context_schedule=windows.get_matching_context_schedule("standard_static"),
            fuse_method=windows.get_matching_fuse_method("pyramid"),
            context_length=2,
            context_overlap=1,
            dim=2,
        )
        windows.create_prepare_sampling_wrapper(model)
        return model

    expected = it.sample(windowed(it.model), cfg=4.0, steps=2)
    latent = it.sample(windowed(driver.split(it.model)), cfg=4.0, steps=2)
    driver.assert_split()
    assert largest_difference(latent, expected) <= 1e-5
    assert largest_difference(expected, it.sample(cfg=4.0, steps=2)) > 1e-4
