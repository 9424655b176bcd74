"""The nodes a user sees in the graph. Only ComfyUI imports this package."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from ..browser.server import prompt_server
from .loader import MonarchModelLoader
from .measure import MonarchMeasure, MonarchMeasured
from .sampler import MonarchSampler
from .split import MonarchSplit


class MonarchExtension(ComfyExtension):
    """Lists the pack's nodes for ComfyUI, and serves what its page asks for."""

    async def on_load(self) -> None:
        server = prompt_server()
        if server is not None:
            from ..browser.routes import register

            register(server)

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [MonarchModelLoader, MonarchSampler, MonarchSplit, MonarchMeasure, MonarchMeasured]
