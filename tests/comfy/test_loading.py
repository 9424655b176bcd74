"""A file whose tensors are not those of the model is refused; one that ComfyUI loads rightly is not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.comfyui, pytest.mark.timeout(300)]

FAMILY = "flux_schnell"


def _families() -> list[str]:
    from monarch_split.demo.tiny_families import FAMILIES

    return list(FAMILIES)


@pytest.fixture
def changed(comfy: Any, models_folder: Path, tmp_path: Path) -> Callable[..., Path]:
    """changed(change) -> a file of the tiny model whose tensors `change` has changed."""
    from safetensors.torch import load_file, save_file

    from monarch_split.demo.tiny_models import write_model

    def write(change: Callable[[dict[str, Any]], None]) -> Path:
        tensors = load_file(write_model(FAMILY, models_folder))
        change(tensors)
        path = tmp_path / f"{tmp_path.name}.safetensors"  # folders of earlier tests are still known
        save_file(tensors, path)
        return path

    return write


@pytest.fixture
def node(comfy: Any, tmp_path: Path) -> Callable[[Path], Any]:
    """node(path) -> MODEL from Monarch Model Loader."""
    import folder_paths

    from monarch_split.nodes.loader import MonarchModelLoader

    folder_paths.add_model_folder_path("diffusion_models", str(tmp_path))
    return lambda path: MonarchModelLoader.execute(path.name, "default").result[0]


def lose(*names: str) -> Callable[[dict[str, Any]], None]:
    def change(tensors: dict[str, Any]) -> None:
        for name in names:
            del tensors[name]

    return change


def gain(*names: str) -> Callable[[dict[str, Any]], None]:
    import torch

    return lambda tensors: tensors.update({name: torch.ones(4) for name in names})


BIAS = "double_blocks.1.img_mlp.0.bias"
MANY = tuple(f"double_blocks.0.{stream}_mlp.{layer}.bias" for stream in ("img", "txt") for layer in (0, 2))


@pytest.mark.parametrize("family", _families())
def test_every_family_loads(comfy: Any, models_folder: Path, family: str) -> None:
    from monarch_split.demo.tiny_models import write_model
    from monarch_split.distributed.loading import load_checked

    path = write_model(family, models_folder)
    assert load_checked(path, lambda: comfy.sd.load_diffusion_model(str(path))) is not None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lose(BIAS), [f"lacks 1 of its weights ({BIAS})"]),
        (lose(*MANY), ["lacks 4 of its weights", "…"]),
        (gain("double_blocks.0.extra.weight"), ["holds 1 that", "double_blocks.0.extra.weight"]),
        (lambda tensors: (lose(BIAS)(tensors), gain("a.weight", "b.weight")(tensors)), [BIAS, "a.weight, b.weight"]),
    ],
)
def test_the_loader_names_what_does_not_fit(
    changed: Callable[..., Path], node: Callable[[Path], Any], tmp_path: Path, change: Any, words: list[str]
) -> None:
    from monarch_split.formats import UnsupportedFile

    with pytest.raises(UnsupportedFile) as refused:
        node(changed(change))
    assert all(word in str(refused.value) for word in [f"{tmp_path.name}.safetensors", *words])


@pytest.mark.parametrize("name", ["pos_embedder.seq", "model_type.Something-14B", "__mark__", "last.up.weight"])
def test_names_that_comfyui_is_known_to_ignore_are_fine(
    changed: Callable[..., Path], node: Callable[[Path], Any], name: str
) -> None:
    assert node(changed(gain(name))) is not None


def test_the_worker_refuses_what_does_not_fit(
    driver: Any, comfy: Any, tiny: Callable[..., Any], changed: Callable[..., Path]
) -> None:
    it = tiny(FAMILY)
    it.model = comfy.sd.load_diffusion_model(str(changed(gain("double_blocks.0.extra.weight"))))
    expected = it.sample(cfg=3.0)
    latent = it.sample(driver.split(it.model), cfg=3.0)
    assert driver.report.forwards_split == 0
    assert "double_blocks.0.extra.weight" in driver.report.line()
    assert (latent - expected).abs().max().item() == 0


def test_nothing_is_shown_that_would_not_have_been_and_nothing_stays(
    comfy: Any, changed: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    from monarch_split.distributed.loading import load_checked
    from monarch_split.formats import UnsupportedFile

    root = logging.getLogger()
    before, filters = root.level, list(root.filters)
    path = changed(lose(BIAS))
    root.setLevel(logging.ERROR)
    try:
        with pytest.raises(UnsupportedFile):
            load_checked(path, lambda: comfy.sd.load_diffusion_model(str(path)))
        assert root.level == logging.ERROR
        assert root.filters == filters
        assert not [record for record in caplog.records if "unet missing" in record.getMessage()]
    finally:
        root.setLevel(before)
