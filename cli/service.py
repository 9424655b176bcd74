"""`monarch worker --install-service`: writes a systemd user unit that runs this worker, and says how to start it.

Nothing is started or enabled here. What the worker is told is worker's business.
"""

from __future__ import annotations

import argparse
import getpass
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from .environment import PACK, CommandError

NAME = "monarch-worker"
_RESTART_SECONDS = 5
# systemd's own test for being there; absent in most containers, on macOS and on Windows.
_BOOTED = Path("/run/systemd/system")
# Characters that it refuses in the name of a program, however they are written.
_UNSTARTABLE = frozenset("\"'\\")
# A service does not get the variables of a shell. Of these depends which keys, files and GPUs the worker uses.
_KEPT_VARIABLES = ("MONARCH_CONFIG_DIR", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "CUDA_VISIBLE_DEVICES")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--install-service",
        action="store_true",
        help="do not start it, but write a systemd user unit that runs it with the other arguments given here",
    )
    parser.add_argument("--yes", action="store_true", help="with --install-service: do not ask")


def install(args: argparse.Namespace, comfyui: Path | None) -> int:
    """Show the unit of a worker with these arguments, ask, and write it. Raises CommandError if it is not written.

    comfyui: the folder that the worker found; None for a worker without ComfyUI.
    """
    if args.port == 0:
        raise CommandError("A service needs the same port each time it starts: leave out --port 0.", 2)
    command = worker_command(args, comfyui)
    if not command[0].isprintable() or not _UNSTARTABLE.isdisjoint(command[0]):
        raise CommandError(f"systemd starts no program with such a name: {command[0]}. Move that Python elsewhere.")
    if not _BOOTED.is_dir():
        raise CommandError(
            "This system is not run by systemd, so no service was installed. Have what starts programs here run: "
            + shlex.join(command)
        )
    path = unit_path()
    text = unit_text(command, os.environ, Path.cwd() if args.passed_on else None)
    replaces = _differs(path, text)
    print(f"{path}:\n\n{text}")
    if replaces is not False:
        if not args.yes:
            _ask("Replace the other one that is there? [y/N] " if replaces else "Write it? [y/N] ", path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", errors="surrogateescape")
        except OSError as error:
            raise CommandError(f"{path} cannot be written ({error.strerror}).") from None
    print("It is written. Start it, now and with each login:" if replaces is None else "It is there. Start it anew:")
    print("  systemctl --user daemon-reload")
    print(f"  systemctl --user enable {NAME} && systemctl --user restart {NAME}")
    print("On a machine where nobody logs in, have it start with the machine:")
    print(f"  loginctl enable-linger {shlex.quote(getpass.getuser())}")
    print(f"What it says: journalctl --user -u {NAME} -f; a pairing code: monarch pair --new-code")
    return 0


def unit_path() -> Path:
    """Where systemd looks for the units of this user."""
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "systemd" / "user" / f"{NAME}.service"


def worker_command(args: argparse.Namespace, comfyui: Path | None) -> list[str]:
    """What starts this worker from any folder and without the variables of this shell."""
    words = [sys.executable, os.fspath(PACK), "worker", f"--port={args.port}", f"--runtime={args.runtime}"]
    words += [f"--listen={address}" for address in args.listen or ()]
    words += [f"--facing={args.facing}"] if args.facing else []
    # By name: it may have been found by a variable, or in a home that a service does not know.
    words += [f"--comfyui={comfyui}"] if comfyui else []
    words += [f"--cache={os.path.abspath(args.cache.expanduser())}"] if args.cache else []
    words += [f"--name={args.name}"] if args.name else []
    return [*words, "--", *args.passed_on] if args.passed_on else words


def unit_text(command: Sequence[str], variables: Mapping[str, str], folder: Path | None) -> str:
    """The unit. folder: that the command's words are relative to, if any may be."""
    kept = [_quoted(f"{name}={variables[name]}") for name in _KEPT_VARIABLES if variables.get(name)]
    # The colon: a dollar sign is no variable.
    words = " ".join([_quoted(f":{command[0]}"), *map(_quoted, command[1:])])
    lines = [
        "# Written by `monarch worker --install-service`, which can be run again.",
        "[Unit]",
        "# It is not started any more once Monarch is uninstalled.",
        f"ConditionPathExists={_literal(os.fspath(PACK / '__main__.py'))}",
        "Description=Monarch worker, which computes a share of the renders of another machine",
        "# An address may not be there yet when the machine starts: it is tried again until it is.",
        "StartLimitIntervalSec=0",
        "",
        "[Service]",
        *(f"Environment={variable}" for variable in kept),
        *([f"WorkingDirectory={_literal(str(folder))}"] if folder else []),
        f"ExecStart={words}",
        "Restart=on-failure",
        f"RestartSec={_RESTART_SECONDS}",
        "StandardOutput=journal",
        f"SyslogIdentifier={NAME}",
        "",
        "[Install]",
        "WantedBy=default.target",
    ]
    return "\n".join(lines) + "\n"


def _literal(text: str) -> str:
    """`text` where systemd expands specifiers (systemd.unit(5))."""
    return text.replace("%", "%%")


def _quoted(word: str) -> str:
    """One word of a command line or of a list of variables (systemd.service(5), Command lines)."""
    escaped = _literal(word).replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c >= " " and c != "\x7f" else f"\\x{ord(c):02x}" for c in escaped) + '"'


def _differs(path: Path, text: str) -> bool | None:
    """Whether another unit is there; None if there is none. Raises CommandError if that cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape") != text
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CommandError(f"{path} cannot be read ({error.strerror}).") from None


def _ask(question: str, path: Path) -> None:
    """Raises CommandError unless a person says yes."""
    if not sys.stdin.isatty():
        raise CommandError(f"Nothing was written: there is nobody to ask. Give --yes to write {path}.")
    try:
        answer = input(question)
    except EOFError:
        answer = ""
    if answer.strip().lower() not in ("y", "yes"):
        raise CommandError(f"Nothing was written to {path}.")
