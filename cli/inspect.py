"""`monarch inspect`: what model files are, from their headers, in a table for people or JSON for programs.

Finds the files and prints; what is in them is `formats`. Needs neither ComfyUI nor anything installed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from ..formats import FileReport, inspect_file
from ..formats.inspection import PICKLE_SUFFIXES
from .environment import CommandError

# What ComfyUI lists as model files, and GGUF, which it does not.
_SUFFIXES = PICKLE_SUFFIXES | {".safetensors", ".sft", ".gguf"}
_COLUMNS = ("file", "format", "family", "parameters", "size", "layers", "")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", metavar="FILE", nargs="+", type=Path, help="a model file, or a folder to look for model files in"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list with one object for each file")


def prepare(args: argparse.Namespace, argv: list[str]) -> None:
    """Stay in this Python: only headers are read."""


def run(args: argparse.Namespace) -> int:
    reports = [inspect_file(path) for path in _files(args.files)]
    if args.json:
        print(json.dumps([asdict(report) for report in reports], indent=2))
    else:
        _print(reports)
    return 0 if all(report.loadable for report in reports) else 1


def _files(paths: Iterable[Path]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            found.append(path)
            continue
        inside = sorted(_models_in(path))
        if not inside:
            raise CommandError(f"{path} holds no model files ({', '.join(sorted(_SUFFIXES))}). Name another.", code=2)
        found += inside
    return found


def _models_in(folder: Path) -> Iterator[Path]:
    """Model files in the folder and those below it, also behind links; each folder once."""
    seen: set[tuple[int, int]] = set()
    for here, folders, names in os.walk(folder, onerror=_cannot_read, followlinks=True):
        status = os.stat(here)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        yield from (Path(here, name) for name in names if Path(name).suffix.lower() in _SUFFIXES)


def _cannot_read(error: OSError) -> None:
    print(f"monarch inspect: {error.filename} cannot be read ({error.strerror}) and is left out", file=sys.stderr)


def _print(reports: list[FileReport]) -> None:
    rows = [_COLUMNS, *map(_row, reports)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    problems = [problem for report in reports for problem in report.problems]
    if problems:
        print()
    for problem in problems:
        print(f"- {problem}")


def _row(report: FileReport) -> tuple[str, ...]:
    layers = ", ".join(f"{count} {name}" for name, count in sorted(report.layers.items(), key=lambda item: -item[1]))
    return (
        _printable(report.file),
        report.format,
        report.family or "-",
        _scaled(report.parameters, ("", " K", " M", " G")) if report.parameters else "-",
        _scaled(report.bytes, (" B", " kB", " MB", " GB")),
        layers or "-",
        "ok" if report.loadable and not report.problems else "see below" if report.loadable else "refused",
    )


def _scaled(number: float, units: tuple[str, ...]) -> str:
    """Three digits and a unit, in steps of 1000."""
    step = 0
    while number >= 999.5 and step < len(units) - 1:
        number /= 1000
        step += 1
    return f"{number:.3g}{units[step]}"


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
