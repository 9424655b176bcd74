"""How quantised layers multiply: natively in their format, or dequantised. The two give different numbers.

ComfyUI decides by device when it loads a model. Here that is read from a loaded model and, where nodes differ, forced.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

NATIVE, DEQUANTISED, OWN = "native", "dequantised", "own"
# Files in plain FP8, whose matrices ComfyUI multiplies in FP8 only if asked to (fp8_e4m3fn_fast, --fast).
PLAIN_FP8 = "fp8"

_FP8_CLASS = "fp8_ops.Linear"


def compute_paths(model: Any) -> dict[str, str]:
    """{format: NATIVE or DEQUANTISED} of the quantised layers of a BaseModel; empty if it has none."""
    paths: dict[str, str] = {}
    for layer, name in _layers(model.diffusion_model):
        if paths.get(name) != NATIVE:
            paths[name] = NATIVE if _is_native(layer, name) else DEQUANTISED
    if PLAIN_FP8 not in paths and "float8" in str(model.get_dtype()):
        paths[PLAIN_FP8] = DEQUANTISED
    return paths


def common_paths(
    paths: Mapping[str, str], emulated: Mapping[str, Collection[str]], *, speed: bool
) -> tuple[dict[str, str], list[str], list[str]]:
    """(paths for all nodes, formats that the driver has to dequantise for it, sentences about what differs).

    `paths` are the driver's; `emulated`: by name of a worker, the formats that it can only compute dequantised.
    With `speed` each node takes its own path.
    """
    common, forced, notes = dict(paths), [], []
    for name, path in paths.items():
        if speed:
            common[name] = OWN
        unable = [worker for worker, formats in emulated.items() if name in formats]
        able = [worker for worker in emulated if worker not in unable]
        if path == NATIVE:
            differing, who = unable, ", ".join(unable)
        else:
            # Plain FP8 is multiplied in FP8 only where a user asks for it.
            differing, who = able if name != PLAIN_FP8 else [], "this machine"
        if not differing:
            continue
        if speed:
            here, there = ("natively", "dequantised") if path == NATIVE else ("dequantised", "natively")
            notes.append(f"{name} is computed {here} here and {there} on {', '.join(differing)}: not quite the same")
            continue
        if path == NATIVE:
            common[name] = DEQUANTISED
            forced.append(name)
        notes.append(
            f"{name} is dequantised on all machines because {who} cannot compute it natively; "
            'prefer = "speed" in the cluster lets each take its fastest way'
        )
    return common, forced, notes


def follow(model: Any, paths: Mapping[str, str]) -> None:
    """Have a model of our own compute as `paths` say. Raises RuntimeError for a format that cannot here."""
    own = compute_paths(model)
    for name, path in paths.items():
        if path == NATIVE and own.get(name) != NATIVE:
            raise RuntimeError(
                f"{name} is computed natively on the driver and cannot be here; "
                "start both with the same ComfyUI options on the same kind of GPU"
            )
    for layer, name in _layers(model.diffusion_model):
        if paths.get(name) == DEQUANTISED:
            _dequantise(layer, name)


@contextmanager
def dequantised(model: Any, formats: Collection[str]) -> Iterator[None]:
    """The layers of these formats multiply dequantised for the length of the context; then as before."""
    changed = []
    try:
        for layer, name in _layers(model.diffusion_model):
            if name in formats and _is_native(layer, name):
                _dequantise(layer, name)
                changed.append((layer, name))
        yield
    finally:
        for layer, name in changed:
            if name == PLAIN_FP8:
                del layer.forward_comfy_cast_weights
            else:
                layer._full_precision_mm = False


def _layers(diffusion_model: Any) -> Iterator[tuple[Any, str]]:
    for layer in diffusion_model.modules():
        if getattr(layer, "quant_format", None) is not None and hasattr(layer, "_full_precision_mm"):
            # Where the file itself demands it, all nodes dequantise anyway.
            if not getattr(layer, "_full_precision_mm_config", False):
                yield layer, layer.quant_format
        elif type(layer).__qualname__ == _FP8_CLASS:
            yield layer, PLAIN_FP8


def _is_native(layer: Any, name: str) -> bool:
    if name == PLAIN_FP8:
        return "forward_comfy_cast_weights" not in vars(layer)
    return not layer._full_precision_mm


def _dequantise(layer: Any, name: str) -> None:
    if name == PLAIN_FP8:
        # What fp8_ops.Linear does itself wherever it cannot multiply in FP8.
        layer.forward_comfy_cast_weights = MethodType(type(layer).__mro__[1].forward_comfy_cast_weights, layer)
    else:
        layer._full_precision_mm = True
