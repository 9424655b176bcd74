"""Fetches a ComfyUI for the demo, into ~/comfy/ComfyUI with a venv beside it, when a user asks for that.

Standard library only. Finding one that is there already is environment's job."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from .environment import CommandError, find_comfyui, install_once, say

URL = "https://github.com/comfyanonymous/ComfyUI"
TAG = "v0.33.0"


def get_comfyui() -> None:
    """Clone ComfyUI and make its environment, unless there is one; goes on where an earlier attempt stopped.

    Raises CommandError with what is missing: git, the network, or a free folder.
    """
    folder = Path.home() / "comfy" / "ComfyUI"
    found = find_comfyui()
    if found is not None and (found.python is not None or found.path != folder):
        return
    if found is None:
        _clone(folder)
    _make_venv(folder)


def _clone(folder: Path) -> None:
    git = shutil.which("git")
    if git is None:
        raise CommandError(
            f"git was not found, and ComfyUI is fetched with it. Install git, or unpack {URL} to {folder}."
        )
    if folder.exists():
        raise CommandError(f"{folder} exists and is not a ComfyUI folder. Move it away and run this again.")
    say(f"cloning ComfyUI {TAG} from {URL} into {folder}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Under its name only when it is whole: half a clone would be found as a ComfyUI the next time.
        with tempfile.TemporaryDirectory(prefix=".ComfyUI-", dir=folder.parent) as partial:
            target = Path(partial) / "ComfyUI"
            done = subprocess.run(
                [git, "clone", "--quiet", "--depth", "1", "--branch", TAG, URL, os.fspath(target)],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
                # Never a question for a password, which nobody may be there to answer.
                env={**os.environ, "GIT_TERMINAL_PROMPT": "0"},
            )
            if done.returncode != 0:
                raise CommandError(
                    f"git could not clone {URL}; its own words are above. Check the network and run this again."
                )
            os.replace(target, folder)
    except OSError as error:
        raise CommandError(f"{folder} cannot be written ({error.strerror}). Make room or rights for it.") from error


def _make_venv(folder: Path) -> None:
    venv = folder.parent / "venv"
    python = venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        say(f"making {venv} with {sys.executable}")
        if subprocess.run([sys.executable, "-m", "venv", os.fspath(venv)], stdout=sys.stderr).returncode != 0:
            raise CommandError(
                f"{sys.executable} could not make {venv}; its own words are above. On Debian and Ubuntu install "
                "python3-venv and run this again."
            )
    install_once(
        [f"--requirement={folder / 'requirements.txt'}", "pyzmq>=25"],
        stamp=venv / ".monarch-comfyui",
        arguments=[os.fspath(python), "-m", "pip", "install"],
        why=f"into {venv}, once; with PyTorch this is some gigabytes",
    )
