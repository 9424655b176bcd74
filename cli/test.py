"""`monarch test`: the engine's tests in this Python, then those in tests/comfy in ComfyUI's own.

Chooses, starts and sums up; the tests and their options are pytest's.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from . import environment
from .environment import PACK, ComfyUI, CommandError

TESTS = PACK / "tests"
COMFYUI_TESTS = TESTS / "comfy"
# Beside ComfyUI's environment and not in it: testing must leave nothing in there.
COMFYUI_TOOLS = PACK / ".venv-comfyui-tests"
# For the tests of ComfyUI's page, where there is one of these or CHROMIUM_PATH names one.
_CHROMIUMS = ("chromium", "chromium-browser", "google-chrome")
_BROWSER_TOOLS = {"playwright>=1.50": "playwright"}
_FRONTEND = "comfyui-frontend-package"

_NO_TESTS_COLLECTED = 5  # pytest's exit code


@dataclass(frozen=True)
class Outcome:
    """One pytest run."""

    code: int
    passed: int
    failed: int
    skipped: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--comfyui", metavar="PATH", type=Path, help="ComfyUI's folder, if it is not found by itself")
    parser.add_argument("--without-comfyui", action="store_true", help="leave out the tests against a real ComfyUI")
    parser.add_argument("--prepare-only", action="store_true", help="make the environment, print its Python, and stop")
    parser.add_argument("--json", action="store_true", help="print the counts as one JSON object")


def run(args: argparse.Namespace) -> int:
    if args.prepare_only:
        print(json.dumps({"ok": True, "python": sys.executable}) if args.json else sys.executable)
        return 0
    if not TESTS.is_dir():
        raise CommandError(f"{PACK} has no tests: they are in the repository, not in an installed package.")
    comfyui, why_not = (None, "--without-comfyui") if args.without_comfyui else _find(args.comfyui)

    engine_paths, comfyui_paths, options = _sort(args.passed_on)
    everything = not engine_paths and not comfyui_paths
    report = sys.stderr if args.json else sys.stdout

    outcomes: list[Outcome] = []
    if engine_paths or everything:
        selection = engine_paths or [str(TESTS), f"--ignore={COMFYUI_TESTS}"]
        outcomes.append(_pytest(Path(sys.executable), [*selection, *options], dict(os.environ), report))
    if (comfyui_paths or everything) and comfyui is not None:
        assert comfyui.python is not None
        print(f"\nAgainst ComfyUI {comfyui.version} in {comfyui.path}", file=report, flush=True)
        selection = comfyui_paths or [str(COMFYUI_TESTS)]
        outcomes.append(
            _pytest(comfyui.python, [*selection, *options], _comfyui_environment(comfyui, comfyui.python), report)
        )
    elif comfyui_paths or everything:
        print(f"\nSKIPPED: the tests against a real ComfyUI ({why_not})", file=report, flush=True)
    return _summary(outcomes, comfyui, selected=bool(args.passed_on), as_json=args.json)


def _find(explicit: Path | None) -> tuple[ComfyUI | None, str]:
    """ComfyUI, or why there is none to test against."""
    comfyui = environment.find_comfyui(explicit)
    if comfyui is None:
        return None, "none found; clone it to ~/ComfyUI with its venv beside main.py, or set COMFYUI_PATH"
    if comfyui.python is None:
        return None, f"no Python that can run {comfyui.path} found; make its venv in {comfyui.path / 'venv'}"
    return comfyui, ""


def _sort(arguments: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """pytest's arguments: paths of engine tests, paths of tests against ComfyUI, and everything else."""
    engine: list[str] = []
    comfyui: list[str] = []
    options: list[str] = []
    for argument in arguments:
        file, *parts = argument.split("::")
        path = Path(os.path.abspath(file))
        if argument.startswith("-") or not path.exists() or not path.is_relative_to(TESTS):
            options.append(argument)
        elif path == TESTS:
            continue  # both parts, as without it
        else:
            group = comfyui if path.is_relative_to(COMFYUI_TESTS) else engine
            group.append("::".join([str(path), *parts]))
    return engine, comfyui, options


def _comfyui_environment(comfyui: ComfyUI, python: Path) -> dict[str, str]:
    """Environment variables for pytest in ComfyUI's Python, with the tools installed where they change nothing."""
    wanted = dict(environment.TEST_TOOLS)
    if environment.missing_imports(python, ["zmq"]):
        wanted["pyzmq>=25"] = "zmq"
    in_browser = "CHROMIUM_PATH" in os.environ or any(map(shutil.which, _CHROMIUMS))
    wanted.update(_BROWSER_TOOLS if in_browser else {})
    pip = [os.fspath(python), "-m", "pip"]
    if environment.missing_imports(python, ["pip"]):  # a venv made by uv
        pip = [sys.executable, "-m", "pip", "--python", os.fspath(python)]
    environment.install_once(
        wanted,
        stamp=COMFYUI_TOOLS / ".monarch-tools",
        arguments=[*pip, "install", "--upgrade", "--target", os.fspath(COMFYUI_TOOLS)],
        why=f"into {COMFYUI_TOOLS}, once, to test in ComfyUI's Python without changing it",
    )
    python_path = [os.fspath(COMFYUI_TOOLS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(python_path),
        "COMFYUI_PATH": os.fspath(comfyui.path),
        "MONARCH_FRONTENDS": os.pathsep.join(map(os.fspath, _frontends(comfyui, pip) if in_browser else ())),
        # A driver and its workers share the cores; torch's default of one thread per core for each stalls them all.
        "OMP_NUM_THREADS": "1",
    }


def _frontends(comfyui: ComfyUI, pip: list[str]) -> list[Path]:
    """Folders with ComfyUI's page: the one that this ComfyUI asks for, and the newest there was at the first use."""
    asked = re.search(rf"^{_FRONTEND}\S*", (comfyui.path / "requirements.txt").read_text("utf-8"), re.MULTILINE)
    folders = []
    for name, package in (("pinned", asked[0] if asked else _FRONTEND), ("newest", _FRONTEND)):
        folder = COMFYUI_TOOLS / "frontends" / name
        environment.install_once(
            [package],
            stamp=folder / ".monarch-tools",
            arguments=[*pip, "install", "--no-deps", "--upgrade", "--target", os.fspath(folder)],
            why=f"into {folder}, once, to test ComfyUI's page",
        )
        folders.append(folder)
    return folders


def _pytest(python: Path, arguments: list[str], variables: dict[str, str], report: TextIO) -> Outcome:
    folder = Path(tempfile.mkdtemp(prefix="monarch-test-"))
    try:
        counts = folder / "counts.xml"
        command = [os.fspath(python), "-m", "pytest", f"--junit-xml={counts}", *arguments]
        code = subprocess.run(command, cwd=PACK, env=variables, stdout=report).returncode
        return _outcome(code, counts)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _outcome(code: int, counts: Path) -> Outcome:
    total = failed = skipped = 0
    if counts.is_file():
        for suite in ElementTree.parse(counts).getroot().iter("testsuite"):
            total += int(suite.get("tests", 0))
            failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
            skipped += int(suite.get("skipped", 0))
    passed = max(total - failed - skipped, 0)
    if code not in (0, _NO_TESTS_COLLECTED):
        failed = max(failed, 1)  # pytest itself failed, before or after its tests
    return Outcome(code, passed, failed, skipped)


def _summary(outcomes: list[Outcome], comfyui: ComfyUI | None, *, selected: bool, as_json: bool) -> int:
    passed = sum(outcome.passed for outcome in outcomes)
    failed = sum(outcome.failed for outcome in outcomes)
    skipped = sum(outcome.skipped for outcome in outcomes)
    # A selection may well be empty in one part; a part that has no tests at all is broken.
    empty = [outcome for outcome in outcomes if outcome.code == _NO_TESTS_COLLECTED]
    ok = failed == 0 and bool(outcomes) and len(empty) < (len(outcomes) if selected else 1)
    if as_json:
        version = comfyui.version if comfyui else None
        print(json.dumps({"ok": ok, "passed": passed, "failed": failed, "skipped": skipped, "comfyui": version}))
    else:
        if not ok and failed == 0:
            print("\nNo test ran.")
        print(f"\nmonarch: {passed} passed, {failed} failed, {skipped} skipped")
    return 0 if ok else 1
