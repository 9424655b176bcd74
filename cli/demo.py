"""`monarch demo`: renders one picture on one and on two processes of this machine, and compares them.

Chooses ComfyUI or the built-in model, prints and judges; the rendering is in demo/run_comfyui and demo/run_reference.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..demo.comfy_client import ComfyError
from ..demo.comparison import CFG, STEPS, Comparison
from ..demo.signals import stopped_by_signals
from .environment import PACK, ComfyUI, CommandError, ensure_environment, find_comfyui, missing_imports, say
from .get_comfyui import get_comfyui

SPLIT_MODES = ("auto", "rows", "tokens", "off")
PICTURE = "monarch-demo.png"


@dataclass(frozen=True)
class _Choice:
    """With which ComfyUI and Python to render, or, with None, why not and how to change that."""

    comfyui: ComfyUI | None
    python: Path | None
    why_not: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--split",
        choices=SPLIT_MODES,
        default="rows",
        help="rows: split every step by its rows; tokens: by its tokens; auto: as long as that is faster; "
        "off: one process (%(default)s)",
    )
    parser.add_argument("--steps", metavar="N", type=_steps, default=STEPS, help="sampling steps (%(default)s)")
    parser.add_argument(
        "--out", metavar="DIR", type=Path, default=Path("monarch-demo"), help="folder for the picture (%(default)s)"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--comfyui", metavar="PATH", type=Path, help="ComfyUI's folder, if it is not found by itself")
    which.add_argument(
        "--get-comfyui", action="store_true", help="clone ComfyUI into ~/comfy, with a venv, if there is none"
    )
    which.add_argument("--without-comfyui", action="store_true", help="render with the small built-in model")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")


def prepare(args: argparse.Namespace, argv: list[str]) -> None:
    """With ComfyUI everything heavy runs in its Python, so any Python will do here; else start again in `.venv`."""
    if _choose(args).comfyui is None:
        ensure_environment("demo", argv)


def run(args: argparse.Namespace) -> int:
    choice = _choose(args)
    image = _folder(args.out) / PICTURE
    busy = _busy()
    with (
        stopped_by_signals(),
        tempfile.TemporaryDirectory(prefix="monarch-demo-", ignore_cleanup_errors=True) as folder,
    ):
        try:
            comparison = _compare(choice, args, Path(folder), image)
        except KeyboardInterrupt:
            say("stopped; every process that the demo started has ended")
            raise
    problem = comparison.problem()
    if args.json:
        print(json.dumps(comparison.as_dict()))
        if problem:
            say(problem)
    else:
        _print(comparison, choice, busy)
        if problem:
            print(f"\n{problem}")
    return 1 if problem else 0


def _choose(args: argparse.Namespace) -> _Choice:
    if args.without_comfyui:
        return _Choice(None, None, "as --without-comfyui asks")
    if args.get_comfyui:
        get_comfyui()
    comfyui = find_comfyui(args.comfyui)
    if comfyui is None:
        return _Choice(
            None,
            None,
            "because no ComfyUI was found. To see it in ComfyUI, name its folder with --comfyui PATH, or let "
            "--get-comfyui fetch one",
        )
    if comfyui.python is None:
        return _Choice(
            None,
            None,
            f"because no Python that can run the ComfyUI in {comfyui.path} was found. To see it in ComfyUI, start the "
            f"demo with that Python: PYTHON {PACK} demo",
        )
    if missing_imports(comfyui.python, ["zmq"]):
        return _Choice(
            None,
            None,
            f"because {comfyui.python} cannot import zmq, Monarch's one requirement. To see it in ComfyUI: "
            f"{comfyui.python} -m pip install pyzmq",
        )
    return _Choice(comfyui, comfyui.python)


def _compare(choice: _Choice, args: argparse.Namespace, folder: Path, image: Path) -> Comparison:
    how: dict[str, Any] = {"split": args.split, "steps": args.steps, "folder": folder, "image": image, "say": say}
    try:
        if choice.comfyui is None or choice.python is None:
            say(f"using the small built-in model, {choice.why_not}")
            from ..demo.run_reference import run_reference

            return run_reference(**how)
        from ..demo.run_comfyui import run_comfyui

        return run_comfyui(choice.comfyui.path, choice.python, choice.comfyui.version, **how)
    except (ComfyError, RuntimeError, OSError) as error:  # OSError is also TimeoutError
        raise CommandError(_failure(error, choice)) from error


def _failure(error: Exception, choice: _Choice) -> str:
    with_what = f"ComfyUI {choice.comfyui.version} in {choice.comfyui.path}" if choice.comfyui else "the built-in model"
    next_step = "Leave ComfyUI out with --without-comfyui." if choice.comfyui else "Is there room on the disk?"
    return f"The demo did not get through with {with_what}: {error}\n{next_step}"


def _folder(path: Path) -> Path:
    """`path`, absolute and made: before minutes of work, not after."""
    path = path.expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        raise CommandError(
            f"The picture cannot be saved in {path} ({error.strerror}). Name another folder with --out.", code=2
        ) from error


def _print(comparison: Comparison, choice: _Choice, busy: str | None) -> None:
    size = f"{comparison.pixels} x {comparison.pixels}"
    what = "the built-in model" if choice.comfyui is None else f"ComfyUI {choice.comfyui.version}"
    print(
        f"\nOne picture of {size} in {comparison.steps} steps at CFG {CFG:g} with {what}, "
        "on the CPU with one thread for each process:\n"
    )
    names = ("one process", "the same again" if comparison.nodes == 1 else "two processes")
    print(f"  {names[0]:<16}{comparison.seconds_one:7.2f} s")
    print(f"  {names[1]:<16}{comparison.seconds_all:7.2f} s   {comparison.speedup:.2f} times as fast\n")
    if comparison.steps_split:
        print(f"{comparison.steps_split} of {comparison.steps} steps were split by {comparison.split}.")
    if 0 < comparison.steps_split < comparison.steps:
        print(f"In Monarch's words: {comparison.note}")
    print(
        f"The largest difference between the two latents is {comparison.max_abs_diff:.2g}.\n"
        "Times are from the start of a render to its last step, with the model loaded already.\n"
        f"Picture: {comparison.image} (noise, as the model's weights are random)"
    )
    if choice.comfyui is None:
        print(f"\nThis was Monarch's engine on a small built-in model, {choice.why_not}.")
    if _has_gpu():
        print("\nThe GPU of this machine was left alone: two processes on one GPU would show nothing.")
    if busy and comparison.nodes > 1:
        print(f"\n{busy}")


def _busy() -> str | None:
    """Why times that are measured here and now will say little, or None. Called before the demo makes a load itself."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores < 2:
        return "There is one core here for both processes, so the second one cannot make it faster."
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > cores - 1.5:
        return (
            f"Other programs kept this machine busy (load {load:.1f} on {cores} cores), so the times say little. "
            "Run it again when it is quiet."
        )
    return None


def _has_gpu() -> bool:
    return any(Path(device).exists() for device in ("/dev/nvidia0", "/dev/kfd")) or bool(shutil.which("nvidia-smi"))


def _steps(text: str) -> int:
    steps = int(text) if text.isascii() and text.isdigit() else 0
    if not 1 <= steps <= 1000:
        raise argparse.ArgumentTypeError(f"{text} is not a number of steps: give 1 to 1000")
    return steps
