"""Builds safetensors files byte by byte, so that tests can also build bad ones. Tensor data is zeros unless given."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from monarch_split.formats.header_text import DTYPE_BITS

Tensors = dict[str, tuple[str, list[int]]]

GGUF_V2 = b"GGUF" + (2).to_bytes(4, "little") + bytes(64)
GGUF_V3 = b"GGUF" + (3).to_bytes(4, "little") + bytes(64)


def entry(dtype: str, shape: Sequence[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def build(header: object, data: int | bytes = 0) -> bytes:
    """A file with this header, as JSON text or something to dump as JSON, and this data or number of zeros."""
    text = header if isinstance(header, str) else json.dumps(header)
    raw = text.encode()
    return len(raw).to_bytes(8, "little") + raw + bytes(data)


def lay_out(
    tensors: Mapping[str, tuple[str, Sequence[int]]],
    metadata: dict[str, str] | None = None,
    data: Mapping[str, bytes] | None = None,
) -> bytes:
    """A valid file with the given {name: (dtype, shape)}, one after the other; `data` of some of them."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    content = bytearray()
    for name, (dtype, shape) in tensors.items():
        bits = DTYPE_BITS[dtype]
        for size in shape:
            bits *= size
        header[name] = entry(dtype, shape, len(content), len(content) + bits // 8)
        content += (data or {}).get(name, bytes(bits // 8))
    return build(header, bytes(content))


# Of every format that ComfyUI reads in layers: its tensors, by their names in the layer, and its settings.
# Sizes differ in both directions, and are no multiples of 128, so that a scale in the wrong shape is one.
ROWS, COLUMNS = 96, 512
QUANTISED: dict[str, tuple[Tensors, dict[str, Any]]] = {
    "fp8_e4m3fn_scaled": (
        {"weight": ("F8_E4M3", [ROWS, COLUMNS]), "weight_scale": ("F32", []), "input_scale": ("F32", [])},
        {"format": "float8_e4m3fn"},
    ),
    "fp8_e5m2_scaled": (
        {"weight": ("F8_E5M2", [ROWS, COLUMNS]), "weight_scale": ("F32", [1])},
        {"format": "float8_e5m2", "full_precision_matrix_mult": True},
    ),
    "nvfp4": (
        {
            "weight": ("U8", [ROWS, COLUMNS // 2]),
            "weight_scale": ("F8_E4M3", [128, COLUMNS // 16]),
            "weight_scale_2": ("F32", []),
            "input_scale": ("F32", []),
            "pre_quant_scale": ("BF16", [COLUMNS]),
        },
        {"format": "nvfp4"},
    ),
    "mxfp8": (
        {"weight": ("F8_E4M3", [ROWS, COLUMNS]), "weight_scale": ("F8_E8M0", [128, COLUMNS // 32])},
        {"format": "mxfp8"},
    ),
    "int8_tensorwise": (
        {"weight": ("I8", [ROWS, COLUMNS]), "weight_scale": ("F32", [])},
        {"format": "int8_tensorwise"},
    ),
    "int8_rowwise": (
        {"weight": ("I8", [ROWS, COLUMNS]), "weight_scale": ("F32", [ROWS, 1])},
        {"format": "int8_tensorwise"},
    ),
    "int8_convrot": (
        {"weight": ("I8", [ROWS, COLUMNS]), "weight_scale": ("F32", [ROWS, 1])},
        {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256},
    ),
    "convrot_w4a4": (
        {"weight": ("I8", [ROWS, COLUMNS // 2]), "weight_scale": ("F32", [ROWS])},
        {"format": "convrot_w4a4"},
    ),
    "asym_w4a8_int8": (
        {
            "weight": ("I8", [ROWS, COLUMNS // 2]),
            "weight_s_rel": ("F8_E4M3", [ROWS, COLUMNS // 16]),
            "weight_s_channel": ("F32", [ROWS]),
            "weight_codebook": ("F32", [16]),
        },
        {"format": "asym_w4a8_int8"},
    ),
}
OPTIONAL = {"input_scale", "pre_quant_scale", "weight_codebook"}


def quantised(
    layers: Mapping[str, tuple[Tensors, Any]], *, in_header: bool = False, plain: Tensors | None = None
) -> bytes:
    """A file of these layers, {name: (tensors, settings or None)}, and of `plain` tensors.

    Settings go into comfy_quant tensors, or with `in_header` into the header's metadata; as text they are taken as is.
    """
    tensors: Tensors = dict(plain or {})
    data: dict[str, bytes] = {}
    in_metadata: dict[str, Any] = {}
    for layer, (parts, settings) in layers.items():
        tensors.update({f"{layer}.{part}": tensor for part, tensor in parts.items()})
        if settings is None:
            continue
        if in_header:
            in_metadata[layer] = settings
            continue
        raw = (settings if isinstance(settings, str) else json.dumps(settings)).encode()
        tensors[f"{layer}.comfy_quant"], data[f"{layer}.comfy_quant"] = ("U8", [len(raw)]), raw
    metadata = {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": in_metadata})}
    return lay_out(tensors, metadata if in_header else None, data)


# Formats that ComfyUI does not read: the tensors of a layer, what the format is called, and words of its refusal.
_N, _K = FOREIGN_SHAPE = [64, 256]
_NF4: Tensors = {
    "weight": ("U8", [_N * _K // 2, 1]),
    "weight.absmax": ("F32", [_N * _K // 64]),
    "weight.quant_map": ("F32", [16]),
}
_STATE = "weight.quant_state.bitsandbytes__"
_SVDQUANT: Tensors = {
    "qweight": ("I8", [_N, _K // 2]),
    "wscales": ("BF16", [_K // 64, _N]),
    "smooth_factor": ("BF16", [_K]),
}
FOREIGN: dict[str, tuple[Tensors, str, str]] = {
    "nf4": ({**_NF4, f"{_STATE}nf4": ("U8", [80])}, "bnb_nf4", "bitsandbytes NF4"),
    "fp4": ({**_NF4, f"{_STATE}fp4": ("U8", [80])}, "bnb_fp4", "bitsandbytes FP4"),
    "nf4_without_state": (_NF4, "bnb_nf4", "bitsandbytes NF4"),
    "bnb_int8": ({"weight": ("I8", [_N, _K]), "SCB": ("F32", [_N])}, "bnb_int8", "bitsandbytes INT8"),
    "gptq": (
        {"qweight": ("I32", [_K // 8, _N]), "qzeros": ("I32", [_K // 128, _N // 8]), "scales": ("F16", [_K // 128, _N])}
        | {"g_idx": ("I32", [_K])},
        "gptq",
        "GPTQ",
    ),
    "gptq_without_order": (
        {
            "qweight": ("I32", [_K // 8, _N]),
            "qzeros": ("I32", [_K // 128, _N // 8]),
            "scales": ("F16", [_K // 128, _N]),
        },
        "gptq",
        "GPTQ",
    ),
    "awq": (
        {
            "qweight": ("I32", [_K, _N // 8]),
            "qzeros": ("I32", [_K // 128, _N // 8]),
            "scales": ("F16", [_K // 128, _N]),
        },
        "awq",
        "AWQ",
    ),
    "torchao": ({"weight_qdata": ("I8", [_N, _K]), "weight_scale": ("F32", [_N, 1])}, "torchao", "torchao"),
    "torchao_fp8": ({"_weight_qdata": ("F8_E4M3", [_N, _K]), "_weight_scale": ("F32", [_N, 1])}, "torchao", "torchao"),
    "svdquant": ({**_SVDQUANT, "proj_down": ("BF16", [_K, 16]), "proj_up": ("BF16", [_N, 16])}, "svdquant", "nunchaku"),
    "svdquant_lora_names": ({**_SVDQUANT, "lora_down": ("BF16", [_K, 16])}, "svdquant", "nunchaku"),
    "compressed_tensors": (
        {
            "weight_packed": ("I32", [_N, _K // 8]),
            "weight_scale": ("BF16", [_N, _K // 128]),
            "weight_shape": ("I64", [2]),
        },
        "compressed_tensors",
        "compressed-tensors",
    ),
    "quanto": ({"weight._data": ("I8", [_N, _K]), "weight._scale": ("BF16", [_N, 1])}, "quanto", "optimum-quanto"),
    "hqq": ({"W_q": ("U8", [_N, _K // 2]), "scale": ("BF16", [_N, 4]), "zero": ("BF16", [_N, 4])}, "hqq", "HQQ"),
    "deepseek_fp8": (
        {"weight": ("F8_E4M3", [_N, _K]), "weight_scale_inv": ("F32", [1, 2])},
        "fp8_e4m3fn_scaled",
        "neither a comfy_quant tensor nor",
    ),
    "nvfp4_without_metadata": (
        {"weight": ("U8", [_N, _K // 2]), "weight_scale": ("F8_E4M3", [128, _K // 16]), "weight_scale_2": ("F32", [])},
        "nvfp4",
        "neither a comfy_quant tensor nor",
    ),
    "integers": ({"weight": ("I8", [_N, _K])}, "unknown", "stored as I8 and nothing says how to read that"),
    "packed_under_another_name": ({"codes": ("U8", [_N, _K])}, "unknown", "stored as U8"),
    "four_bit_floats": ({"weight": ("F4", [_N, _K])}, "unknown", "stored as F4"),
    "indices": ({"weight": ("I64", [_N, _K])}, "unknown", "stored as I64"),
    "complex": ({"weight": ("C64", [_N, _K])}, "unknown", "stored as C64"),
}
