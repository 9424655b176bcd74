"""Machines that differ in what they compute natively: alike by default, each its fastest way if asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_split.tests.comfy.test_model_changes import largest_difference, rows_one_by_one

pytestmark = [pytest.mark.comfyui, pytest.mark.timeout(300)]

STEPS = {"cfg": 3.0, "steps": 2}
# Has a CPU multiply in FP8, as the flag of this name does; without it a CPU dequantises.
NATIVE_FP8 = "--supports-fp8-compute"


@pytest.fixture
def fp8(comfy: Any, models_folder: Path, tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """fp8(native, name) -> Tiny in FP8, loaded by a machine that can compute it natively, or not."""
    import comfy.model_management as model_management

    from monarch_split.demo import tiny_formats

    def load(native: bool, name: str = "layered_fp8_e4m3", **options: Any) -> Any:
        monkeypatch.setattr(model_management, "SUPPORT_FP8_OPS", native)
        it = tiny(tiny_formats.FAMILY)
        path = tiny_formats.write_format(name, models_folder)
        it.model = comfy.sd.load_diffusion_model(str(path), model_options=options)
        return it

    return load


@pytest.fixture(scope="module")
def native_worker(
    start_worker: Callable[..., Any], comfyui_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """A worker that can compute FP8 natively."""
    flags = ["--cpu", "--base-directory", str(tmp_path_factory.mktemp("native")), NATIVE_FP8]
    with start_worker(name="second", arguments=["--comfyui", str(comfyui_path), "--", *flags]) as worker:
        yield worker


def test_the_two_ways_give_different_numbers(fp8: Callable[..., Any]) -> None:
    assert largest_difference(fp8(True).sample(**STEPS), fp8(False).sample(**STEPS)) > 1e-3


def test_a_worker_that_could_do_better_follows_the_driver(
    idle_driver: Any, native_worker: Any, fp8: Callable[..., Any]
) -> None:
    idle_driver.use(native_worker.address)
    it = fp8(False)
    expected = it.sample(**STEPS)
    latent = it.sample(idle_driver.split(it.model), **STEPS)
    assert idle_driver.report.forwards_split > 0
    assert largest_difference(latent, expected) <= 1e-5
    assert "dequantised on all machines because this machine cannot" in idle_driver.report.line()


def test_both_compute_natively_where_both_can(idle_driver: Any, native_worker: Any, fp8: Callable[..., Any]) -> None:
    idle_driver.use(native_worker.address)
    it = fp8(True)
    expected = it.sample(rows_one_by_one(it.model), **STEPS)
    latent = it.sample(idle_driver.split(it.model), **STEPS)
    idle_driver.assert_split()
    assert largest_difference(latent, expected) <= 1e-5


def test_the_driver_dequantises_for_a_run_with_a_worker_that_must(driver: Any, fp8: Callable[..., Any]) -> None:
    dequantised = fp8(False).sample(**STEPS)
    it = fp8(True)
    native = it.sample(**STEPS)
    latent = it.sample(driver.split(it.model), **STEPS)
    assert driver.report.forwards_split > 0
    assert largest_difference(latent, dequantised) <= 1e-5
    assert "dequantised on all machines because second cannot" in driver.report.line()
    # Afterwards the model is its user's again.
    assert largest_difference(it.sample(**STEPS), native) == 0


def test_speed_before_equality_if_the_cluster_says_so(driver: Any, fp8: Callable[..., Any]) -> None:
    driver.configuration.write_text(driver.configuration.read_text() + 'prefer = "speed"\n')
    it = fp8(True)
    native, dequantised = it.sample(rows_one_by_one(it.model), **STEPS), fp8(False).sample(**STEPS)
    it = fp8(True)
    latent = it.sample(driver.split(it.model), **STEPS)
    assert "natively here and dequantised on second" in driver.report.line()
    # Computed in two ways, so equal to neither; on a CPU the difference is too large for the check, so it runs here.
    if driver.report.forwards_split:
        assert min(largest_difference(latent, native), largest_difference(latent, dequantised)) > 1e-5
    else:
        assert "computes something else" in driver.report.line()


@pytest.mark.parametrize("fast", [False, True])
def test_plain_fp8_is_multiplied_as_the_loader_was_told(
    idle_driver: Any, native_worker: Any, fp8: Callable[..., Any], fast: bool
) -> None:
    import torch

    idle_driver.use(native_worker.address)
    it = fp8(True, "fp8_e4m3", dtype=torch.float8_e4m3fn, fp8_optimizations=fast)
    expected = it.sample(rows_one_by_one(it.model), **STEPS)
    latent = it.sample(idle_driver.split(it.model), **STEPS)
    idle_driver.assert_split()
    assert largest_difference(latent, expected) <= 1e-5
