"""`monarch convert`: a 16 or 32 bit model in FP8, NVFP4 or INT8, for ComfyUI on one machine or two.

Checks the arguments, chooses the Python and prints; the converting is `formats.convert`.
"""

from __future__ import annotations

import argparse
import errno
import json
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ..demo.signals import stopped_by_signals
from ..formats import UnreadableFile, UnsupportedFile
from .environment import CommandError, find_comfyui, missing_imports, run_in

if TYPE_CHECKING:
    from ..formats.convert import Converted

_NEEDS = ("torch", "comfy_kitchen")
_BAR = 24
_LINE_SECONDS = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="IN", type=Path, help="a BF16, FP16 or FP32 safetensors file")
    parser.add_argument("target", metavar="OUT", type=Path, help="the file to write (.safetensors)")
    parser.add_argument("--to", choices=["fp8", "nvfp4", "int8"], required=True, help="the format to write")
    parser.add_argument(
        "--layers",
        metavar="PATTERN",
        nargs="+",
        default=[],
        help="quantise the layers whose names match, such as 'double_blocks.*', instead of all linear layers of blocks",
    )
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    parser.add_argument("--comfyui", metavar="PATH", type=Path, help="ComfyUI's folder, if it is not found by itself")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def prepare(args: argparse.Namespace, argv: list[str]) -> None:
    """Start again in ComfyUI's Python: only there is comfy-kitchen."""
    _check(args)
    comfyui = find_comfyui(args.comfyui)
    if comfyui is None or comfyui.python is None:
        raise CommandError(
            "Converting needs comfy-kitchen, which is in ComfyUI's Python, and no ComfyUI with a venv was found. "
            f"Name its folder with --comfyui PATH, or run: PYTHON {Path(__file__).parent.parent} convert …"
        )
    missing = missing_imports(comfyui.python, _NEEDS)
    if missing:
        raise CommandError(_lacks(str(comfyui.python), missing))
    run_in(comfyui.python, argv)


def run(args: argparse.Namespace) -> int:
    _check(args)
    missing = missing_imports(Path(sys.executable), _NEEDS)
    if missing:
        raise CommandError(_lacks(sys.executable, missing))
    from ..formats.convert import convert

    print(f"Converting {args.source} to {args.to}, as {args.target}.", file=sys.stderr, flush=True)
    show = _show_bar if sys.stderr.isatty() else _Lines()
    try:
        with stopped_by_signals():
            converted = convert(args.source, args.target, args.to, layers=args.layers, progress=show)
    except (UnsupportedFile, UnreadableFile) as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        fix = "Free some space there, or name another disk." if full else "Name a folder that can be written to."
        reason = error.strerror or str(error)
        raise CommandError(f"{args.target} cannot be written: {reason}. {fix} Nothing was left there.") from None
    if args.json:
        print(json.dumps({"ok": True, **asdict(converted)}))
    else:
        _print(converted)
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.target.is_dir():
        raise CommandError(f"{args.target} is a folder. Name the file to write, such as {args.target}/NAME.", code=2)
    if args.target.exists() and args.source.exists() and args.target.samefile(args.source):
        raise CommandError(f"IN and OUT are the same file, {args.target}. Name another for OUT.", code=2)
    if not args.target.name.endswith((".safetensors", ".sft")):
        raise CommandError(f"{args.target} does not end in .safetensors, so ComfyUI would not load it.", code=2)
    if not args.target.parent.is_dir():
        raise CommandError(f"There is no folder {args.target.parent}. Make it, or name another.", code=2)
    if args.target.exists():
        if not args.target.is_file():
            raise CommandError(f"{args.target} is a pipe or a device, not a file. Name another.", code=2)
        if not args.force:
            raise CommandError(f"{args.target} exists. Name another file, or replace it with --force.", code=2)


def _lacks(python: str, missing: list[str]) -> str:
    what = " and ".join(name.replace("_", "-") for name in missing)
    return (
        f"{python} has no {what}, which quantises. It comes with ComfyUI's own requirements (0.7 and newer): install "
        "those, or name the ComfyUI that has it with --comfyui PATH."
    )


class _Lines:
    """Progress where there is no terminal: a line at the begin, one now and then, and one at the end."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, done: int, total: int, name: str) -> None:
        if done == total or time.monotonic() >= self._next:
            self._next = time.monotonic() + _LINE_SECONDS
            last = "; waiting for the disk" if done == total else ""
            print(f"{done} of {total} layers are converted{last}.", file=sys.stderr, flush=True)


def _show_bar(done: int, total: int, name: str) -> None:
    filled = _BAR * done // total
    bar = "#" * filled + "-" * (_BAR - filled)
    print(f"\r\033[K[{bar}] {done}/{total} {name[:60]}", end="" if done < total else "\n", file=sys.stderr, flush=True)


def _print(converted: Converted) -> None:
    width = max(len(layer.name) for layer in converted.layers)
    for layer in converted.layers:
        shape = "x".join(map(str, layer.shape))
        print(f"{layer.name.ljust(width)}  {shape:>13}  {layer.error:.4f}")
    errors = [layer.error for layer in converted.layers]
    worst = max(converted.layers, key=lambda layer: layer.error)
    print(
        f"{converted.file}: {len(errors)} layers in {converted.format}, {converted.kept} other tensors in 16 bits or "
        f"as they were; {converted.bytes_before / 1e9:.2f} GB are now {converted.bytes_after / 1e9:.2f} GB.\n"
        f"Relative error of the weights: median {statistics.median(errors):.4f}, "
        f"largest {worst.error:.4f} ({worst.name})."
    )
