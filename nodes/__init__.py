"""The nodes a user sees in the graph. Only ComfyUI imports this package."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from .loader import MonarchModelLoader
from .sampler import MonarchSampler
from .split import MonarchSplit


class MonarchExtension(ComfyExtension):
    """Lists the pack's nodes for ComfyUI."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [MonarchModelLoader, MonarchSampler, MonarchSplit]
