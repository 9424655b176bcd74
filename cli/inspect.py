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
from ..formats.contents import CONTENTS
from ..formats.inspection import PICKLE_SUFFIXES, formats_of

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
    try:
        if args.json:
            print(json.dumps([asdict(report) for report in reports], indent=2))
        else:
            _print(reports)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever reads this has seen enough (head, say); Python would complain of it once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1 if any(report.refused for report in reports) else 0


def _files(paths: Iterable[Path]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            found.append(path)
            continue
        inside = sorted(_models_in(path))
        if not inside:
            _say(f"{path} holds no model files ({', '.join(sorted(_SUFFIXES))})")
        found += inside
    return found


def _models_in(folder: Path) -> Iterator[Path]:
    """Model files in the folder and those below it, also behind links; each folder once.

    Models are often kept on another disk and linked to, so links are followed; those that lead outside are named.
    """
    seen: set[tuple[int, int]] = set()
    root = folder.resolve()
    for here, folders, names in os.walk(folder, onerror=_cannot_read, followlinks=True):
        if os.path.islink(here) and Path(here) != folder and not (there := Path(here).resolve()).is_relative_to(root):
            _say(f"{here} is a link to {there}, which is looked into, too")
        status = os.stat(here)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        yield from (Path(here, name) for name in names if Path(name).suffix.lower() in _SUFFIXES)


def _cannot_read(error: OSError) -> None:
    _say(f"{error.filename} cannot be read ({error.strerror}) and is left out")


def _say(sentence: str) -> None:
    print(f"monarch inspect: {_printable(sentence)}.", file=sys.stderr)


def _print(reports: list[FileReport]) -> None:
    if not reports:
        return
    rows = [_COLUMNS, *map(_row, reports)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    problems = [problem for report in reports if report.content not in CONTENTS for problem in report.problems]
    # What they are stands in the table; what that means is the same for all of a kind.
    held = dict.fromkeys(CONTENTS[report.content] for report in reports if report.content in CONTENTS)
    problems += [f"A {content.title} is not split. {content.use}" for content in held]
    if problems:
        print()
    for problem in problems:
        print(f"- {problem}")


def _row(report: FileReport) -> tuple[str, ...]:
    other = CONTENTS[report.content].title if report.content in CONTENTS else "-"
    layers = ", ".join(f"{count} {name}" for name, count in sorted(report.layers.items(), key=lambda item: -item[1]))
    return (
        _printable(report.file),
        "+".join(formats_of(report)),
        report.family or other,
        _scaled(report.parameters, ("", " K", " M", " G")) if report.parameters else "-",
        _scaled(report.bytes, (" B", " kB", " MB", " GB")),
        layers or "-",
        "refused" if report.refused else "see below" if report.problems else "ok",
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
