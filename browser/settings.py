"""What the user chose under Monarch in ComfyUI's settings dialog. ComfyUI keeps it, in the user's settings file."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .server import pages, prompt_server

if TYPE_CHECKING:
    from ..distributed.cluster import Cluster

_CLUSTER, _WHEN_NOT_SPLIT, _MESSAGES = "Monarch.Cluster", "Monarch.WhenNotSplit", "Monarch.Messages"
_STOP = "stop"
_AS_CONFIGURED = "monarch.toml"


@dataclass(frozen=True)
class Settings:
    """cluster: "" leaves the choice to monarch.toml. stop: whether a render that cannot be split is to end."""

    cluster: str = ""
    stop: bool = False
    messages: bool = True


def settings_of(user: str) -> Settings:
    """What this user chose; the defaults where nothing was saved, or ComfyUI has no server."""
    saved = _saved(user)
    cluster = str(saved.get(_CLUSTER) or "")
    return Settings(
        cluster="" if cluster == _AS_CONFIGURED else cluster,
        stop=saved.get(_WHEN_NOT_SPLIT) == _STOP,
        messages=saved.get(_MESSAGES) is not False,
    )


def settings_of_prompt() -> Settings:
    """What the user who queued the running prompt chose."""
    return settings_of(pages.user_of(getattr(prompt_server(), "client_id", None)))


def chosen_cluster(name: str) -> Cluster:
    """The cluster with this name, or the configuration's own choice for "". Raises ConfigurationError."""
    from ..distributed.cluster import ConfigurationError, load_configuration

    configuration = load_configuration()
    if name and name not in configuration.clusters:
        known = ", ".join(configuration.clusters) or "none"
        raise ConfigurationError(
            f"ComfyUI's settings name the cluster {name!r}, which {configuration.path} does not have "
            f"(it has: {known}); choose another under Monarch in ComfyUI's settings"
        )
    return replace(configuration, default=name or configuration.default).cluster()


def cluster_names() -> list[str]:
    """Those to choose from."""
    from ..distributed.cluster import ConfigurationError, load_configuration

    with contextlib.suppress(ConfigurationError):
        return list(load_configuration().clusters)
    return []


def _saved(user: str) -> dict[str, Any]:
    if prompt_server() is None:
        return {}
    import folder_paths

    file = os.path.join(folder_paths.get_user_directory(), user, "comfy.settings.json")
    with contextlib.suppress(OSError, ValueError), open(file, encoding="utf-8") as text:
        saved = json.load(text)
        return saved if isinstance(saved, dict) else {}
    return {}
