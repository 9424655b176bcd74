"""Loads a MODEL with one of ComfyUI's loaders, and refuses it if the file's tensors are not those of the model.

ComfyUI only writes that to its log, and computes with whatever was in memory in place of missing weights.
"""

from __future__ import annotations

import ast
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..formats import UnsupportedFile
from ..formats.header import display_name

# What comfy.model_base and comfy.ops log (since before 0.8.0); a list of names follows, or one layer's name.
_MISSING, _UNEXPECTED, _NO_WEIGHT = "unet missing: ", "unet unexpected: ", "Missing weight for layer "

# Names that released files lack or have too many of, and that no forward of ComfyUI reads.
_IGNORED_MISSING = ("norm_final.weight",)  # Z-Image; older ComfyUI makes the norm and does not use it
_IGNORED_UNEXPECTED = (
    "scaled_fp8",  # marker of the old format beside newer ones
    "model_type.*",  # marker of Wan files made for another pack
    "__*__",  # markers that ComfyUI's detection reads
    "pos_embedder.*",  # Cosmos, Anima: the position table, which ComfyUI computes
    "adaln_basis",  # MiniMax H3
    "adaln_mean",
    "last.down.weight",  # Krea 2
    "last.up.weight",
)
_NAMED = 3


def load_checked(path: Path, load: Callable[[], Any]) -> Any:
    """What `load()`, a loader of ComfyUI for the file at `path`, returns.

    Raises UnsupportedFile if weights of the model are missing in the file, or the file holds tensors that the model
    has no place for; and whatever `load` raises.
    """
    with _key_messages() as keys:
        loaded = load()
    missing = _without(keys.missing, _IGNORED_MISSING)
    unexpected = _without(keys.unexpected, _IGNORED_UNEXPECTED)
    if missing or unexpected:
        findings = []
        if missing:
            findings.append(f"lacks {len(missing)} of its weights ({_some(missing)})")
        if unexpected:
            findings.append(f"holds {len(unexpected)} that it has no place for ({_some(unexpected)})")
        raise UnsupportedFile(
            f"{display_name(path)} does not fit the model that ComfyUI takes it for: it {' and '.join(findings)}. "
            "Computing with it would give a wrong picture. Update ComfyUI if the file is newer, or use another file."
        )
    return loaded


def _without(names: Iterable[str], ignored: tuple[str, ...]) -> list[str]:
    return [name for name in names if not any(fnmatchcase(name, pattern) for pattern in ignored)]


def _some(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (", …" if len(names) > _NAMED else "")


class _KeyMessages(logging.Filter):
    """Notes what a load in this thread logs about keys. Lets pass what would have been logged without it."""

    def __init__(self, level: int) -> None:
        super().__init__()
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self._level = level
        self._thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.thread == self._thread:
            text = record.getMessage()
            if text.startswith(_MISSING):
                self.missing += _listed(text.removeprefix(_MISSING))
            elif text.startswith(_UNEXPECTED):
                self.unexpected += _listed(text.removeprefix(_UNEXPECTED))
            elif text.startswith(_NO_WEIGHT):
                self.missing.append(f"{text.removeprefix(_NO_WEIGHT)}.weight")
        return record.levelno >= self._level


@contextmanager
def _key_messages() -> Iterator[_KeyMessages]:
    """A filter on the logger that ComfyUI logs to; for its length warnings are made even where none are shown."""
    logger = logging.getLogger()
    level = logger.level
    messages = _KeyMessages(level)
    logger.addFilter(messages)
    logger.setLevel(min(level, logging.WARNING))
    try:
        yield messages
    finally:
        logger.setLevel(level)
        logger.removeFilter(messages)


def _listed(text: str) -> list[str]:
    try:
        return [str(name) for name in ast.literal_eval(text)]
    except (ValueError, SyntaxError, TypeError):
        return [text]
