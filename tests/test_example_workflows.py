"""The graphs of the template browser: what templates/ writes, readable, with a picture and a note that helps.

Whether a real ComfyUI knows every node and value in them is for tests/comfy/test_example_workflows.py to say."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from monarch_split.templates.node_types import NODE_TYPES, TITLE
from monarch_split.templates.write import texts

FOLDER = Path(__file__).parent.parent / "example_workflows"
PATHS = sorted(FOLDER.glob("*.json"))
PICTURE_LIMIT = 200 * 1024


@pytest.fixture(params=PATHS, ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def graph(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def nodes_of(graph: dict[str, Any], *kinds: str) -> list[dict[str, Any]]:
    return [node for node in graph["nodes"] if node["type"] in kinds]


def widgets_of(node: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(NODE_TYPES[node["type"]].widgets, node["widgets_values"], strict=True))


def test_there_is_one_for_each_promised_family_and_use() -> None:
    assert {path.stem for path in PATHS} == {
        "flux_dev", "flux_schnell", "flux2_dev", "sdxl", "sd3.5", "qwen_image", "z_image_turbo", "chroma",
        "wan_2.1_text_to_video", "wan_2.2_text_to_video", "wan_2.2_image_to_video", "hunyuan_video", "ltx_2",
        "with_lora", "with_controlnet", "with_sampler_custom_advanced", "compare_one_and_two_machines",
    }  # fmt: skip


def test_the_files_are_what_the_templates_write() -> None:
    """Run `python templates/write.py` after a change, and take the pictures anew."""
    written = texts()
    assert set(written) == {path.name for path in PATHS}
    for path in PATHS:
        assert path.read_text(encoding="utf-8") == written[path.name], path.name


def test_every_link_has_two_ends_of_its_type_and_both_know_it(graph: dict[str, Any]) -> None:
    nodes = {node["id"]: node for node in graph["nodes"]}
    assert len(nodes) == len(graph["nodes"]) == graph["last_node_id"]
    for number, source, output, target, slot, kind in graph["links"]:
        start, end = nodes[source]["outputs"][output], nodes[target]["inputs"][slot]
        assert start["type"] == end["type"] == kind
        assert number in start["links"]
        assert end["link"] == number
    numbers = {link[0] for link in graph["links"]}
    assert len(numbers) == len(graph["links"]) == graph["last_link_id"]
    for node in graph["nodes"]:
        assert {slot["link"] for slot in node["inputs"]} - {None} <= numbers
        assert {number for slot in node["outputs"] for number in slot["links"] or []} <= numbers


def test_the_split_is_ours_and_has_something_to_share_out(graph: dict[str, Any]) -> None:
    splitting = [
        node for node in nodes_of(graph, "MonarchSampler", "MonarchSplit") if widgets_of(node)["split"] != "off"
    ]
    assert splitting
    samplers = nodes_of(graph, "MonarchSampler", "KSamplerAdvanced", "CFGGuider")
    cfgs = {widgets_of(node)["cfg"] for node in samplers} or {1.0}  # BasicGuider has none
    batch = max(widgets_of(node)["batch_size"] for node in graph["nodes"] if "batch_size" in _names(node))
    text = nodes_of(graph, "MarkdownNote")[0]["widgets_values"][0]
    (cfg,) = cfgs
    rows = batch * (2 if cfg > 1 else 1)
    assert rows == 2 or (rows == 1 and "tokens" in text), "the note does not say why this would run on two machines"


def _names(node: dict[str, Any]) -> tuple[str, ...]:
    return NODE_TYPES[node["type"]].widgets if node["type"] in NODE_TYPES else ()


def test_the_note_names_every_model_file_and_its_folder(graph: dict[str, Any]) -> None:
    (note,) = nodes_of(graph, "MarkdownNote")
    (text,) = note["widgets_values"]
    known = {model["name"]: model for node in graph["nodes"] for model in node["properties"].get("models", [])}
    used = {
        value
        for node in graph["nodes"]
        for value in node["widgets_values"]
        if isinstance(value, str) and value.endswith(".safetensors")
    }
    assert used
    assert used == set(known)
    for name, model in known.items():
        # The page offers the download of a missing file from the same three facts.
        assert f"[{name}]({model['url']}) in `models/{model['directory']}`" in text
        assert model["url"].endswith("/" + name)
    listed = [line for line in text.splitlines() if line.startswith("- [")]
    assert len(listed) == len(known), "the note lists a file that the graph does not use"


def test_nothing_overlaps_and_every_node_is_in_its_group(graph: dict[str, Any]) -> None:
    boxes = [
        (node["type"], x, y - TITLE, x + width, y + height)
        for node in graph["nodes"]
        for (x, y), (width, height) in [(node["pos"], node["size"])]
    ]
    for number, (one, left, top, right, bottom) in enumerate(boxes):
        for other, left2, top2, right2, bottom2 in boxes[number + 1 :]:
            apart = right <= left2 or right2 <= left or bottom <= top2 or bottom2 <= top
            assert apart, f"{one} and {other}"
    frames = [(x, y, x + width, y + height) for x, y, width, height in (group["bounding"] for group in graph["groups"])]
    for kind, left, top, right, bottom in boxes:
        held = [frame for frame in frames if frame[0] < right and left < frame[2]]
        assert kind == "MarkdownNote" or len(held) == 1
        for frame in held:
            assert frame[0] <= left <= right <= frame[2], kind
            assert frame[1] <= top <= bottom <= frame[3], kind


def test_links_go_from_left_to_right_or_down_a_column(graph: dict[str, Any]) -> None:
    nodes = {node["id"]: node for node in graph["nodes"]}
    for _, source, _, target, _, _ in graph["links"]:
        start, end = nodes[source]["pos"], nodes[target]["pos"]
        assert start[0] < end[0] or (start[0] == end[0] and start[1] < end[1]), (source, target)


def test_its_picture_is_a_small_jpeg(path: Path) -> None:
    data = path.with_suffix(".jpg").read_bytes()
    assert len(data) <= PICTURE_LIMIT
    width, height = jpeg_size(data)
    assert width >= 1200
    assert width > height >= 400


def jpeg_size(data: bytes) -> tuple[int, int]:
    """Width and height from a JPEG's frame header (ITU-T T.81, B.2.2). Raises AssertionError for anything else."""
    assert data[:3] == b"\xff\xd8\xff"
    assert data[-2:] == b"\xff\xd9", "cut short"
    at = 2
    while True:
        marker, length = struct.unpack_from(">HH", data, at)
        if 0xFFC0 <= marker <= 0xFFC2:
            _, height, width = struct.unpack_from(">BHH", data, at + 4)
            return width, height
        at += 2 + length
