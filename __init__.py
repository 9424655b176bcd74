"""Monarch: splits each sampling step of one render over two machines.

The entry that ComfyUI loads. It imports nothing heavy and works without ComfyUI; the nodes are in `nodes/`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .nodes import MonarchExtension

__version__ = "0.1.0"

WEB_DIRECTORY = "./web"


async def comfy_entrypoint() -> MonarchExtension:
    """Called once by ComfyUI. Returns the extension that lists the nodes."""
    from .nodes import MonarchExtension

    return MonarchExtension()
