"""A real ComfyUI knows every node, input and value of the example graphs; only the model files may be missing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.comfyui, pytest.mark.timeout(240)]

PACK = Path(__file__).parent.parent.parent
PATHS = sorted((PACK / "example_workflows").glob("*.json"))
NOT_SENT = {"MarkdownNote"}  # exists in the browser alone


@pytest.fixture(scope="module")
def server(comfy: Any, comfyui_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A ComfyUI server with the pack and no model files."""
    from monarch_split.demo.comfy_server import ComfyServer

    base = tmp_path_factory.mktemp("server")
    with ComfyServer(
        base, comfyui=comfyui_path, pack=PACK, pack_name="monarch-split", environment={"MONARCH_CONFIG_DIR": str(base)}
    ) as running:
        yield running


@pytest.fixture(params=PATHS, ids=lambda path: path.stem)
def nodes(request: pytest.FixtureRequest) -> dict[int, dict[str, Any]]:
    """The nodes that are sent to ComfyUI, by number, with their links as (number of the source, output)."""
    graph = json.loads(request.param.read_text(encoding="utf-8"))
    links = {number: (source, output) for number, source, output, *_ in graph["links"]}
    nodes = {node["id"]: node for node in graph["nodes"] if node["type"] not in NOT_SENT}
    for node in nodes.values():
        node["linked"] = {slot["name"]: links[slot["link"]] for slot in node["inputs"] if slot["link"] is not None}
    return nodes


def input_definitions(server: Any, kind: str) -> dict[str, Any]:
    described = server.object_info(kind)["input"]
    return {**described.get("required", {}), **described.get("optional", {})}


def test_every_node_has_its_inputs_in_this_comfyui(server: Any, nodes: dict[int, dict[str, Any]]) -> None:
    for node in nodes.values():
        known = input_definitions(server, node["type"])
        for slot in node["inputs"]:
            assert slot["name"] in known, f"{node['type']} has no input {slot['name']}"
        required = set(server.object_info(node["type"])["input"].get("required", {}))
        assert required <= {slot["name"] for slot in node["inputs"]}, node["type"]


def test_every_link_carries_what_its_source_puts_out(server: Any, nodes: dict[int, dict[str, Any]]) -> None:
    for node in nodes.values():
        for name, (source, output) in node["linked"].items():
            given = server.object_info(nodes[source]["type"])["output"][output]
            assert given == input_definitions(server, node["type"])[name][0], f"{node['type']}.{name}"


def test_comfyui_refuses_nothing_but_missing_model_files(server: Any, nodes: dict[int, dict[str, Any]]) -> None:
    from monarch_split.demo.comfy_server import ComfyError

    prompt = {}
    for number, node in nodes.items():
        named = node.get("widgets_values_named", {})
        values = {name: value for name, value in named.items() if name != "control_after_generate"}
        values |= {name: [str(source), output] for name, (source, output) in node["linked"].items()}
        if node["type"] == "SaveVideo":
            values["format.codec"] = "auto"  # what a browser adds where the codec depends on the format
        prompt[str(number)] = {"class_type": node["type"], "inputs": values}
    with pytest.raises(ComfyError) as refusal:
        server.queue(prompt)
    answer = json.loads(str(refusal.value).partition("/prompt: ")[2])
    problems = {
        (error["type"], error["extra_info"]["received_value"])
        for details in answer["node_errors"].values()
        for error in details["errors"]
    }
    files = {
        value
        for node in nodes.values()
        for value in node.get("widgets_values") or []
        if str(value).endswith(".safetensors")
    }
    assert problems == {("value_not_in_list", name) for name in files}
