"""`monarch convert`: what it writes loads in ComfyUI, computes nearly what the source does, and splits exactly."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from monarch_split.tests.comfy.test_model_changes import largest_difference

pytestmark = [pytest.mark.comfyui, pytest.mark.timeout(300)]

PACK = Path(__file__).parents[2]
FAMILY = "flux_schnell"
# What the same layers cost when ComfyUI's own quantisers wrote them: the best that a converter can do.
LAYER_FORMATS = {"fp8": "float8_e4m3fn", "nvfp4": "nvfp4", "int8": "int8_tensorwise"}
REFERENCE = {"fp8": "layered_fp8_e4m3", "nvfp4": "nvfp4", "int8": "int8_rowwise"}


def convert(*arguments: object, largest_file: int | None = None) -> subprocess.CompletedProcess[str]:
    """`largest_file`: bytes beyond which this system lets it write no file."""

    def limit() -> None:
        if largest_file is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))

    command = [sys.executable, str(PACK), "convert", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, preexec_fn=limit)


@pytest.fixture(scope="module")
def source(comfy: Any, models_folder: Path) -> Path:
    from monarch_split.demo.tiny_models import write_model

    return write_model(FAMILY, models_folder)


def relative(one: Any, other: Any) -> float:
    return ((one - other).norm() / other.norm()).item()


@pytest.mark.parametrize("to", LAYER_FORMATS)
def test_a_converted_model_computes_nearly_the_same_and_splits(
    driver: Any, comfy: Any, tiny: Callable[..., Any], models_folder: Path, source: Path, tmp_path: Path, to: str
) -> None:
    import torch

    from monarch_split.demo.tiny_formats import write_format
    from monarch_split.formats import inspect_file

    target = tmp_path / "converted.safetensors"
    done = convert(source, target, "--to", to, "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["format"] == LAYER_FORMATS[to]
    assert len(said["layers"]) == 20
    told = done.stderr.splitlines()
    assert told[0] == f"Converting {source} to {to}, as {target}."
    assert (told[1], told[-1]) == (
        "0 of 20 layers are converted.",
        "20 of 20 layers are converted; waiting for the disk.",
    )
    assert max(layer["error"] for layer in said["layers"]) < {"fp8": 0.04, "nvfp4": 0.15, "int8": 0.02}[to]
    assert said["bytes_after"] == target.stat().st_size
    report = inspect_file(target)
    assert report.loadable, report.problems
    assert [name for name in os.listdir(tmp_path) if "converted" in name] == ["converted.safetensors"]

    with torch.inference_mode():  # as ComfyUI runs nodes
        _compute_and_split(driver, comfy, tiny(FAMILY), target, write_format(REFERENCE[to], models_folder), to)


def _compute_and_split(driver: Any, comfy: Any, it: Any, target: Path, reference: Path, to: str) -> None:
    expected = it.sample(cfg=3.0)
    it.model = comfy.sd.load_diffusion_model(str(target))
    layers = [module for module in it.model.model.diffusion_model.modules() if getattr(module, "quant_format", None)]
    assert {layer.quant_format for layer in layers} == {LAYER_FORMATS[to]}
    assert len(layers) == 20
    got = it.sample(cfg=3.0)
    it.model = comfy.sd.load_diffusion_model(str(reference))
    assert 0 < relative(got, expected) <= 1.1 * relative(it.sample(cfg=3.0), expected)

    it.model = comfy.sd.load_diffusion_model(str(target))
    one = it.sample(cfg=3.0)
    latent = it.sample(driver.split(it.model), cfg=3.0)
    driver.assert_split()
    assert largest_difference(latent, one) <= 1e-5


def test_chosen_layers_alone_are_quantised_and_a_checkpoint_keeps_its_other_models(
    comfy: Any, source: Path, tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    tensors = {f"model.diffusion_model.{key}": value for key, value in load_file(source).items()}
    other = torch.randn(32, 32)
    tensors["cond_stage_model.layers.0.weight"] = other
    save_file(tensors, tmp_path / "in.safetensors")
    layers = ["double_blocks.0.*", "single_blocks.1.linear2"]
    done = convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors", "--to", "fp8", "--layers", *layers)
    assert done.returncode == 0, done.stderr
    written = load_file(tmp_path / "out.safetensors")
    marked = {key.removesuffix(".comfy_quant") for key in written if key.endswith(".comfy_quant")}
    names = {key.removesuffix(".weight") for key, value in tensors.items() if value.ndim == 2}
    begin = ("model.diffusion_model.double_blocks.0.", "model.diffusion_model.single_blocks.1.linear2")
    assert marked == {name for name in names if name.startswith(begin)}
    assert torch.equal(written["cond_stage_model.layers.0.weight"], other)
    assert written["model.diffusion_model.img_in.weight"].dtype == torch.bfloat16
    assert all(name in done.stdout for name in marked)


def test_a_source_that_must_not_be_quantised_is_named(source: Path, models_folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from monarch_split.demo.tiny_formats import write_format

    (tmp_path / "a.gguf").write_bytes(b"GGUF" + bytes(100))
    diffusers = {key.replace("double_blocks", "joint_transformer_blocks"): v for key, v in load_file(source).items()}
    save_file(diffusers, tmp_path / "diffusers.safetensors")
    for path, words in (
        (tmp_path / "a.gguf", "GGUF"),
        (write_format("layered_fp8_e4m3", models_folder), "fp8_e4m3fn_scaled already"),
        (write_format("nvfp4", models_folder), "nvfp4 already"),
        (tmp_path / "diffusers.safetensors", "diffusers"),
        (tmp_path / "nothing.safetensors", "no such file"),
    ):
        done = convert(path, tmp_path / "out.safetensors", "--to", "nvfp4")
        assert done.returncode == 1
        assert words in done.stderr, done.stderr
        assert path.name in done.stderr
    assert not [name for name in os.listdir(tmp_path) if "out" in name]


def test_a_file_that_exists_is_kept_and_half_of_one_is_never_left(source: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    target = tmp_path / "out.safetensors"
    target.write_bytes(b"mine")
    assert convert(source, target, "--to", "fp8").returncode == 2
    assert target.read_bytes() == b"mine"
    broken = load_file(source)
    last = [key for key in broken if "single_blocks.1.linear" in key and key.endswith(".weight")][-1]
    broken[last][0, 0] = float("nan")
    save_file(broken, tmp_path / "broken.safetensors")
    done = convert(tmp_path / "broken.safetensors", target, "--to", "fp8", "--force")
    assert done.returncode == 1
    assert last.removesuffix(".weight") in done.stderr
    assert target.read_bytes() == b"mine"
    assert sorted(os.listdir(tmp_path)) == ["broken.safetensors", "out.safetensors"]
    done = convert(source, target, "--to", "fp8", "--force", largest_file=100_000)
    assert done.returncode == 1
    assert f"{target} cannot be written: File too large. Free some space there" in done.stderr
    assert target.read_bytes() == b"mine"
    assert sorted(os.listdir(tmp_path)) == ["broken.safetensors", "out.safetensors"]
    assert convert(source, target, "--to", "fp8", "--force").returncode == 0
    assert target.stat().st_size > 1000


def test_a_text_encoder_is_converted_too(comfy: Any, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    layer = "encoder.block.0.layer.0.SelfAttention"
    tensors = {f"{layer}.{part}.weight": torch.randn(32, 32) for part in "qkvo"}
    save_file({**tensors, "shared.weight": torch.randn(64, 32)}, tmp_path / "t5.safetensors")
    done = convert(tmp_path / "t5.safetensors", tmp_path / "out.safetensors", "--to", "fp8")
    assert done.returncode == 0, done.stderr
    written = load_file(tmp_path / "out.safetensors")
    assert {key for key in written if key.endswith(".comfy_quant")} == {f"{layer}.{p}.comfy_quant" for p in "qkvo"}
