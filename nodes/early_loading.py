"""Has workers begin to load a MODEL before its run: while text encoders, LoRAs and this machine's own weights load.

The run finds the model loaded, or loading. Whatever fails here fails there again, and is told then.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping
from typing import Any

from comfy_execution.utils import get_executing_context

from ..browser.board import LOADING, READY, board
from ..browser.settings import chosen_cluster, settings_of_prompt
from ..browser.turns import GiveWay, turns
from ..distributed.cluster import Cluster
from ..distributed.peers import Peers
from ..distributed.recipe import Recipe
from ..distributed.report import Report
from .attach import described
from .this_comfyui import versions

_SPLITTING_NODES = ("MonarchSampler", "MonarchSplit")
# How long whatever else uses the workers, for the tab, has to leave.
_PATIENCE_SECONDS = 5.0
_latest_prompt: str | None = None


def load_early(patcher: Any, prompt: Mapping[str, Any] | None) -> None:
    """Have the workers load a MODEL (comfy ModelPatcher) if `prompt`, in API format, is going to split one.

    Returns at once. Only the first MODEL of a prompt: on a worker with little memory one would push out the other.
    """
    global _latest_prompt
    if not any(_splits(node) for node in (prompt or {}).values()):
        return
    context = get_executing_context()
    if context is not None:
        if context.prompt_id == _latest_prompt:
            return
        _latest_prompt = context.prompt_id
    try:
        cluster = chosen_cluster(settings_of_prompt().cluster)
        if not cluster.workers:
            return
        recipe = described(patcher)
    except Exception:
        logging.debug("monarch: this model is not loaded early", exc_info=True)
        return
    threading.Thread(target=_load, args=(cluster, recipe), name="monarch-early-loading", daemon=True).start()


def _splits(node: Mapping[str, Any]) -> bool:
    return node.get("class_type") in _SPLITTING_NODES and node.get("inputs", {}).get("split") != "off"


def _load(cluster: Cluster, recipe: Recipe) -> None:
    """Ends once a render begins: that goes on with what has arrived of a file, and waits for what still loads."""
    try:
        with turns.aside(_PATIENCE_SECONDS) as check:

            def look() -> None:
                for peer in peers.members:
                    board.seen(peer.address, READY if peer.ready else LOADING, name=peer.name)
                check()

            # By rows, for which workers are waited for.
            peers = Peers(
                cluster,
                versions(),
                Report("rows"),
                lambda: recipe,
                look,
                lambda done, total: None,
                lambda formats: contextlib.nullcontext(),
            )
            try:
                peers.ready()
            finally:
                members = peers.members
                peers.end(cancel=False)
                # A render that begins has them load on, and tells of it.
                for peer in () if turns.rendering else members:
                    board.seen(peer.address, READY, name=peer.name)
    except GiveWay:
        pass
    except Exception:
        logging.debug("monarch: workers could not be told to load early", exc_info=True)
