"""Starts a worker: binds, says where it listens and what it can use, and serves until stopped."""

from __future__ import annotations

import contextlib
import os
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path

import zmq

from .addresses import Address
from .auth import AuthError, Pairings, own_identity
from .file_cache import FileCache
from .folders import default_cache_folder
from .jobs import say
from .pairing import announced, issue_code
from .runtime import Runtime
from .worker import Worker, ended_by_signals

_MANY_FILES = 65_536


def serve(
    runtime: Runtime,
    hosts: Sequence[str],
    port: int,
    *,
    cache: Path | None = None,
    name: str | None = None,
    pair: bool = False,
    encrypted: bool = True,
) -> int:
    """Serve at the IP addresses `hosts` until SIGINT or SIGTERM. Returns the exit code: 1 if it cannot begin.

    pair: print a pairing code, though there are drivers that this machine is paired with. Not `encrypted`: anybody is
    served, in the clear; only for measurements on the loopback.
    """
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
    name = name or platform.node() or "worker"
    _allow_many_connections()
    try:
        own = own_identity() if encrypted else None
        new_here = not Pairings.load().drivers
        worker = Worker(runtime, FileCache(folder), hosts, port, name, own=own)
    except AuthError as error:
        say(f"The worker cannot start: {error}.", error=True)
        return 1
    except zmq.ZMQError as error:
        say(
            f"Cannot listen on port {port} of {', '.join(hosts)}: {os.strerror(error.errno or 0)}. "
            "Choose another port with --port.",
            error=True,
        )
        return 1
    device = runtime.describe()
    say(f"{worker.name}: {device['device']}, {device['memory']}")
    say(f"Files that a driver sends are kept in {folder}")
    try:
        with ended_by_signals(worker):
            say(f"Listening on {', '.join(map(str, worker.addresses))}")
            with announced(worker.addresses):
                if pair or (encrypted and new_here):
                    _print_code(worker.addresses)
                worker.run()
    except AuthError as error:
        say(f"The worker cannot go on: {error}.", error=True)
        return 1
    return 0


def _allow_many_connections() -> None:
    """Strangers that connect and say nothing must not use up what this process may open."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        enough = _MANY_FILES if most == resource.RLIM_INFINITY else min(most, _MANY_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(now, enough), most))


def _print_code(addresses: Sequence[Address]) -> None:
    say("To pair a machine with this one, run there within ten minutes (once per code):")
    say(f"  monarch pair {issue_code(addresses)}")
