"""The command line: one table of subcommands, and how one is chosen, given its Python, and run.

Each subcommand is a module with `add_arguments(parser)` and `run(args) -> int`, imported when it is asked for.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

from .. import __version__
from . import environment


@dataclass(frozen=True)
class Subcommand:
    """`passes_on`: which arguments it hands to another program (args.passed_on)."""

    help: str
    passes_on: Literal["nothing", "after --", "unknown"] = "nothing"


# A module may also have `prepare(args, argv)`: called by `./monarch` alone, to choose the Python that runs it.
# Without one it runs in `.venv`, so a module imports only the standard library at its top.
SUBCOMMANDS = {
    "bench": Subcommand(
        "measure a workflow on one machine and split, or (bench link) the link to each worker; arguments after -- go "
        "to ComfyUI",
        passes_on="after --",
    ),
    "convert": Subcommand("write a 16 bit model in FP8, NVFP4 or INT8"),
    "demo": Subcommand("render on one and on two processes of this machine, and compare"),
    "doctor": Subcommand(
        "look at everything that a split needs, with the fix beside what is wrong; arguments after -- go to ComfyUI",
        passes_on="after --",
    ),
    "inspect": Subcommand("say what model files are, whether they can be split, and what they need"),
    "pair": Subcommand("let this machine use a worker, or a driver use this machine's worker; list, remove"),
    "test": Subcommand("run the tests; other arguments go to pytest", passes_on="unknown"),
    "worker": Subcommand("serve this machine to a driver; arguments after -- go to ComfyUI", passes_on="after --"),
}


def main(argv: Sequence[str] | None = None, *, own_environment: bool = False) -> int:
    """Run one command. Returns the exit code: 0 fine, 1 a finding, 2 usage.

    `own_environment`: start again in `.venv` (or the Python that the subcommand chooses), as `./monarch` does.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        module, args = _parse(argv)
    except SystemExit as stop:  # argparse has already said why
        return stop.code if isinstance(stop.code, int) else 2
    try:
        if own_environment:
            prepare = getattr(module, "prepare", None)
            if prepare is None:
                environment.ensure_environment(args.subcommand, argv)
            prepare(args, argv)
        else:
            environment.require(args.subcommand)
        return module.run(args)
    except environment.CommandError as error:
        if getattr(args, "json", False):
            print(json.dumps({"ok": False, "error": str(error)}))
        print(f"monarch {args.subcommand}: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        return 130


def _parse(argv: list[str]) -> tuple[ModuleType, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        prog="monarch",
        description="Monarch splits each sampling step of one ComfyUI render over two machines.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"monarch {__version__}")
    subparsers = parser.add_subparsers(dest="subcommand", metavar="COMMAND", required=True)
    # Only the chosen module is imported: another one may need what is not installed yet.
    chosen = next((word for word in argv if not word.startswith("-")), None)
    module: ModuleType | None = None
    for name, subcommand in SUBCOMMANDS.items():
        subparser = subparsers.add_parser(name, help=subcommand.help, description=subcommand.help, allow_abbrev=False)
        if name == chosen:
            module = importlib.import_module(f".{name}", __name__)
            module.add_arguments(subparser)

    separator = argv.index("--") if "--" in argv else len(argv)
    after = argv[separator + 1 :]
    args, unknown = parser.parse_known_args(argv[:separator])
    assert module is not None  # required=True and the choices leave nothing else
    passes_on = SUBCOMMANDS[args.subcommand].passes_on
    if unknown and passes_on != "unknown":
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if after and passes_on == "nothing":
        parser.error(f"{args.subcommand} takes nothing after --")
    args.passed_on = [*unknown, *after]
    return module, args
