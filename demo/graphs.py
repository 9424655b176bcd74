"""Build graphs in ComfyUI's API format: stock nodes around KSampler or the Monarch nodes, to a picture and a latent.

Sending them is comfy_server's job. Standard library only; family sizes come from tiny_families."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .tiny_families import FAMILIES, Family

Graph = dict[str, dict[str, Any]]

# Node ids (keys of the graph) that a caller finds its results under in a history entry.
PICTURE, LATENT, SAMPLER, MODEL = "picture", "latent", "sampler", "model"


def conditioning_node(family: Family, seed: int, tokens: int) -> dict[str, Any]:
    """The node that makes what tiny_models.conditioning(family, seed, tokens) makes."""
    inputs = {
        "seed": seed,
        "tokens": tokens,
        "width": family.context_width,
        "pooled": family.pooled,
        "guidance": family.guidance,
        "attention_mask": family.attention_mask,
        "frame_rate": family.frame_rate,
    }
    return {"class_type": "MonarchDemoConditioning", "inputs": inputs}


def text_to_image(
    model_file: str,
    *,
    family: str = "flux",
    sampler_node: str = "KSampler",
    split: str | None = None,
    split_node: str | None = None,
    loader_node: str = "UNETLoader",
    seed: int = 0,
    steps: int = 4,
    cfg: float | None = None,
    sampler: str = "euler",
    scheduler: str = "simple",
    denoise: float = 1.0,
    batch: int = 1,
    width: int | None = None,
    height: int | None = None,
    length: int | None = None,
    tokens: int = 8,
    negative_tokens: int | None = None,
    lora: str | Sequence[tuple[str, float]] | None = None,
    step_log: str | None = None,
    step_delay: float = 0.0,
    prefix: str = "monarch",
) -> Graph:
    """A graph that renders `model_file` (a name in models/diffusion_models) of `family`.

    sampler_node: "KSampler" or "MonarchSampler", which also takes `split`. split_node: value of a MonarchSplit before
    the sampler, or None for no such node. lora: a file in models/loras at strength 1, or (file, strength) pairs.
    width and height in pixels, length in frames of video; None = the family's default, as for cfg. step_log: file in
    the output folder that gets a line per step; step_delay: seconds of sleep after each step (needs step_log).
    """
    entry = FAMILIES[family]
    graph: Graph = {
        MODEL: {"class_type": loader_node, "inputs": {"unet_name": model_file, "weight_dtype": "default"}},
        "positive": conditioning_node(entry, 1, tokens),
        "negative": conditioning_node(entry, 2, tokens if negative_tokens is None else negative_tokens),
        "empty": _empty_latent(entry, batch, width, height, length),
    }
    model = MODEL
    for index, (file, strength) in enumerate([(lora, 1.0)] if isinstance(lora, str) else lora or []):
        inputs = {"model": [model, 0], "lora_name": file, "strength_model": strength}
        model = f"lora{index}"
        graph[model] = {"class_type": "LoraLoaderModelOnly", "inputs": inputs}
    if step_log is not None:
        inputs = {"model": [model, 0], "file": step_log, "delay": step_delay}
        model = "steps"
        graph[model] = {"class_type": "MonarchDemoStepLog", "inputs": inputs}
    if split_node is not None:
        inputs = {"model": [model, 0], "split": split_node}
        model = "split"
        graph[model] = {"class_type": "MonarchSplit", "inputs": inputs}
    inputs = {
        "model": [model, 0],
        "seed": seed,
        "steps": steps,
        "cfg": entry.cfg if cfg is None else cfg,
        "sampler_name": sampler,
        "scheduler": scheduler,
        "positive": ["positive", 0],
        "negative": ["negative", 0],
        "latent_image": ["empty", 0],
        "denoise": denoise,
    }
    if split is not None:
        inputs["split"] = split
    graph[SAMPLER] = {"class_type": sampler_node, "inputs": inputs}
    graph.update(outputs([SAMPLER, 0], prefix))
    return graph


def outputs(samples: list, prefix: str) -> Graph:
    """The nodes that save the LATENT link `samples` as pictures (node "picture") and as a tensor (node "latent")."""
    return {
        "decode": {"class_type": "MonarchDemoLatentPicture", "inputs": {"samples": samples, "scale": 8}},
        PICTURE: {"class_type": "SaveImage", "inputs": {"images": ["decode", 0], "filename_prefix": prefix}},
        LATENT: {
            "class_type": "MonarchDemoSaveLatent",
            "inputs": {"samples": samples, "filename_prefix": f"{prefix}_latent"},
        },
    }


def _empty_latent(
    family: Family, batch: int, width: int | None, height: int | None, length: int | None
) -> dict[str, Any]:
    inputs: dict[str, Any] = dict(family.pixels)
    for name, value in (("width", width), ("height", height), ("length", length)):
        if value is not None and name in inputs:
            inputs[name] = value
    return {"class_type": family.empty_node, "inputs": {**inputs, "batch_size": batch}}
