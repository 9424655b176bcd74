"""Where the command line runs: finds ComfyUI and its Python, and makes the `.venv` of `./monarch`.

Standard library only, because it runs before anything is installed. What the subcommands do is theirs.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

# Not resolved: a pack that is symlinked into custom_nodes must still find the ComfyUI above it.
PACK = Path(os.path.abspath(__file__)).parent.parent
VENV = PACK / ".venv"

# What pip is asked for -> what Python imports. torch is pinned so that every first run gets the version tested here.
_ENGINE = {"torch==2.13.0": "torch", "numpy": "numpy", "safetensors": "safetensors", "pyzmq>=25": "zmq"}
TEST_TOOLS = {"pytest>=8": "pytest", "pytest-timeout>=2.3": "pytest_timeout", "hypothesis>=6.100": "hypothesis"}
REQUIREMENTS: dict[str, dict[str, str]] = {
    "bench": _ENGINE,
    "convert": {},
    "worker": _ENGINE,
    "demo": _ENGINE,
    "doctor": _ENGINE,
    "inspect": {},
    "pair": _ENGINE,
    "test": {**_ENGINE, **TEST_TOOLS},
}

# ComfyUI imports these at start. torch alone would not do: our own .venv has it too, and cannot run ComfyUI.
_COMFYUI_IMPORTS = ("torch", "aiohttp")

# Carries the Python that the user started over the re-execution: it may be the one that runs ComfyUI (conda, say).
_STARTED_FROM = "MONARCH_STARTED_FROM"


class CommandError(Exception):
    """Ends a command with one sentence for the user. `code` is the exit code: 1 a finding, 2 usage."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class ComfyUI:
    """A ComfyUI on this machine. `python` is the interpreter that can run it, None if there is none to be seen."""

    path: Path
    version: str
    python: Path | None


def find_comfyui(explicit: Path | None = None) -> ComfyUI | None:
    """The first ComfyUI of: `explicit`, COMFYUI_PATH, the folder above custom_nodes, ~/ComfyUI, ~/comfy/ComfyUI.

    Raises CommandError if a folder that the user named is not a ComfyUI: another one would be a surprise.
    """
    named = [("--comfyui", explicit), ("COMFYUI_PATH", _path_from_environment("COMFYUI_PATH"))]
    for source, path in named:
        if path is not None:
            found = _comfyui_in(path.expanduser())
            if found is None:
                raise CommandError(
                    f"{path} ({source}) is not a ComfyUI folder: main.py, comfy/ or its version is missing. "
                    "Name the folder that holds ComfyUI's main.py.",
                    code=2,
                )
            return found
    for path in (*_above_custom_nodes(), Path.home() / "ComfyUI", Path.home() / "comfy" / "ComfyUI"):
        found = _comfyui_in(path)
        if found is not None:
            return found
    return None


def _path_from_environment(variable: str) -> Path | None:
    value = os.environ.get(variable)
    return Path(value) if value else None


def _above_custom_nodes() -> Iterator[Path]:
    for pack in (PACK, PACK.resolve()):
        if pack.parent.name == "custom_nodes":
            yield pack.parent.parent


def _comfyui_in(path: Path) -> ComfyUI | None:
    path = Path(os.path.abspath(path))
    if not (path / "main.py").is_file() or not (path / "comfy").is_dir():
        return None
    version = _version_of(path)
    return None if version is None else ComfyUI(path, version, _python_of(path))


def _version_of(comfyui: Path) -> str | None:
    """Read from the source text: importing ComfyUI to ask it would start torch."""
    for name, pattern in (
        ("comfyui_version.py", r"""^__version__\s*=\s*["']([^"']+)["']"""),
        ("pyproject.toml", r"""^version\s*=\s*["']([^"']+)["']"""),
    ):
        try:
            text = (comfyui / name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        match = re.search(pattern, text, re.MULTILINE)
        if match:
            return match[1]
    return None


def _python_of(comfyui: Path) -> Path | None:
    folders = (comfyui / ".venv", comfyui / "venv", comfyui.parent / ".venv", comfyui.parent / "venv")
    candidates = [
        *(_python_in(folder) for folder in folders),
        comfyui.parent / "python_embeded" / "python.exe",  # the Windows portable build's own spelling
        _path_from_environment("MONARCH_PYTHON"),
        _path_from_environment(_STARTED_FROM),
        Path(sys.executable),
    ]
    for python in candidates:
        if python is not None and python.is_file() and not missing_imports(python, _COMFYUI_IMPORTS):
            return python
    return None


def _python_in(venv: Path) -> Path:
    return venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def missing_imports(python: Path, names: Iterable[str]) -> list[str]:
    """Those of `names` that `python` cannot import; all of them if it does not run. Imports nothing."""
    names = list(names)
    if python == Path(sys.executable):
        return [name for name in names if importlib.util.find_spec(name) is None]
    # A loop over the arguments and not a list made here: the names never become code.
    code = "import sys, importlib.util as u\nfor n in sys.argv[1:]:\n    if u.find_spec(n) is None: print(n)"
    try:
        # -I: the current folder and PYTHONPATH say nothing about what is installed there.
        done = subprocess.run([python, "-I", "-c", code, *names], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return names
    return done.stdout.split() if done.returncode == 0 else names


def require(subcommand: str) -> None:
    """Raise CommandError if this Python lacks what `subcommand` imports."""
    wanted = REQUIREMENTS[subcommand]
    missing = missing_imports(Path(sys.executable), wanted.values())
    if missing:
        raise CommandError(
            f"{sys.executable} cannot import {', '.join(missing)}, which '{subcommand}' needs. "
            f"Run {PACK / 'monarch'} {subcommand}, which chooses a Python by itself, or start it with one that has "
            "them, such as ComfyUI's."
        )


def prefer_comfyui(subcommand: str, argv: list[str], needs: Iterable[str], explicit: Path | None = None) -> NoReturn:
    """Start the command again in ComfyUI's Python if that can import `needs`, or else in `.venv`."""
    comfyui = find_comfyui(explicit)
    if comfyui is not None and comfyui.python is not None and not missing_imports(comfyui.python, needs):
        run_in(comfyui.python, argv)
    ensure_environment(subcommand, argv)


def ensure_environment(subcommand: str, argv: list[str]) -> NoReturn:
    """Make the environment that `subcommand` needs, once, and start the command again in it."""
    run_in(make_environment(subcommand), argv)


def run_in(python: Path, argv: list[str]) -> NoReturn:
    """Replace this process by the same command in `python`.

    The command starts as `python <pack> …`, which never looks for another Python, so this cannot loop.
    """
    environment = {**os.environ, _STARTED_FROM: os.environ.get(_STARTED_FROM, sys.executable)}
    command = [os.fspath(python), os.fspath(PACK), *argv]
    sys.stdout.flush()
    sys.stderr.flush()
    if os.name == "nt":  # there, exec returns to the shell before the command has ended
        sys.exit(subprocess.call(command, env=environment))
    os.execve(python, command, environment)


def make_environment(subcommand: str) -> Path:
    """The Python of the environment for `subcommand`: MONARCH_PYTHON, or `.venv` with what is missing installed."""
    wanted = REQUIREMENTS[subcommand]
    chosen = _path_from_environment("MONARCH_PYTHON")
    if chosen is not None:
        if not chosen.is_file():
            raise CommandError(f"{chosen} (MONARCH_PYTHON) does not exist. Name a Python, or unset it.", code=2)
        missing = missing_imports(chosen, wanted.values())
        if missing:
            packages = " ".join(f"'{package}'" for package, name in wanted.items() if name in missing)
            raise CommandError(
                f"{chosen} (MONARCH_PYTHON) does not run or cannot import {', '.join(missing)}. "
                f"Install them with: {chosen} -m pip install {packages}"
            )
        return chosen
    with _locked(VENV):
        python = _make_venv()
        install_once(
            wanted,
            stamp=VENV / f".monarch-{subcommand}",
            arguments=[os.fspath(python), "-m", "pip", "install"],
            why=f"into {VENV}, once, for 'monarch {subcommand}'",
        )
    return python


def install_once(wanted: Iterable[str], *, stamp: Path, arguments: list[str], why: str) -> None:
    """pip-install `wanted` unless `stamp` says it was done. `arguments` is the pip command up to the packages."""
    digest = hashlib.sha256("\n".join([*arguments, *wanted]).encode()).hexdigest()
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == digest:
        return
    say(f"installing {', '.join(wanted)} {why}")
    command = [*arguments, "--quiet", "--disable-pip-version-check", *wanted]
    if subprocess.run(command, stdout=sys.stderr).returncode != 0:
        raise CommandError("pip could not install them; its own words are above. Check the network and run this again.")
    stamp.write_text(digest, encoding="utf-8")


def say(message: str) -> None:
    """A line of progress, on stderr: stdout belongs to a command's result."""
    print(f"monarch: {message}", file=sys.stderr, flush=True)


def _make_venv() -> Path:
    python = _python_in(VENV)
    try:
        if subprocess.run([python, "-c", "import pip"], capture_output=True).returncode == 0:
            return python
        broken = False  # runs, but an interrupted first use left it without pip: venv adds what is missing
    except OSError:
        broken = python.is_symlink() or python.exists()  # the Python that it was made with is gone
    say(f"making {VENV} with {sys.executable}")
    command = [sys.executable, "-m", "venv", *(["--clear"] if broken else []), os.fspath(VENV)]
    if subprocess.run(command, stdout=sys.stderr).returncode != 0:
        raise CommandError(
            f"{sys.executable} could not make {VENV}; its own words are above. On Debian and Ubuntu install "
            "python3-venv; or set MONARCH_PYTHON to a Python that has torch."
        )
    return python


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Two first uses at once must not install into the same folder. Without fcntl (Windows) they may."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    try:
        folder.mkdir(exist_ok=True)
        lock = (folder / ".monarch-lock").open("w")
    except OSError as error:
        raise CommandError(f"{folder} cannot be written ({error.strerror}). Set MONARCH_PYTHON instead.") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
