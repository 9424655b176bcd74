"""`monarch bench WORKFLOW.json`: how much faster a user's own workflow is when it is split.

Finds or starts ComfyUI and prints; the measuring is `bench`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..bench.figures import figures
from ..bench.graph import MODES
from ..demo.signals import stopped_by_signals
from .environment import CommandError, find_comfyui, say

if TYPE_CHECKING:
    from ..demo.comfy_client import ComfyClient


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("a workflow (arguments after -- go to ComfyUI, if it is started)")
    group.add_argument("--runs", type=_count, default=3, metavar="N", help="runs of each mode after the first (3)")
    group.add_argument(
        "--modes", type=_modes, default=MODES, metavar="MODE,...", help=f"what to measure ({','.join(MODES)})"
    )
    group.add_argument("--out", type=Path, metavar="DIR", help="folder for the record, the report and the chart")
    group.add_argument(
        "--server", metavar="ADDRESS", help="the ComfyUI that runs (127.0.0.1:8188, else one is started)"
    )


def run(args: argparse.Namespace) -> int:
    """Measure, write the files, print what came of it. Exit code 1 if a run failed, or not all could be done."""
    from ..bench.errors import BenchError
    from ..bench.measurement import CHART, REPORT, finding, measure, write
    from ..bench.workflow import read_json
    from ..demo.comfy_client import ComfyError

    out = args.out or Path(f"monarch-bench-{Path(args.what).stem}-{time.strftime('%Y%m%d-%H%M%S')}")
    try:
        # Before a ComfyUI is started and hours are measured.
        read_json(Path(args.what))
        _require_writable(out)
        with stopped_by_signals():
            with _comfyui(args) as client:
                record = measure(Path(args.what), client, args.modes, args.runs, say)
            write(record, out)
    except BenchError as error:
        raise CommandError(str(error), code=2 if error.usage else 1) from None
    except (ComfyError, OSError) as error:
        raise CommandError(f"The measurement was cut short: {error}") from None
    problem = finding(record)
    if args.json:
        print(json.dumps({**record, "files": str(out)}))
    else:
        _print(record)
        print(f"\nReport: {out / REPORT}, chart: {out / CHART}")
    if problem:
        say(problem)
    return 0 if problem is None else 1


def _require_writable(out: Path) -> None:
    nearest = next(path for path in (out, *out.parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        why = "may not be written to" if nearest.is_dir() else "is no folder"
        raise CommandError(f"Nothing can be saved in {out}: {nearest} {why}. Name another folder with --out.", code=2)


@contextlib.contextmanager
def _comfyui(args: argparse.Namespace) -> Iterator[ComfyClient]:
    from ..bench.server import DEFAULT_ADDRESS, running, started

    client = running(args.server or DEFAULT_ADDRESS)
    if client is not None:
        if args.passed_on:
            raise CommandError(
                f"ComfyUI runs at {client.url} already and takes no arguments after --. End it, to have one started "
                "with them, or leave them out.",
                code=2,
            )
        yield client
        return
    if args.server:
        raise CommandError(f"No ComfyUI answers at {args.server}. Start it, or leave --server out to have one started.")
    comfyui = find_comfyui(args.comfyui)
    if comfyui is None or comfyui.python is None:
        lacks = "no ComfyUI was found" if comfyui is None else f"no Python that can run {comfyui.path} was found"
        raise CommandError(
            f"No ComfyUI answers at {DEFAULT_ADDRESS}, and {lacks}. Start ComfyUI, or name --comfyui PATH."
        )
    with started(comfyui.path, comfyui.python, args.passed_on, say) as client:
        yield client


def _print(record: dict[str, Any]) -> None:
    print(f"{'mode':<10}{'queue to saved file':>22}{'sampling':>12}{'speed-up':>10}{'load':>10}{'runs':>6}")
    for name, mode in record["modes"].items():
        if mode["median_s"] is None:
            why = next((run["why"] for run in mode["not_counted"]), "not measured")
            print(f"{name:<10}  {'failed' if mode['failed'] else 'no run that counts'}: {why}")
            continue
        low, high = mode["spread_s"]
        speedup = f"{record['speedup'][name]:.2f}x" if name in record["speedup"] else ""
        whole = f"{figures(mode['median_s'])} s ({figures(low)}-{figures(high)})"
        sampling = f"{figures(mode['sampling']['median_s'])} s"
        load = "-" if mode["load_s"] is None else f"{figures(mode['load_s'])} s"
        print(f"{name:<10}{whole:>22}{sampling:>12}{speedup:>10}{load:>10}{mode['runs']:>6}")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number of runs; give 1 or more")
    return int(text)


def _modes(text: str) -> tuple[str, ...]:
    named = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    unknown = [mode for mode in named if mode not in MODES]
    if unknown or not named:
        raise argparse.ArgumentTypeError(f"{text!r}: name some of {', '.join(MODES)}, with commas between them")
    return named
