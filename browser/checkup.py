"""Runs `monarch doctor` for the tab, in a process of its own: its tiny model must not meet ComfyUI's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from .board import Findings, board
from .turns import GiveWay, turns

_PACK = Path(__file__).resolve().parent.parent
_SECONDS = 300.0
_PATIENCE = 10.0
_POLL = 0.1


def examine(comfyui: Path, arguments: list[str]) -> None:
    """Put on the board what the doctor finds with this ComfyUI and these flags of it. Takes up to some minutes."""
    board.found(Findings(running=True))
    findings = Findings(problem="the doctor gave no answer; run `monarch doctor` on this machine")
    try:
        with turns.aside(_PATIENCE) as check:
            findings = _run(comfyui, arguments, check)
    except GiveWay:
        findings = Findings(problem="a render needs the workers; check again when it is done")
    finally:
        board.found(findings)


def _run(comfyui: Path, arguments: list[str], check: Any) -> Findings:
    command = [sys.executable, os.fspath(_PACK / "__main__.py"), "doctor", "--json", "--comfyui", os.fspath(comfyui)]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [*command, "--", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.DEVNULL,
        )
        try:
            until = time.monotonic() + _SECONDS
            while process.poll() is None:
                check()
                if time.monotonic() > until:
                    return Findings(problem=f"the doctor took longer than {_SECONDS:.0f} s")
                time.sleep(_POLL)
        finally:
            _end(process)
        output.seek(0)
        try:
            return Findings(checks=json.loads(output.read())["checks"])
        except (ValueError, KeyError, TypeError):
            return Findings(problem=f"the doctor ended with code {process.returncode}; run `monarch doctor` here")


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
