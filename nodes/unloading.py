"""Notices that ComfyUI unloads a MODEL that was split, or forgets it, so that workers need not hold it any longer.

Through callbacks on ModelPatchers and weak references; what workers are told, and when, is holdings' business.
"""

from __future__ import annotations

from typing import Any

from comfy.patcher_extension import CallbacksMP
from comfy_execution.utils import get_executing_context

from ..distributed.holdings import holdings

_KEY = "monarch"


def follow(patcher: Any, digest: str) -> None:
    """Follow a MODEL (comfy ModelPatcher) from the file with this digest, which workers are about to load, too."""
    holdings.follow(patcher.model, digest)
    # ComfyUI asks the clone that it loaded or, once that is gone, the one that it was cloned from.
    while patcher is not None:
        if not patcher.get_callbacks(CallbacksMP.ON_DETACH, _KEY):
            patcher.add_callback_with_key(CallbacksMP.ON_DETACH, _KEY, _detached)
        patcher = getattr(patcher, "parent", None)


def _detached(patcher: Any, unpatch_all: bool) -> None:
    """A MODEL left its device.

    Within a prompt that only makes room here for another model, and a worker makes room for itself: loading there again
    for every prompt would cost more than it gives. Otherwise somebody wants the memory back (POST /free).
    """
    if unpatch_all and get_executing_context() is None:
        holdings.release()
