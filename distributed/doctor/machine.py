"""Checks of this machine, the driver: configuration, keys, software, model files and memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..auth import AuthError, Pairings, own_identity
from ..cluster import Cluster, ConfigurationError, load_configuration
from ..memory import available_bytes
from ..recipe import Recipe
from ..runtime import Replica, Runtime
from ..versions import Versions
from .check import Check, failed, failed_with, passed, warned

_MODEL_SUFFIXES = (".safetensors", ".sft")
# Less memory than this hardly holds any model.
_LITTLE_MEMORY = 4e9
_MAX_FILES = 100_000


@dataclass(frozen=True)
class TinyModel:
    """A model for a trial: its recipe, a replica of it here, and inputs: rows -> arguments of a forward of so many."""

    recipe: Recipe
    replica: Replica
    inputs: Callable[[int], tuple[list[Any], dict[str, Any]]]


@dataclass(frozen=True)
class Here:
    """This machine as the driver. tiny: makes a TinyModel; may raise whatever its ComfyUI raises.

    comfyui: which one the checks run with; "" without one, and then `without` says why, and `broken` whether there is
    one that does not work. model_folders: where it looks for models that can be split.
    """

    runtime: Runtime
    tiny: Callable[[], TinyModel]
    comfyui: str = ""
    without: str = ""
    broken: bool = False
    model_folders: Sequence[Path] = field(default_factory=tuple)


@dataclass(frozen=True)
class Largest:
    """The largest model file of a machine."""

    name: str
    bytes: int


def configuration(found: list[Cluster]) -> Iterator[Check]:
    """The cluster that renders would use, if there is one, is added to `found`."""
    name = "configuration"
    try:
        loaded = load_configuration()
        cluster = loaded.cluster()
    except ConfigurationError as error:
        yield failed(name, str(error).rstrip("."), "correct the file, or remove it and pair the machines anew")
        return
    where = str(loaded.path) if loaded.exists else f"{loaded.path} does not exist, which is fine"
    if not cluster.workers:
        yield failed(
            name,
            f"no worker is configured ({where})",
            "start `monarch worker --listen ADDRESS` on the second machine, and `monarch pair CODE` here with its code",
        )
        return
    found.append(cluster)
    listed = ", ".join(map(str, cluster.workers))
    yield passed(name, f"cluster {cluster.name!r}: {listed} ({where})")


def keys() -> Check:
    try:
        own_identity()
        paired = [worker.name for worker in Pairings.load().workers]
    except AuthError as error:
        return failed_with("keys", error)
    return passed("keys", f"this machine's key is private; paired workers: {', '.join(paired) or 'none'}")


def software(here: Here) -> Check:
    """What computes here. Compared with each worker's later."""
    versions = here.runtime.versions
    said = described(versions, here.runtime.describe())
    if here.comfyui:
        return passed("software", f"{said}, in {here.comfyui}")
    fix = (
        "start ComfyUI by hand, with the same flags, and see what it says"
        if here.broken
        else "name ComfyUI's folder with --comfyui PATH, or start the doctor with the Python that runs ComfyUI"
    )
    make = failed if here.broken else warned
    return make("software", f"checked without ComfyUI, {here.without}; {said}", fix)


def described(versions: Versions, device: dict[str, str]) -> str:
    """Software and device of a machine in one line."""
    comfyui = f"ComfyUI {versions.comfyui} ({versions.comfyui_code[:8]}), " if versions.comfyui_code else ""
    backends = f" ({versions.kitchen_backends})" if versions.kitchen_backends else ""
    kitchen = f", comfy-kitchen {versions.kitchen}{backends}" if versions.kitchen else ""
    driver = f" with driver {device['driver']}" if device.get("driver") else ""
    return (
        f"Monarch {versions.pack} ({versions.pack_code[:8]}), {comfyui}torch {versions.torch or 'missing'}{kitchen}, "
        f"{device.get('device', 'unknown device')}{driver}"
    )


def models(here: Here, largest: list[Largest]) -> Iterator[Check]:
    """Whether model folders can be read. The largest file in them is added to `largest`."""
    if not here.model_folders:
        return
    fix = "put models into models/diffusion_models, or name other folders in ComfyUI's extra_model_paths.yaml"
    files: list[tuple[int, str]] = []
    unreadable: list[str] = []
    for folder in here.model_folders:
        for path, _, names in os.walk(folder, onerror=lambda error: unreadable.append(str(error.filename))):
            for name in names:
                if name.endswith(_MODEL_SUFFIXES) and len(files) < _MAX_FILES:
                    try:
                        files.append((os.stat(os.path.join(path, name)).st_size, name))
                    except OSError:
                        unreadable.append(os.path.join(path, name))
    unreadable = [path for path in unreadable if os.path.lexists(path)]
    if unreadable:
        yield warned("models", f"{unreadable[0]} cannot be read", "correct its owner or permissions, or the link")
    elif not files:
        yield warned("models", f"no model file in {', '.join(map(str, here.model_folders))}", fix)
    if files:
        size, name = max(files)
        largest.append(Largest(name, size))
        if not unreadable:
            yield passed("models", f"{len(files)} model files, the largest is {name} ({size / 1e9:.1f} GB)")


def memory(here: Here, largest: list[Largest]) -> Check:
    device = here.runtime.describe()
    return enough_memory("memory", available_bytes(), device, largest, "this machine")


def enough_memory(check: str, available: int, device: dict[str, str], largest: list[Largest], where: str) -> Check:
    """Whether memory is left for a model. Where the GPU has none of its own, the largest model has to fit."""
    if not available:
        return warned(check, f"{where} does not say how much memory is free", "install psutil there")
    unified = bool(device.get("unified"))
    detail = f"{available / 1e9:.1f} GB are free on {where}"
    detail += (
        ", which its GPU shares" if unified else f", and {device['free']} on its GPU" if device.get("free") else ""
    )
    fix = f"end what else uses memory on {where} (another ComfyUI, a browser, a language model)"
    if available < _LITTLE_MEMORY:
        return warned(check, detail, fix)
    if unified and largest and largest[0].bytes > available:
        return warned(check, f"{detail}: {largest[0].name} ({largest[0].bytes / 1e9:.1f} GB) does not fit", fix)
    return passed(check, detail)
