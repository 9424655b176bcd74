"""What a file says about how each of its layers is quantised, in the three ways that ComfyUI understands.

See detect_layer_quantization and convert_old_quants in comfy/utils.py. The values are the handlers' business.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO

from .families import PREFIXES
from .header import Header, TensorInfo, UnreadableFile, open_regular
from .header_text import BROKEN_WRITER

METADATA_KEY = "_quantization_metadata"  # header: {"layers": {name: settings}}
TENSOR_PART = "comfy_quant"  # uint8 tensor of a layer: settings
LEGACY_MARK = "scaled_fp8"  # tensor of the whole model: every layer with a scale_weight is scaled FP8
LEGACY_SCALE = "scale_weight"

# Released files need about 60 bytes a layer. The limits keep what the JSON may become in memory below 100 MB.
_MAX_METADATA_CHARS = 2**21
_MAX_TENSOR_BYTES = 4096
_MAX_TENSORS_BYTES = 2**21


@dataclass(frozen=True, slots=True)
class Marker:
    """How a file says that one layer is quantised.

    settings: ComfyUI's settings of the layer, of which only 'format' is always there; legacy: it follows from the
    file-wide scaled_fp8 tensor; broken: what is wrong with the settings, as in "layer 'x' <broken>".
    """

    settings: Mapping[str, object]
    legacy: bool = False
    broken: str = ""

    @property
    def format(self) -> str | None:
        name = self.settings.get("format")
        return name if isinstance(name, str) else None

    def setting(self, name: str, default: object) -> object:
        """A setting of the layer, which some writers put into 'params'."""
        params = self.settings.get("params")
        inner = params.get(name, default) if isinstance(params, dict) else default
        return self.settings.get(name, inner)


def read_markers(header: Header, layers: Mapping[str, Mapping[str, TensorInfo]]) -> dict[str, Marker]:
    """Marker by layer; `layers` are the file's tensors by layer and part.

    Raises UnreadableFile if the header's own metadata cannot be read, as ComfyUI does.
    """
    markers: dict[str, Marker] = dict(_in_tensors(header, layers))
    if METADATA_KEY in header.metadata:
        for name, settings in _in_metadata(header).items():
            # Of a file with a prefix, ComfyUI looks the names up with and without it.
            known = next((prefix + name for prefix in ("", *PREFIXES) if prefix + name in layers), name)
            markers[known] = _marker(settings)
    else:
        markers.update(_legacy(layers))
    return markers


def _in_metadata(header: Header) -> Mapping[str, object]:
    text = header.metadata[METADATA_KEY]
    if len(text) > _MAX_METADATA_CHARS:
        cause = f"its {METADATA_KEY} is {len(text)} characters long, above the limit of {_MAX_METADATA_CHARS}"
        raise UnreadableFile(header.path, cause, BROKEN_WRITER)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise UnreadableFile(header.path, f"its {METADATA_KEY} is not valid JSON", BROKEN_WRITER) from None
    layers = content.get("layers") if isinstance(content, dict) else None
    if not isinstance(layers, dict):
        raise UnreadableFile(header.path, f"its {METADATA_KEY} lists no layers", BROKEN_WRITER)
    return layers


def _in_tensors(header: Header, layers: Mapping[str, Mapping[str, TensorInfo]]) -> Iterator[tuple[str, Marker]]:
    marked = {name: parts[TENSOR_PART] for name, parts in layers.items() if TENSOR_PART in parts}
    if not marked:
        return
    total = sum(info.nbytes for info in marked.values())
    if total > _MAX_TENSORS_BYTES:
        cause = f"its {TENSOR_PART} tensors have {total} bytes, above the limit of {_MAX_TENSORS_BYTES}"
        raise UnreadableFile(header.path, cause, BROKEN_WRITER)
    with open_regular(header.path) as file:
        # In the file's order, which spares a disk most of its seeks.
        for name, info in sorted(marked.items(), key=lambda item: item[1].begin):
            yield name, _read_tensor(file, header.data_start, info)


def _read_tensor(file: BinaryIO, data_start: int, info: TensorInfo) -> Marker:
    if info.dtype != "U8" or len(info.shape) != 1 or info.nbytes > _MAX_TENSOR_BYTES:
        return Marker({}, broken=f"has a {TENSOR_PART} that is not a short text")
    file.seek(data_start + info.begin, os.SEEK_SET)
    try:
        return _marker(json.loads(file.read(info.nbytes)))
    except (ValueError, RecursionError):
        return Marker({}, broken=f"has a {TENSOR_PART} that is not valid JSON")


def _marker(settings: object) -> Marker:
    if not isinstance(settings, dict):
        return Marker({}, broken="has quantisation settings that are not a JSON object")
    return Marker(settings)


def _legacy(layers: Mapping[str, Mapping[str, TensorInfo]]) -> Iterator[tuple[str, Marker]]:
    # A mark covers the model that it stands in: the whole file, or in a checkpoint one of several.
    models = tuple(f"{name}." if name else "" for name, parts in layers.items() if LEGACY_MARK in parts)
    if not models:
        return
    for name, parts in layers.items():
        if LEGACY_SCALE in parts and name.startswith(models):
            yield name, Marker({"format": "float8_e4m3fn"}, legacy=True)
