"""What a model file is and whether Monarch can use it, from its first bytes and header alone.

Files that cannot work are refused here, before anything is read or sent; loading them is ComfyUI's.
"""

from __future__ import annotations

from .gguf import gguf_refusal, is_gguf_file, is_gguf_model
from .header import Header, TensorInfo, UnreadableFile, read_header
from .inspection import (
    FileReport,
    UnsupportedFile,
    compute_paths,
    inspect_file,
    require_loadable,
    require_splittable,
)
from .registry import Node

__all__ = [
    "FileReport",
    "Header",
    "Node",
    "TensorInfo",
    "UnreadableFile",
    "UnsupportedFile",
    "compute_paths",
    "gguf_refusal",
    "inspect_file",
    "is_gguf_file",
    "is_gguf_model",
    "read_header",
    "require_loadable",
    "require_splittable",
]
