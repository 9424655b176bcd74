"""The ComfyUI that this process is, as workers are told of it."""

from __future__ import annotations

from pathlib import Path

import comfy

from ..distributed.versions import Versions, own_versions


def versions() -> Versions:
    """Of this machine's software, as workers are told them."""
    return own_versions(Path(comfy.__path__[0]).parent, _comfyui_version())


def _comfyui_version() -> str:
    try:
        from comfyui_version import __version__
    except ImportError:
        return ""
    return __version__
