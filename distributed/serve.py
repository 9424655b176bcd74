"""Starts a worker: chooses the runtime, binds, says where it listens and what it can use, and serves until stopped."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import zmq

from .files import FileCache
from .worker import Runtime, Worker, run_until_stopped


def serve(
    listen: str,
    port: int,
    *,
    runtime: str,
    comfyui: Path | None,
    comfyui_args: list[str],
    cache: Path | None,
    name: str | None,
) -> int:
    """Serve until SIGINT or SIGTERM. Returns the exit code: 1 if the address is taken."""
    computes_with = _runtime(runtime, comfyui, comfyui_args)
    folder = cache or default_cache_folder()
    try:
        worker = Worker(computes_with, FileCache(folder), listen, port, name or platform.node() or "worker")
    except zmq.ZMQError as error:
        print(f"Cannot listen on {listen}:{port}: {error.strerror}. Choose another port with --port.", file=sys.stderr)
        return 1
    device = computes_with.describe()
    print(f"{worker.name}: {device['device']}, {device['memory']}", flush=True)
    print(f"Files that a driver sends are kept in {folder}", flush=True)
    print(f'In the driver\'s monarch.toml: workers = ["{worker.address}"]', flush=True)
    print(f"Listening on {worker.address}", flush=True)
    run_until_stopped(worker)
    return 0


def _runtime(runtime: str, comfyui: Path | None, comfyui_args: list[str]) -> Runtime:
    if runtime == "reference":
        from ..demo.reference_runtime import ReferenceRuntime

        return ReferenceRuntime()
    from .model_store import ComfyRuntime

    if comfyui is None:
        raise ValueError("the comfyui runtime needs ComfyUI's folder")
    return ComfyRuntime(comfyui, comfyui_args)


def default_cache_folder() -> Path:
    """Where a worker keeps files that drivers have sent: the user's cache folder."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = str(Path.home() / "Library" / "Caches")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "monarch" / "files"
