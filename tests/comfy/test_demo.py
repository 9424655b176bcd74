"""`monarch demo` with a real ComfyUI server and worker: the result, and that it leaves no process and no file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PACK = Path(__file__).parent.parent.parent

pytestmark = [pytest.mark.comfyui, pytest.mark.timeout(240), pytest.mark.usefixtures("comfy")]


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    return folder


@pytest.fixture
def demo(comfyui_path: Path, tmp_path: Path, temporary: Path) -> Iterator[Any]:
    """A function that starts the demo in a folder of its own; what it started is ended after the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(PACK), "demo", "--comfyui", str(comfyui_path), "--json", *arguments],
            cwd=tmp_path,
            env={**os.environ, "TMPDIR": str(temporary)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def processes_that_use(folder: Path) -> list[str]:
    commands = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:  # it has ended in the meantime
                continue
            if str(folder) in command:
                commands.append(command)
    return commands


def test_a_graph_is_rendered_by_comfyui_on_two_processes(demo: Any, temporary: Path, tmp_path: Path) -> None:
    process = demo("--steps", "2")
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    result = json.loads(out)
    assert result["runtime"].startswith("comfyui 0.")
    assert (result["nodes"], result["split"], result["steps"], result["steps_split"]) == (2, "rows", 2, 2)
    assert result["max_abs_diff"] <= 1e-4
    assert result["seconds"]["all"] > 0
    assert result["speedup"] == pytest.approx(result["seconds"]["one"] / result["seconds"]["all"], rel=0.01)
    assert result["image"] == str(tmp_path / "monarch-demo" / "monarch-demo.png")
    picture = Path(result["image"]).read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert b"MonarchSampler" in picture  # ComfyUI puts the graph into the pictures that it saves
    assert processes_that_use(temporary) == []
    assert list(temporary.iterdir()) == []


def test_stopped_while_all_start_it_ends_them(demo: Any, temporary: Path) -> None:
    process = demo()
    deadline = time.monotonic() + 30
    while len(processes_that_use(temporary)) < 3:  # server, worker, and the one that writes the model
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert "has ended" in err
    assert processes_that_use(temporary) == []
    assert list(temporary.iterdir()) == []
