"""What of transformer_options travels to a worker, and what stands in the way of a split.

Plain data travels. Python code that would run inside the forward cannot, so it is named and the forward runs locally.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .codec import NotPlainData, pack_plain

# What ComfyUI keeps code in: it never travels, and nothing from the network may set it.
CODE_OPTIONS = frozenset({"wrappers", "callbacks", "patches", "patches_replace", "optimized_attention_override"})
# Bookkeeping of the driver's ComfyUI, on which no result depends, or which each machine sets for itself.
_DRIVER_ONLY = CODE_OPTIONS | {
    "uuids",
    "context_window",
    "easycache",
    "prefetch_dynamic_vbars",
    "multigpu_thread_device",
}
# Tensors and dicts that forwards read. Others might hold what a forward remembers from one step to the next, which
# cannot be in two places, so they do not travel.
_READ_ONLY = frozenset(
    {"sigmas", "sample_sigmas", "cond_or_uncond", "rope_options", "grid_sizes", "img_slice", "activations_shape"}
    | {"original_shape", "block", "chroma_radiance_options", "stg_self_attn_blocks", "stg_skip_self_attn"}
)
# Wrapper kinds that run around the forward, on the driver. DIFFUSION_MODEL wrappers run inside it.
_OUTSIDE = frozenset(
    {"outer_sample", "prepare_sampling", "sampler_sample", "predict_noise", "calc_cond_batch", "apply_model"}
)


# Entries of arguments that a forward builds for itself where they are missing, and that hold ComfyUI's own objects.
_REBUILT = {"minimax_payload": "layout"}


class NotReproducible(Exception):
    """A MODEL or a forward that a worker cannot reproduce; `reasons` name what stands in the way."""

    def __init__(self, reasons: Iterable[str]) -> None:
        self.reasons = tuple(dict.fromkeys(reasons))
        super().__init__("; ".join(self.reasons))


def owner(code: object) -> str:
    """Name of a callable and where it comes from, for a message to a person."""
    target = getattr(code, "__func__", code)
    if not hasattr(target, "__qualname__"):
        target = type(target)
    module = str(getattr(target, "__module__", "")).replace("_x_", ".").replace("\\", "/")
    module = module.rsplit("custom_nodes/", 1)[-1].rsplit("custom_nodes.", 1)[-1]
    name = str(getattr(target, "__qualname__", "")).split(".<locals>")[0]
    return f"{name} ({module})" if module else name


def code_in_the_forward(options: dict[str, Any]) -> list[str]:
    """Reasons why a forward with these transformer_options cannot be reproduced elsewhere; empty if there are none."""
    reasons = []
    for kind, by_key in (options.get("wrappers") or {}).items():
        if kind not in _OUTSIDE:
            reasons += [
                f"a model wrapper runs inside the forward: {key or owner(functions[0])}"
                for key, functions in by_key.items()
                if functions
            ]
    for name, functions in (options.get("patches") or {}).items():
        reasons += [f"a patch runs inside the forward: {name}, {owner(function)}" for function in functions]
    for name, blocks in (options.get("patches_replace") or {}).items():
        reasons += [f"a patch replaces a part of the forward: {name}, {owner(code)}" for code in blocks.values()]
    override = options.get("optimized_attention_override")
    if override is not None:
        reasons.append(f"attention is overridden: {owner(override)}")
    return list(dict.fromkeys(reasons))


def _is_setting(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_setting(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def plain_options(options: dict[str, Any]) -> dict[str, Any]:
    """The part of transformer_options that travels. Raises NotReproducible with what cannot."""
    reasons = code_in_the_forward(options)
    plain = {}
    for name, value in options.items():
        if name in _DRIVER_ONLY:
            continue
        if _is_setting(value):
            plain[name] = value
            continue
        try:
            pack_plain(value, name)
        except NotPlainData as error:
            reasons.append(f"transformer_options[{name!r}] holds {owner(error.value)}, which cannot be sent")
            continue
        if name in _READ_ONLY:
            plain[name] = value
        else:
            reasons.append(f"transformer_options[{name!r}] may hold state of the model, which cannot be in two places")
    if reasons:
        raise NotReproducible(reasons)
    return plain


def plain_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of a forward, but transformer_options, without what every machine builds for itself.

    Raises NotPlainData for what cannot travel.
    """
    plain = {name: value for name, value in arguments.items() if name != "transformer_options"}
    for name, entry in _REBUILT.items():
        if isinstance(plain.get(name), dict):
            plain[name] = {key: value for key, value in plain[name].items() if key != entry}
    pack_plain(plain, "the forward's arguments")
    return plain
