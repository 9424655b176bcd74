"""`monarch bench`: the arguments and the Python of both measurements, of a workflow and of the link to each worker."""

from __future__ import annotations

import argparse
from pathlib import Path

from . import bench_link, bench_workflow
from .environment import CommandError, prefer_comfyui

_NEEDS = ("torch", "zmq", "safetensors")
_LINK = "link"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        metavar="WORKFLOW.json | link",
        help="a workflow, to measure it on one machine and split; or link: what the network to the workers carries",
    )
    parser.add_argument(
        "workers", metavar="ADDRESS", nargs="*", help="link: workers to measure, instead of those in the configuration"
    )
    parser.add_argument("--comfyui", metavar="PATH", type=Path, help="ComfyUI's folder, if it is not found by itself")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    bench_workflow.add_arguments(parser)


def prepare(args: argparse.Namespace, argv: list[str]) -> None:
    """Start again in ComfyUI's Python if that has all it takes; else in `.venv`."""
    prefer_comfyui("bench", argv, _NEEDS, args.comfyui)


def run(args: argparse.Namespace) -> int:
    if args.what == _LINK:
        if args.passed_on:
            raise CommandError("bench link starts no ComfyUI, so it takes nothing after --", code=2)
        return bench_link.run(args)
    if args.workers:
        raise CommandError("bench WORKFLOW.json measures with the workers of the configuration; name none", code=2)
    return bench_workflow.run(args)
