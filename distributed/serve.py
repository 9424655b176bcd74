"""Starts a worker: binds, says where it listens and what it can use, and serves until stopped."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from pathlib import Path

import zmq

from .files import FileCache
from .jobs import say
from .runtime import Runtime
from .worker import Worker, run_until_stopped


def serve(runtime: Runtime, listen: str, port: int, *, cache: Path | None = None, name: str | None = None) -> int:
    """Serve until SIGINT or SIGTERM. Returns the exit code: 1 if the address cannot be bound."""
    folder = cache or default_cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        say(
            f"Files that a driver sends cannot be kept in {folder}: {error.strerror}. Choose another with --cache.",
            error=True,
        )
        return 1
    try:
        worker = Worker(runtime, FileCache(folder), listen, port, name or platform.node() or "worker")
    except zmq.ZMQError as error:
        say(
            f"Cannot listen on {listen}:{port}: {os.strerror(error.errno or 0)}. Choose another port with --port.",
            error=True,
        )
        return 1
    device = runtime.describe()
    say(f"{worker.name}: {device['device']}, {device['memory']}")
    say(f"Files that a driver sends are kept in {folder}")
    say(f'In the driver\'s monarch.toml: workers = ["{worker.address}"]')
    say(f"Listening on {worker.address}")
    run_until_stopped(worker)
    return 0


def default_cache_folder() -> Path:
    """Where a worker keeps files that drivers have sent: the user's cache folder."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = str(Path.home() / "Library" / "Caches")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "monarch" / "files"
