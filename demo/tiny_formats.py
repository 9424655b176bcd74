"""Write a tiny model in every weight format that ComfyUI reads, quantised by ComfyUI's own layouts.

ComfyUI is imported only inside functions. The models themselves are tiny_models' job."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .tiny_models import write_model

FAMILY = "flux_schnell"
_FP8_MAX = 448.0
_Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Layer:
    """How one layer is stored: the name in comfy.quant_ops.QUANT_ALGOS, more of its marker, and how it is quantised."""

    format: str
    marker: dict[str, Any] = field(default_factory=dict)
    how: dict[str, Any] = field(default_factory=dict)


_CONVROT = {"convrot": True, "convrot_groupsize": 256}
_E4M3 = Layer("float8_e4m3fn", how={"scale": "recalculate"})
_E5M2 = Layer("float8_e5m2", how={"scale": "recalculate"})
_NVFP4 = Layer("nvfp4")
_INT8 = Layer("int8_tensorwise")
_ROWWISE = Layer("int8_tensorwise", how={"per_channel": True})


def quantise(
    weights: _Weights, layers: dict[str, Layer], *, in_header: bool = False
) -> tuple[_Weights, dict[str, str]]:
    """(tensors, header metadata): `layers` quantised, everything else in BF16. Needs ComfyUI importable.

    `in_header`: the layers' formats stand in the header (_quantization_metadata), not in comfy_quant tensors.
    """
    from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor

    tensors: _Weights = {}
    markers = {}
    for key, weight in weights.items():
        name = key.removesuffix(".weight")
        layer = layers.get(name) if key.endswith(".weight") else None
        if layer is None:
            tensors[key] = weight.to(torch.bfloat16)
            continue
        layout = QUANT_ALGOS[layer.format]["comfy_tensor_layout"]
        quantised: Any = QuantizedTensor.from_float(weight.to(torch.bfloat16), layout, **layer.how)
        tensors.update({part: tensor.contiguous() for part, tensor in quantised.state_dict(key).items()})
        markers[name] = {"format": layer.format, **layer.marker}
    if in_header:
        return tensors, {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": markers})}
    for name, marker in markers.items():
        tensors[f"{name}.comfy_quant"] = torch.frombuffer(bytearray(json.dumps(marker).encode()), dtype=torch.uint8)
    return tensors, {}


def quantisable(weights: _Weights) -> list[str]:
    """Names of the linear layers that quantised releases store in fewer bits: in blocks, and not for modulation."""
    return [
        key.removesuffix(".weight")
        for key, weight in weights.items()
        if key.endswith(".weight") and weight.ndim == 2 and "blocks." in key and "mod" not in key
    ]


def _every(layer: Layer, *, in_header: bool = False) -> _Writer:
    return lambda weights: quantise(weights, dict.fromkeys(quantisable(weights), layer), in_header=in_header)


def _mixed(weights: _Weights) -> tuple[_Weights, dict[str, str]]:
    kinds = (_E4M3, None, _NVFP4, _E5M2, _ROWWISE)
    chosen = {name: kinds[index % len(kinds)] for index, name in enumerate(quantisable(weights))}
    return quantise(weights, {name: layer for name, layer in chosen.items() if layer is not None})


def _plain(dtype: torch.dtype) -> _Writer:
    return lambda weights: ({key: weight.to(dtype) for key, weight in weights.items()}, {})


def _plain_fp8(dtype: torch.dtype) -> _Writer:
    def write(weights: _Weights) -> tuple[_Weights, dict[str, str]]:
        return {key: weight.to(dtype if weight.ndim > 1 else torch.bfloat16) for key, weight in weights.items()}, {}

    return write


def _scaled_fp8(marker: int) -> _Writer:
    """The format before comfy_quant; `marker` elements in `scaled_fp8`: two mean that matrices multiply dequantised."""

    def write(weights: _Weights) -> tuple[_Weights, dict[str, str]]:
        names = set(quantisable(weights))
        tensors: _Weights = {"scaled_fp8": torch.zeros(marker, dtype=torch.float8_e4m3fn)}
        for key, weight in weights.items():
            name = key.removesuffix(".weight")
            if not key.endswith(".weight") or name not in names:
                tensors[key] = weight.to(torch.bfloat16)
                continue
            scale = (weight.abs().max() / _FP8_MAX).float()
            tensors[key] = (weight / scale).to(torch.float8_e4m3fn)
            tensors[f"{name}.scale_weight"], tensors[f"{name}.scale_input"] = scale, torch.tensor(1.0)
        return tensors, {}

    return write


_Writer = Callable[[_Weights], tuple[_Weights, dict[str, str]]]
FORMATS: dict[str, _Writer] = {
    "bf16": _plain(torch.bfloat16),
    "fp16": _plain(torch.float16),
    "fp8_e4m3": _plain_fp8(torch.float8_e4m3fn),
    "fp8_e5m2": _plain_fp8(torch.float8_e5m2),
    "scaled_fp8": _scaled_fp8(0),
    "scaled_fp8_dequantised": _scaled_fp8(2),
    "layered_fp8_e4m3": _every(_E4M3),
    "layered_fp8_e4m3_header": _every(_E4M3, in_header=True),
    "layered_fp8_e5m2": _every(_E5M2),
    "mixed": _mixed,
    "nvfp4": _every(_NVFP4),
    "nvfp4_header": _every(_NVFP4, in_header=True),
    "mxfp8": _every(Layer("mxfp8")),
    "int8": _every(_INT8),
    "int8_rowwise": _every(_ROWWISE),
    "int8_convrot": _every(Layer("int8_tensorwise", _CONVROT, {"per_channel": True, **_CONVROT})),
    "convrot_w4a4": _every(Layer("convrot_w4a4")),
    "asym_w4a8_int8": _every(Layer("asym_w4a8_int8")),
}


def write_format(name: str, folder: Path) -> Path:
    """Write the tiny FAMILY in format `name` (a key of FORMATS) into `folder` and return its path.

    A file that is there already is left as it is. Raises KeyError for an unknown format, and for one that this ComfyUI
    does not know.
    """
    from safetensors.torch import load_file, save_file

    write = FORMATS[name]
    path = Path(folder) / f"{FAMILY}_{name}.safetensors"
    if path.exists():
        return path
    tensors, metadata = write(load_file(write_model(FAMILY, Path(folder))))
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, partial, metadata=metadata or None)
    os.replace(partial, path)
    return path
