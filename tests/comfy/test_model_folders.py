"""A worker opens model files only in its model folders, whatever the driver calls them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.comfyui, pytest.mark.timeout(180)]


@pytest.fixture
def folders(comfy: Any, tiny: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """A model folder, one that is a link itself, and a folder that is none; each holds the same file."""
    import folder_paths

    places = {name: tmp_path / name for name in ("models", "linked", "elsewhere")}
    disk = tmp_path / "disk"
    for folder in (places["models"], disk, places["elsewhere"]):
        folder.mkdir()
        shutil.copy(tiny("flux_schnell").path, folder / "flux.safetensors")
    places["linked"].symlink_to(disk)
    listed = ([str(places["models"]), str(places["linked"])], {".safetensors"})
    monkeypatch.setitem(folder_paths.folder_names_and_paths, "diffusion_models", listed)
    return places


def find(name: str, like: Path, folder: str = "diffusion_models") -> Path | None:
    from monarch_split.distributed.files import FileRef, file_digest
    from monarch_split.distributed.model_store import ComfyRuntime

    runtime = object.__new__(ComfyRuntime)  # ComfyUI is imported already
    return runtime.find(FileRef(folder, name, like.stat().st_size, file_digest(like)))


def test_files_in_model_folders_are_found(folders: dict[str, Path]) -> None:
    file = folders["models"] / "flux.safetensors"
    assert find("flux.safetensors", file) == file
    (folders["models"] / "sub").mkdir()
    inside = folders["models"] / "sub" / "alias.safetensors"
    inside.symlink_to(folders["linked"] / "flux.safetensors")
    assert find("sub/alias.safetensors", file) == inside
    file.unlink()
    assert find("flux.safetensors", inside) == folders["linked"] / "flux.safetensors"


def test_a_link_out_of_the_model_folders_is_not_followed(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    target = folders["elsewhere"] / "flux.safetensors"
    (folders["models"] / "link.safetensors").symlink_to(target)
    assert find("link.safetensors", target) is None
    assert "link.safetensors is a link out of the model folders and is not used" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["../elsewhere/flux.safetensors", "{elsewhere}/flux.safetensors"])
@pytest.mark.parametrize("folder", ["diffusion_models", "custom_nodes", "output"])
def test_no_name_leads_out_of_them(folders: dict[str, Path], name: str, folder: str) -> None:
    target = folders["elsewhere"] / "flux.safetensors"
    found = find(name.format(**folders), target, folder)
    assert found is None or found.parent in (folders["models"], folders["linked"])
