"""This machine as the tab shows it: its GPU, its memory, and the models that ComfyUI holds here."""

from __future__ import annotations

import contextlib
import functools
import platform
from typing import Any

from ..distributed.folders import configuration_folder

NODE_ID = "this machine"


def described(state: str) -> dict[str, Any]:
    """The same fields as of a worker's Node."""
    import comfy.model_management as model_management

    device = model_management.get_torch_device()
    total = int(model_management.get_total_memory(device))
    free = int(model_management.get_free_memory(device))
    return {
        "id": NODE_ID,
        "name": platform.node() or NODE_ID,
        "state": state,
        "detail": "",
        "device": model_management.get_torch_device_name(device),
        "memory": [max(0, total - free), total],
        "models": _models(model_management),
        "rtt": None,
        "rate": None,
        "paired": None,
    }


def _models(model_management: Any) -> list[str]:
    """Names of the diffusion models that are loaded, as far as it is known which files they came from."""
    from ..distributed.replica import loaded_file

    found = []
    for loaded in list(model_management.current_loaded_models):
        with contextlib.suppress(AttributeError):  # it may be unloaded meanwhile
            path = loaded_file(loaded.model)
            if path is not None:
                found.append(path.name)
    return list(dict.fromkeys(found))


@functools.cache
def folders() -> tuple[str, ...]:
    """Folders of this machine that are nobody else's business."""
    import folder_paths

    known = (configuration_folder(), folder_paths.base_path, folder_paths.models_dir)
    return tuple(dict.fromkeys(str(folder) for folder in known))
