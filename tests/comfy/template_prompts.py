"""Turns a template into the prompt that the browser would send, by what a ComfyUI server says of its nodes, and makes
it small enough for tiny models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Prompt = dict[str, dict[str, Any]]
# How ComfyUI describes a node class (its entry in /object_info).
Describe = Callable[[str], dict[str, Any]]

IN_THE_BROWSER = {"MarkdownNote"}
# Widgets that the browser adds of its own; their values are saved, but not sent.
_BROWSER_WIDGETS = {"control_after_generate", "upload"}
_WIDGET_TYPES = {"INT", "FLOAT", "FLOAT,INT", "STRING", "BOOLEAN", "COMBO", "COMFY_DYNAMICCOMBO_V3"}
_TINY_VALUES = {"width": 128, "height": 128, "length": 9, "frames_number": 9}
STEPS = 4


def widgets(described: Mapping[str, Any]) -> list[str]:
    """Names in the order in which a graph saves their values."""
    names: list[str] = []
    for section in ("required", "optional"):
        for name in described["input_order"].get(section, []):
            kind, *more = described["input"][section][name]
            settings = more[0] if more else {}
            if not isinstance(kind, list) and (kind not in _WIDGET_TYPES or settings.get("forceInput")):
                continue
            names.append(name)
            names += ["control_after_generate"] if settings.get("control_after_generate") else []
            names += ["upload"] if settings.get("image_upload") else []
    return names


def as_prompt(graph: Mapping[str, Any], describe: Describe) -> Prompt:
    """The graph in API format. AssertionError for a node that has other sockets, values or links than ComfyUI says."""
    links = {number: (source, output, kind) for number, source, output, _, _, kind in graph["links"]}
    nodes = {node["id"]: node for node in graph["nodes"] if node["type"] not in IN_THE_BROWSER}
    prompt: Prompt = {}
    for node in nodes.values():
        described = describe(node["type"])
        known = {**described["input"].get("required", {}), **described["input"].get("optional", {})}
        names, values = widgets(described), node.get("widgets_values", [])
        assert len(values) <= len(names), node["type"]
        # Widgets may have come behind those that the template knows.
        values = values + [known[name][1].get("default") for name in names[len(values) :]]
        sent = {name: value for name, value in zip(names, values, strict=True) if name not in _BROWSER_WIDGETS}
        for slot in node["inputs"]:
            assert slot["name"] in known, f"{node['type']} has no input {slot['name']}"
            kind = known[slot["name"]][0]
            assert slot["type"] == ("COMBO" if isinstance(kind, list) else kind), f"{node['type']}.{slot['name']}"
            if slot["link"] is not None:
                source, output, kind = links[slot["link"]]
                given = describe(nodes[source]["type"])["output"][output]
                assert given == kind == slot["type"], f"{nodes[source]['type']} to {node['type']}.{slot['name']}"
                sent[slot["name"]] = [str(source), output]
        assert set(described["input"].get("required", {})) <= set(sent), f"{node['type']} lacks an input"
        if node["type"] == "SaveVideo":
            sent["format.codec"] = "auto"  # what the browser adds where the codec depends on the format
        prompt[str(node["id"])] = {"class_type": node["type"], "inputs": sent}
    return prompt


def without_files(prompt: Prompt, files: set[str]) -> Prompt:
    """The prompt with names of model files that do not exist, which ComfyUI refuses after checking all else."""
    return {
        number: {
            **node,
            "inputs": {
                name: f"absent_{value}" if isinstance(value, str) and value in files else value
                for name, value in node["inputs"].items()
            },
        }
        for number, node in prompt.items()
    }


def made_tiny(prompt: Prompt, encode: Callable[[int], dict[str, Any]], mode: str) -> Prompt:
    """The prompt for tiny models: small, short, few steps, split by `mode`, and without a text encoder.

    A tiny text encoder cannot be had: ComfyUI knows them in their full sizes alone. encode(seed) is the node of random
    conditioning that takes the place of a CLIPTextEncode; nodes that make a CLIP are left out.
    """
    tiny: Prompt = {}
    for number, node in prompt.items():
        kind, inputs = node["class_type"], dict(node["inputs"])
        if kind in ("CLIPLoader", "DualCLIPLoader", "LTXAVTextEncoderLoader", "T5TokenizerOptions"):
            continue
        if kind == "CLIPTextEncode":
            tiny[number] = encode(int(number))
            continue
        inputs.update({name: value for name, value in _TINY_VALUES.items() if name in inputs})
        if "start_at_step" in inputs:  # two stages: half of the steps each
            middle = STEPS // 2
            first = inputs["start_at_step"] == 0
            inputs.update(steps=STEPS, start_at_step=0 if first else middle, end_at_step=middle if first else STEPS)
        elif "steps" in inputs:
            inputs["steps"] = STEPS
        if inputs.get("split", "off") != "off":
            inputs["split"] = mode
        tiny[number] = {"class_type": kind, "inputs": inputs}
    return tiny
