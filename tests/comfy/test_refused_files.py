"""Files that ComfyUI would load as garbage: refused by the nodes before anything is sent, and by a worker, too."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.comfyui, pytest.mark.timeout(180)]


def write_gptq(source: Path, path: Path) -> Path:
    """The model at `source` with its blocks' linear layers as GPTQ stores them."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors: dict[str, Any] = {}
    for name, weight in load_file(source).items():
        layer = name.removesuffix(".weight")
        if layer == name or "blocks." not in name or weight.ndim != 2:
            tensors[name] = weight
            continue
        rows, columns = weight.shape
        tensors[f"{layer}.qweight"] = torch.zeros(columns // 8, rows, dtype=torch.int32)
        tensors[f"{layer}.qzeros"] = torch.zeros(1, rows // 8, dtype=torch.int32)
        tensors[f"{layer}.scales"] = torch.ones(1, rows, dtype=torch.float16)
        tensors[f"{layer}.g_idx"] = torch.zeros(columns, dtype=torch.int32)
    save_file(tensors, path)
    return path


@pytest.fixture
def gptq(tiny: Callable[..., Any], tmp_path: Path) -> Path:
    return write_gptq(tiny("flux_schnell").path, tmp_path / "flux-gptq.safetensors")


def test_the_loader_node_refuses_before_comfyui_reads_the_file(
    comfy: Any, gptq: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import folder_paths

    from monarch_split.formats import UnsupportedFile
    from monarch_split.nodes.loader import MonarchModelLoader

    monkeypatch.setitem(folder_paths.folder_names_and_paths, "diffusion_models", ([str(gptq.parent)], {".safetensors"}))
    monkeypatch.setattr(comfy.sd, "load_diffusion_model", lambda *_, **__: pytest.fail("the file was read"))
    with pytest.raises(UnsupportedFile, match=r"^flux-gptq\.safetensors cannot be used: .* the GPTQ format"):
        MonarchModelLoader.execute(gptq.name, "default")


@pytest.mark.parametrize("mode", ["auto", "rows"])
def test_a_model_that_a_stock_loader_made_of_such_a_file_is_refused_by_sampler_and_split(
    comfy: Any, idle_driver: Any, gptq: Path, mode: str
) -> None:
    from monarch_split.formats import UnsupportedFile

    model = comfy.sd.load_diffusion_model(str(gptq))
    if getattr(model, "cached_patcher_init", None) is None:
        pytest.skip("this ComfyUI does not remember which file a model came from")
    with pytest.raises(UnsupportedFile, match="the GPTQ format"):
        idle_driver.split(model, mode)
    idle_driver.split(model, "off")


def ask_for(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Have this driver ask its workers for the file at `path`, whatever it renders, as one without checks would."""
    from monarch_split.distributed.files import FileRef, file_digest
    from monarch_split.nodes import attach

    describe = attach.describe

    def careless(patcher: Any) -> Any:
        ref = FileRef("diffusion_models", path.name, path.stat().st_size, file_digest(path))
        return dataclasses.replace(describe(patcher), file=ref, path=path)

    monkeypatch.setattr(attach, "describe", careless)


def bad_file(kind: str, good: Path, folder: Path) -> Path:
    path = folder / f"{kind}.safetensors"
    if kind == "gptq":
        return write_gptq(good, path)
    content = {"gguf": b"GGUF\3\0\0\0", "pickle": b"PK\3\4"}.get(kind, b"") + good.read_bytes()[8:]
    path.write_bytes(good.read_bytes()[:-1] if kind == "truncated" else content)
    return path


@pytest.mark.parametrize(
    ("kind", "words"),
    [("gptq", "the GPTQ format"), ("gguf", "GGUF"), ("truncated", "cut off"), ("pickle", "cannot be read")],
)
def test_a_worker_that_is_asked_for_a_bad_file_refuses_it_by_name_and_goes_on(
    driver: Any, tiny: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, words: str
) -> None:
    it = tiny("flux_schnell")
    expected = it.sample(cfg=4.0)
    with monkeypatch.context() as patched:
        ask_for(patched, bad_file(kind, it.path, tmp_path))
        latent = it.sample(driver.split(it.model), cfg=4.0)
    assert (latent - expected).abs().max().item() <= 1e-5
    assert driver.report.forwards_split == 0
    assert "UnsupportedFile" in driver.report.line()
    assert words in driver.report.line()
    it.sample(driver.split(it.model), cfg=4.0)
    driver.assert_split()
