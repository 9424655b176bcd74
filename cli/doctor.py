"""`monarch doctor`: looks at everything that a split needs, before any render and without a running ComfyUI.

Chooses the Python and prints; what is looked at, and how, is `distributed.doctor`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ..demo.signals import stopped_by_signals
from .environment import ComfyUI, ensure_environment, find_comfyui, missing_imports, run_in
from .worker import set_before_torch

if TYPE_CHECKING:
    from ..distributed.doctor import Check, Here

# What ComfyUI and the engine cannot do without.
_NEEDS = ("torch", "aiohttp", "zmq")


@dataclass(frozen=True)
class _Choice:
    """With which ComfyUI to look, and the Python to do it in; with None, why without."""

    comfyui: ComfyUI | None = None
    python: Path | None = None
    without: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--comfyui", metavar="PATH", type=Path, help="ComfyUI's folder, if it is not found by itself")
    which.add_argument("--without-comfyui", action="store_true", help="look at what can be looked at without ComfyUI")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def prepare(args: argparse.Namespace, argv: list[str]) -> None:
    """Start again in ComfyUI's Python, whose software is the one to look at; without it, in `.venv`."""
    python = _choose(args).python
    if python is not None:
        run_in(python, argv)
    ensure_environment("doctor", argv)


def run(args: argparse.Namespace) -> int:
    set_before_torch(args.passed_on)
    checks: list[Check] = []
    out = sys.stdout
    with (
        stopped_by_signals(),
        # ComfyUI and its packages print what they like while they are imported.
        contextlib.redirect_stdout(sys.stderr),
        tempfile.TemporaryDirectory(prefix="monarch-doctor-", ignore_cleanup_errors=True) as folder,
    ):
        for check in _examine(args, Path(folder)):
            checks.append(check)
            if not args.json:
                _print(check, out)
    ok = all(check.ok for check in checks)
    if args.json:
        print(json.dumps({"ok": ok, "checks": [check.as_dict() for check in checks]}))
    else:
        print(f"\n{_verdict(checks)}")
    return 0 if ok else 1


def _choose(args: argparse.Namespace) -> _Choice:
    if args.without_comfyui:
        return _Choice(without="as --without-comfyui asks")
    comfyui = find_comfyui(args.comfyui)
    if comfyui is None:
        return _Choice(without="because none was found")
    for python in (Path(sys.executable), comfyui.python):
        if python is not None and not missing_imports(python, _NEEDS):
            return _Choice(comfyui, python)
    if comfyui.python is None:
        return _Choice(without=f"because no Python that can run the one in {comfyui.path} was found")
    missing = ", ".join(missing_imports(comfyui.python, _NEEDS))
    return _Choice(without=f"because {comfyui.python} cannot import {missing} (pip install pyzmq has zmq)")


def _examine(args: argparse.Namespace, folder: Path) -> Iterator[Check]:
    from ..distributed.doctor import examine

    yield from examine(_here(_choose(args), args.passed_on, folder))


def _here(choice: _Choice, comfyui_args: list[str], folder: Path) -> Here:
    from ..demo.reference_runtime import ReferenceRuntime
    from ..demo.tiny_trial import comfyui_trial, reference_trial
    from ..distributed.doctor import Here
    from ..distributed.model_store import ComfyRuntime

    without, broken, comfyui = choice.without, False, choice.comfyui
    if comfyui is not None and choice.python != Path(sys.executable):
        without = f"because {sys.executable} cannot run it; {choice.python} can"
    elif comfyui is not None:
        try:
            runtime = ComfyRuntime(comfyui.path, comfyui_args)
            return Here(
                runtime,
                partial(comfyui_trial, runtime, folder),
                comfyui=str(comfyui.path),
                model_folders=runtime.model_folders(),
            )
        except (Exception, SystemExit) as error:  # SystemExit: flags that ComfyUI does not know
            without, broken = f"as the one in {comfyui.path} cannot be imported ({error!r})", True
    reference = ReferenceRuntime()
    return Here(reference, partial(reference_trial, reference, folder), without=without, broken=broken)


def _print(check: Check, out: TextIO) -> None:
    print(f"{check.status}  {check.name:<28}  {check.detail}", file=out)
    if check.fix:
        print(f"      {'':<28}  fix: {check.fix}", file=out)
    out.flush()


def _verdict(checks: list[Check]) -> str:
    failed = [check.name for check in checks if not check.ok]
    warnings = sum(check.status == "warn" for check in checks)
    if failed:
        return f"Not ready: {', '.join(failed)}."
    noted = {0: "", 1: ", with a warning"}.get(warnings, f", with {warnings} warnings")
    return f"Ready{noted}: the next render can be split."
