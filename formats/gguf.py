"""Recognise GGUF files and MODELs made from them, and word their refusal.

GGUF is not read here or anywhere else in the pack; the pack that loads it is not imported.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .header import UnreadableFile, display_name, open_regular
from .registry import FORMATS_READ

MAGIC = b"GGUF"  # first four bytes of every version, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

_CLASS_MARKS = ("gguf", "ggml")  # GGUFModelPatcher, GGMLOps, GGMLLayer, GGMLTensor and what forks derive from them


def is_gguf_file(path: str | os.PathLike[str]) -> bool:
    """Whether the file's content is GGUF, whatever it is called. A file that cannot be opened is not."""
    try:
        with open_regular(Path(path)) as file:
            return file.read(len(MAGIC)) == MAGIC
    except (UnreadableFile, OSError):
        return False


def is_gguf_model(patcher: object) -> bool:
    """Whether a MODEL (comfy ModelPatcher) holds GGUF weights; looks at class names alone.

    The patcher's class settles it for a MODEL straight from a GGUF loader, its operations for one that another
    pack wrapped anew; the classes of modules and weights are only looked at when neither says so.
    """
    model = getattr(patcher, "model", None)
    operations = getattr(getattr(model, "model_config", None), "custom_operations", None)
    return _is_marked(patcher) or _is_marked(model) or _is_marked(operations) or _holds_marked_weights(model)


def gguf_refusal(path: str | os.PathLike[str] | None = None, patcher: object = None) -> str:
    """What to tell a person whose model is GGUF: names the file, or the MODEL's classes where no file is known."""
    if path is not None:
        subject = f"{display_name(path)} is a GGUF file"
    else:
        model = type(getattr(patcher, "model", None)).__name__
        subject = f"This {model} model ({type(patcher).__name__}) was loaded from a GGUF file"
    return (
        f"{subject}, and GGUF cannot be split by Monarch. "
        f"Use a {FORMATS_READ} safetensors file of the same model instead."
    )


def _holds_marked_weights(model: Any) -> bool:
    if not callable(getattr(model, "modules", None)) or not callable(getattr(model, "parameters", None)):
        return False
    # A model has thousands of weights but a handful of classes.
    return any(map(_is_marked_class, set(map(type, model.modules())) | set(map(type, model.parameters()))))


def _is_marked(thing: object) -> bool:
    return _is_marked_class(thing if isinstance(thing, type) else type(thing))


def _is_marked_class(cls: type) -> bool:
    # Qualified names, because the layers of GGMLOps are nested in it (GGMLOps.Linear); a function around a class
    # says nothing about it.
    names = [base.__qualname__.rpartition("<locals>.")[2].lower() for base in cls.__mro__]
    return any(mark in name for name in names for mark in _CLASS_MARKS)
