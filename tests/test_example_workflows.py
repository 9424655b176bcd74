"""The graphs of the template browser: sound files of the frontend's form, with a picture and a note that helps.

Whether a real ComfyUI knows every node and value in them is for tests/comfy/test_example_workflows.py to say."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent.parent / "example_workflows"
PATHS = sorted(FOLDER.glob("*.json"))
PICTURE_LIMIT = 200 * 1024
MODEL_SUFFIX = ".safetensors"

# Widgets of each node type in their order in widgets_values. Those that ComfyUI 0.8 lacks (CreateVideo's bit_depth,
# SaveVideo's format.codec) must stay out, or the graph does not load there.
WIDGETS: dict[str, tuple[str, ...]] = {
    "CheckpointLoaderSimple": ("ckpt_name",),
    "CLIPLoader": ("clip_name", "type", "device"),
    "CLIPTextEncode": ("text",),
    "ConditioningZeroOut": (),
    "CreateVideo": ("fps",),
    "DualCLIPLoader": ("clip_name1", "clip_name2", "type", "device"),
    "EmptyHunyuanLatentVideo": ("width", "height", "length", "batch_size"),
    "EmptyLatentImage": ("width", "height", "batch_size"),
    "EmptySD3LatentImage": ("width", "height", "batch_size"),
    "FluxGuidance": ("guidance",),
    "MarkdownNote": ("text",),
    "ModelSamplingSD3": ("shift",),
    "SaveImage": ("filename_prefix",),
    "SaveVideo": ("filename_prefix", "format", "codec"),
    "UNETLoader": ("unet_name", "weight_dtype"),
    "VAEDecode": (),
    "VAELoader": ("vae_name",),
    "MonarchSampler": (
        "seed", "control_after_generate", "steps", "cfg", "sampler_name", "scheduler", "denoise", "split",
    ),
}  # fmt: skip


@pytest.fixture(params=PATHS, ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def graph(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def nodes_of(graph: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [node for node in graph["nodes"] if node["type"] == kind]


def widgets_of(node: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(WIDGETS[node["type"]], node.get("widgets_values") or [], strict=True))


def model_files(graph: dict[str, Any]) -> list[str]:
    return [
        value
        for node in graph["nodes"]
        if node["type"] != "MarkdownNote"
        for value in widgets_of(node).values()
        if isinstance(value, str) and value.endswith(MODEL_SUFFIX)
    ]


def test_there_is_one_for_each_promised_family() -> None:
    assert [path.stem for path in PATHS] == ["flux_dev", "sdxl", "wan_2.1_text_to_video"]


def test_it_is_in_the_form_that_the_frontend_saves(graph: dict[str, Any]) -> None:
    assert graph["version"] == 0.4
    assert {"id", "revision", "nodes", "links", "groups", "last_node_id", "last_link_id", "extra"} <= set(graph)
    ids = [node["id"] for node in graph["nodes"]]
    assert len(set(ids)) == len(ids)
    assert max(ids) <= graph["last_node_id"]
    assert max(link[0] for link in graph["links"]) <= graph["last_link_id"]


def test_only_known_nodes_with_their_widgets_in_order(graph: dict[str, Any]) -> None:
    for node in graph["nodes"]:
        assert node["type"] in WIDGETS, f"{node['type']} is not in this test's list of stock nodes"
        values = widgets_of(node)
        if "widgets_values_named" in node:
            assert node["widgets_values_named"] == values, node["type"]
        if node["type"] != "MarkdownNote":
            slots = [slot["widget"]["name"] for slot in node["inputs"] if "widget" in slot]
            assert slots == [name for name in values if name != "control_after_generate"], node["type"]
        assert node["mode"] == 0, f"{node['type']} is muted or bypassed"


def test_every_link_has_two_ends_of_its_type_and_both_know_it(graph: dict[str, Any]) -> None:
    nodes = {node["id"]: node for node in graph["nodes"]}
    for number, source, output, target, slot, kind in graph["links"]:
        start, end = nodes[source]["outputs"][output], nodes[target]["inputs"][slot]
        assert start["type"] == end["type"] == kind
        assert number in start["links"]
        assert end["link"] == number
    numbers = {link[0] for link in graph["links"]}
    assert len(numbers) == len(graph["links"])
    for node in graph["nodes"]:
        assert {slot["link"] for slot in node["inputs"]} - {None} <= numbers
        assert {number for slot in node["outputs"] for number in slot["links"] or []} <= numbers


def test_no_socket_is_left_open_but_optional_ones(graph: dict[str, Any]) -> None:
    for node in graph["nodes"]:
        open_slots = [slot["name"] for slot in node["inputs"] if "widget" not in slot and slot["link"] is None]
        assert open_slots == (["audio"] if node["type"] == "CreateVideo" else []), node["type"]


def test_the_sampler_is_ours_with_settings_that_split(graph: dict[str, Any]) -> None:
    (sampler,) = nodes_of(graph, "MonarchSampler")
    values = widgets_of(sampler)
    assert isinstance(values["seed"], int)
    assert values["control_after_generate"] in ("fixed", "randomize", "increment", "decrement")
    assert values["split"] == "auto"
    assert values["denoise"] == 1
    assert 1 <= values["steps"] <= 50
    latent = next(node for node in graph["nodes"] if node["type"].startswith("Empty"))
    rows = widgets_of(latent)["batch_size"] * (2 if values["cfg"] > 1 else 1)
    assert rows == 2, "the example would run on one machine"


def test_the_note_names_every_model_file_and_its_folder(graph: dict[str, Any]) -> None:
    (note,) = nodes_of(graph, "MarkdownNote")
    text = widgets_of(note)["text"]
    known = {model["name"]: model for node in graph["nodes"] for model in node["properties"].get("models", [])}
    files = model_files(graph)
    assert files
    for name in files:
        # The frontend offers the download of a missing file from the same three facts.
        assert f"[{name}]({known[name]['url']}) in `models/{known[name]['directory']}`" in text
        assert known[name]["url"].endswith("/" + name)
    assert "monarch-split worker" in text


def test_nothing_overlaps(graph: dict[str, Any]) -> None:
    title = 30  # a node's title bar lies above its position
    boxes = [
        (node["type"], x, y - title, x + width, y + height)
        for node in graph["nodes"]
        for (x, y), (width, height) in [(node["pos"], node["size"])]
    ]
    for number, (one, left, top, right, bottom) in enumerate(boxes):
        for other, left2, top2, right2, bottom2 in boxes[number + 1 :]:
            apart = right <= left2 or right2 <= left or bottom <= top2 or bottom2 <= top
            assert apart, f"{one} and {other}"


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
