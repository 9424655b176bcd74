"""Every template in a real ComfyUI: it knows each node, input and value, and with tiny models under the files' names
renders each to the end, split with a worker.

Text encoders alone are replaced, by random conditioning: ComfyUI has no tiny ones. Sizes and steps are small."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.comfyui, pytest.mark.timeout(240)]

PACK = Path(__file__).parent.parent.parent
PATHS = sorted((PACK / "example_workflows").glob("*.json"))

# What each template renders: the tiny family, and what its graph gives two machines to share.
CASES = {
    "chroma": ("chroma", "rows"),
    "compare_one_and_two_machines": ("sdxl", "rows"),
    "flux2_dev": ("flux2", "rows"),
    "flux_dev": ("flux", "rows"),
    "flux_schnell": ("flux_schnell", "rows"),
    "hunyuan_video": ("hunyuan_video", "tokens"),
    "ltx_2": ("ltxav", "rows"),
    "qwen_image": ("qwen_image", "rows"),
    "sd3.5": ("sd35_large", "rows"),
    "sdxl": ("sdxl", "rows"),
    "wan_2.1_text_to_video": ("wan", "rows"),
    "wan_2.2_image_to_video": ("wan22_i2v", "rows"),
    "wan_2.2_text_to_video": ("wan", "rows"),
    "with_controlnet": ("sd35_large", "rows"),
    "with_lora": ("qwen_image", "rows"),
    "with_sampler_custom_advanced": ("flux", "tokens"),
    "z_image_turbo": ("z_image", "rows"),
}


def write_tiny_files(models: Path) -> None:
    """A tiny model for every file of the templates but the text encoders."""
    from safetensors.torch import save_file

    from monarch_split.demo.tiny_loras import write_lora
    from monarch_split.demo.tiny_models import write_model
    from monarch_split.templates import files
    from monarch_split.tests.comfy import tiny_parts as parts

    def path(file: files.ModelFile) -> Path:
        (models / file.folder).mkdir(parents=True, exist_ok=True)
        return models / file.folder / file.name

    def model(file: files.ModelFile, family: str) -> None:
        write_model(family, path(file).parent, file=file.name)

    for file, family in (
        (files.FLUX_DEV, "flux"), (files.FLUX_SCHNELL, "flux_schnell"), (files.FLUX2_DEV, "flux2"),
        (files.QWEN_IMAGE, "qwen_image"), (files.Z_IMAGE_TURBO, "z_image"), (files.CHROMA, "chroma"),
        (files.WAN21_T2V, "wan"), (files.HUNYUAN_VIDEO, "hunyuan_video"),
    ):  # fmt: skip
        model(file, family)
    for noise in ("high", "low"):
        seed = ("high", "low").index(noise)
        for task, family in (("t2v", "wan"), ("i2v", "wan22_i2v")):
            file = files.wan22(task, noise)
            write_model(family, path(file).parent, file=file.name, seed=seed)
    for file, vae in (
        (files.FLUX_VAE, parts.image_vae(16)), (files.FLUX2_VAE, parts.flux2_vae()),
        (files.QWEN_VAE, parts.video_vae(16)), (files.WAN21_VAE, parts.video_vae(16)),
        (files.HUNYUAN_VAE, parts.video_vae(16)), (files.SD35_BLUR, parts.sd35_controlnet()),
    ):  # fmt: skip
        save_file(vae, path(file))
    write_lora("qwen_image", path(files.QWEN_LIGHTNING).parent).rename(path(files.QWEN_LIGHTNING))
    parts.write_checkpoint(path(files.SDXL), "sdxl", {"first_stage_model.": parts.image_vae(4)})
    parts.write_checkpoint(path(files.SD35_LARGE), "sd35_large", {"first_stage_model.": parts.image_vae(16)})
    sound, metadata = parts.audio_vae()
    parts.write_checkpoint(path(files.LTX2), "ltxav", {"vae.": parts.video_vae(128), "": sound}, metadata)


@pytest.fixture(scope="module")
def server(comfy: Any, comfyui_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A ComfyUI server with the pack and tiny models; its configuration names no worker yet."""
    from monarch_split.demo.comfy_server import ComfyServer
    from monarch_split.tests.comfy.tiny_parts import more_families
    from monarch_split.tests.driving import share_identity

    base = tmp_path_factory.mktemp("server")
    configuration = base / "configuration"
    configuration.mkdir()
    share_identity(configuration)
    (base / "input").mkdir()
    shutil.copy(comfyui_path / "input" / "example.png", base / "input")
    with more_families():
        write_tiny_files(base / "models")
        with ComfyServer(
            base, comfyui=comfyui_path, pack=PACK, pack_name="monarch-split", test_families=True,
            environment={"MONARCH_CONFIG_DIR": str(configuration)},
        ) as running:  # fmt: skip
            running.configuration = configuration / "monarch.toml"
            running.object_info = functools.cache(running.object_info)
            yield running


@pytest.fixture(scope="module")
def worker(server: Any, start_worker: Callable[..., Any]) -> Iterator[Any]:
    with start_worker(name="second") as running:
        server.configuration.write_text(f'[clusters.default]\nworkers = ["{running.address}"]\n')
        yield running


@pytest.fixture(params=PATHS, ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def graph(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def test_there_is_a_case_for_every_template() -> None:
    assert [path.stem for path in PATHS] == list(CASES)


def test_comfyui_refuses_nothing_but_missing_model_files(server: Any, graph: dict[str, Any]) -> None:
    from monarch_split.demo.comfy_server import ComfyError
    from monarch_split.tests.comfy.template_prompts import as_prompt, without_files

    files = {model["name"] for node in graph["nodes"] for model in node["properties"].get("models", [])}
    with pytest.raises(ComfyError) as refusal:
        server.queue(without_files(as_prompt(graph, server.object_info), files))
    answer = json.loads(str(refusal.value).partition("/prompt: ")[2])
    problems = {
        (error["type"], error["extra_info"]["received_value"])
        for details in answer["node_errors"].values()
        for error in details["errors"]
    }
    assert problems == {("value_not_in_list", f"absent_{name}") for name in files}


def test_it_renders_to_the_end_on_two_nodes(server: Any, worker: Any, path: Path, graph: dict[str, Any]) -> None:
    from monarch_split.demo.graphs import conditioning_node
    from monarch_split.demo.tiny_families import FAMILIES
    from monarch_split.tests.comfy.template_prompts import as_prompt, made_tiny

    family, mode = CASES[path.stem]
    prompt = made_tiny(
        as_prompt(graph, server.object_info), lambda seed: conditioning_node(FAMILIES[family], seed, 8), mode
    )
    before = len(server.log())
    entry = server.run(prompt, timeout=90)
    saved = [file for output in entry["outputs"].values() for file in output.get("images", [])]
    assert saved, "no picture or video was saved"
    for file in saved:
        assert len(server.view(file)) > 100
    lines = [line for line in server.log()[before:].splitlines() if "Monarch: " in line]
    expected = sum(node["inputs"].get("split", "off") != "off" for node in prompt.values())
    assert sum("on 2 machines by" in line for line in lines) == expected, "\n".join(lines)
