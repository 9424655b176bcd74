"""Where Monarch keeps what is the user's: configuration and keys, and files that drivers have sent."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path


def configuration_folder() -> Path:
    """The user's configuration folder for Monarch (MONARCH_CONFIG_DIR overrides it)."""
    override = os.environ.get("MONARCH_CONFIG_DIR")
    if override:
        return Path(override)
    if sys.platform == "win32":
        base = os.environ.get("APPDATA") or str(Path.home() / "AppData" / "Roaming")
    elif sys.platform == "darwin":
        base = str(Path.home() / "Library" / "Application Support")
    else:
        base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "monarch"


def default_cache_folder() -> Path:
    """Where a worker keeps files that drivers have sent: the user's cache folder."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = str(Path.home() / "Library" / "Caches")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "monarch" / "files"


def write_private(path: Path, text: str, *, replace: bool = True) -> bool:
    """Write a file that only this user can read, whole or not at all; False if it is there and not to be replaced."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # made with mode 0600
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            os.replace(part, path)
        else:
            os.link(part, path)  # unlike a rename, fails if another process was quicker
        return True
    except FileExistsError:
        return False
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)
