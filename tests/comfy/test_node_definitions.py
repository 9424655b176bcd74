"""What a real ComfyUI tells the browser of our nodes: texts in every language, help, and graphs that people saved."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.comfyui, pytest.mark.timeout(240)]

PACK = Path(__file__).parent.parent.parent
NODES = ("MonarchModelLoader", "MonarchSampler", "MonarchSplit", "MonarchMeasure", "MonarchMeasured")
SAVED = sorted(path.name for path in (PACK / "tests" / "saved_graphs").iterdir() if path.is_dir())
API = "every_node_api.json"


@pytest.fixture(scope="module")
def server(comfy: Any, comfyui_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A ComfyUI server with the pack and no model files."""
    from monarch_split.demo.comfy_server import ComfyServer

    base = tmp_path_factory.mktemp("server")
    with ComfyServer(
        base, comfyui=comfyui_path, pack=PACK, pack_name="monarch-split", environment={"MONARCH_CONFIG_DIR": str(base)}
    ) as running:
        running.object_info = functools.cache(running.object_info)
        yield running


def get(server: Any, path: str) -> Any:
    return json.loads(server._open(path))


# --- start ------------------------------------------------------------------------------------------------------------


_IMPORT = """
import asyncio, importlib, runpy, sys
sys.path.insert(0, sys.argv[1])
pack = sys.argv[2]
sys.argv = sys.argv[:1]
importlib.import_module("comfy.cli_args").args.cpu = True
for name in ("comfy.sd", "comfy.samplers", "nodes", "server", "comfy_api.latest"):
    importlib.import_module(name)
before = set(sys.modules)
runpy.run_path(pack + "/__main__.py")["load_pack"]()
extension = asyncio.run(importlib.import_module("monarch_split").comfy_entrypoint())
for node in asyncio.run(extension.get_node_list()):
    node.define_schema()
importlib.import_module("monarch_split.browser.routes")
print(*sorted(set(sys.modules) - before))
"""


def test_comfyui_starts_without_the_engine_and_heavy_modules(comfyui_path: Path) -> None:
    """Nodes load the engine when they run: importing it would make every start of ComfyUI longer."""
    started = subprocess.run(
        [sys.executable, "-c", _IMPORT, str(comfyui_path), str(PACK)],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    loaded = started.stdout.splitlines()[-1].split()
    ours = {name for name in loaded if name.startswith("monarch_split.")}
    assert "monarch_split.nodes.sampler" in ours
    engine = ("session", "peer", "peers", "channel", "codec", "replica", "worker", "doctor", "versions", "families")
    assert not ours & {f"monarch_split.distributed.{name}" for name in engine}
    assert not [name for name in ours if name.startswith(("monarch_split.formats", "monarch_split.cli"))]
    others = {name.partition(".")[0] for name in loaded} - {"monarch_split", "zmq"} - set(sys.stdlib_module_names)
    assert not others, "modules that ComfyUI does not load itself"


# --- texts ------------------------------------------------------------------------------------------------------------


def english(described: dict[str, Any]) -> dict[str, Any]:
    """What locales/en/nodeDefs.json has to say of a node, from ComfyUI's description of it."""
    inputs: dict[str, Any] = {}
    for section in ("required", "optional"):
        for name in described["input_order"].get(section, []):
            settings = described["input"][section][name][1]
            inputs[name] = {"name": name, "tooltip": settings["tooltip"]}
            if settings.get("control_after_generate"):
                inputs["control_after_generate"] = {"name": "control after generate"}
    texts = {"display_name": described["display_name"], "description": described["description"], "inputs": inputs}
    if described["output"]:
        names = zip(described["output_name"], described["output_tooltips"], strict=True)
        texts["outputs"] = {str(slot): {"name": name, "tooltip": text} for slot, (name, text) in enumerate(names)}
    return texts


def test_the_pack_has_these_nodes(server: Any) -> None:
    known = {
        name for name, node in get(server, "/object_info").items() if node["python_module"].endswith("monarch-split")
    }
    assert known == set(NODES)


def test_the_english_texts_are_those_of_the_nodes(server: Any) -> None:
    """After a change of a node's text: write it to locales/en/nodeDefs.json and translate it in the other languages."""
    written = json.loads((PACK / "locales" / "en" / "nodeDefs.json").read_text(encoding="utf-8"))
    assert written == {name: english(server.object_info(name)) for name in NODES}


def test_comfyui_serves_the_texts_of_every_language(server: Any) -> None:
    served = get(server, "/i18n")
    for language in ("en", "zh", "ru", "ja", "de"):
        assert set(served[language]["nodeDefs"]) >= set(NODES)
        assert "Monarch_Messages" in served[language]["settings"]
        assert served[language]["monarch"]["tab"]


@pytest.mark.parametrize("node", NODES)
def test_a_help_page_is_served_and_names_every_input_and_split_value(server: Any, node: str) -> None:
    text = server._open(f"/extensions/monarch-split/docs/{node}.md").decode()
    described = server.object_info(node)
    assert text.startswith(f"# {described['display_name']}\n")
    inputs = described["input"]["required"]
    for name in inputs if node != "MonarchSampler" else ("split",):  # the others are KSampler's
        assert f"`{name}`" in text, name
    for value in inputs.get("split", (None, {"options": []}))[1]["options"]:
        assert f"`{value}`" in text, value
    assert "## Example" in text
    for template in re.findall(r"template `([\w.]+)`", text):
        assert (PACK / "example_workflows" / f"{template}.json").exists(), template


# --- saved graphs -----------------------------------------------------------------------------------------------------


def saved(release: str, name: str) -> Any:
    return json.loads((PACK / "tests" / "saved_graphs" / release / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("release", SAVED)
def test_a_graph_that_a_release_saved_opens_with_every_value_where_it_was(server: Any, release: str) -> None:
    """The release's page wrote down both: the graph, and what it would have sent."""
    from monarch_split.tests.comfy.template_prompts import as_prompt

    opened = as_prompt(saved(release, "every_node.json"), server.object_info)
    sent = saved(release, API)
    assert {node["class_type"] for node in sent.values()} >= {"MonarchModelLoader", "MonarchSampler", "MonarchSplit"}
    for number, node in sent.items():
        assert opened[number]["class_type"] == node["class_type"]
        for name, value in node["inputs"].items():
            assert opened[number]["inputs"][name] == value, f"{node['class_type']}.{name}"


@pytest.mark.parametrize("release", SAVED)
def test_a_prompt_that_a_release_saved_is_valid_but_for_its_model_files(server: Any, release: str) -> None:
    from monarch_split.demo.comfy_server import ComfyError

    with pytest.raises(ComfyError) as refusal:
        server.queue(saved(release, API))
    answer = json.loads(str(refusal.value).partition("/prompt: ")[2])
    problems = {
        (error["type"], error["extra_info"]["received_value"])
        for details in answer["node_errors"].values()
        for error in details["errors"]
    }
    files = {"flux1-dev.safetensors", "clip_l.safetensors", "t5xxl_fp16.safetensors", "ae.safetensors"}
    assert problems == {("value_not_in_list", name) for name in files}
