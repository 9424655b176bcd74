"""`monarch demo` without ComfyUI: real processes, what it prints and leaves behind, and how it fetches a ComfyUI."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from monarch_split import cli
from monarch_split.cli import demo, environment, get_comfyui
from monarch_split.cli.environment import ComfyUI, CommandError
from monarch_split.demo.comparison import Comparison, steps_split

PACK = Path(__file__).parent.parent
GOOD = Comparison(
    runtime="reference",
    nodes=2,
    split="rows",
    steps=4,
    steps_split=4,
    pixels=64,
    seconds_one=3.0,
    seconds_all=2.0,
    max_abs_diff=1e-6,
    image=Path("/pictures/monarch-demo.png"),
)


def png_size(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", content[16:24])


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


class TestWithRealProcesses:
    def test_two_processes_render_the_same_picture(self, tmp_path: Path) -> None:
        temporary = tmp_path / "temporary"
        temporary.mkdir()
        done = subprocess.run(
            [sys.executable, str(PACK), "demo", "--without-comfyui", "--json", "--steps", "2", "--out", "a folder"],
            cwd=tmp_path,
            env={**os.environ, "TMPDIR": str(temporary)},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        assert result.pop("seconds").keys() == {"one", "all"}
        assert result.pop("speedup") > 0
        assert result.pop("max_abs_diff") <= 1e-4
        image = tmp_path / "a folder" / "monarch-demo.png"
        assert result == {
            "runtime": "reference",
            "nodes": 2,
            "split": "rows",
            "steps": 2,
            "steps_split": 2,
            "image": str(image),
        }
        assert png_size(image) == (512, 512)
        assert "built-in model" in done.stderr
        assert list(temporary.iterdir()) == []

    @pytest.mark.parametrize(("number", "during"), [(signal.SIGINT, "warming up"), (signal.SIGTERM, "starting")])
    def test_stopped_it_ends_its_processes_and_removes_its_files(
        self, tmp_path: Path, number: int, during: str
    ) -> None:
        temporary = tmp_path / "temporary"
        temporary.mkdir()
        process = subprocess.Popen(
            [sys.executable, str(PACK), "demo", "--without-comfyui", "--json"],
            cwd=tmp_path,
            env={**os.environ, "TMPDIR": str(temporary)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stderr is not None  # for the type checker
            assert any(during in line for line in process.stderr)
            deadline = time.monotonic() + 10
            while not (started := children(process.pid)):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            process.send_signal(number)
            out, err = process.communicate(timeout=30)
        finally:
            process.kill()
            process.wait()
        assert process.returncode == 130
        assert out == ""
        assert err.endswith("every process that the demo started has ended\n")
        assert not any(is_running(pid) for pid in started)
        assert list(temporary.iterdir()) == []

    def test_off_takes_one_process(self, tmp_path: Path) -> None:
        # In a process of its own because it sets the number of torch's threads.
        code = (
            "import json, runpy, sys\n"
            "from pathlib import Path\n"
            f"runpy.run_path({str(PACK / '__main__.py')!r})['load_pack']()\n"
            "from monarch_split.demo.run_reference import run_reference\n"
            "folder = Path(sys.argv[1])\n"
            "found = run_reference('off', 1, folder, folder / 'picture.png', print, pixels=64)\n"
            "assert found.problem() is None\n"
            "print(json.dumps(found.as_dict()))"
        )
        done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout.splitlines()[-1])
        assert (result["nodes"], result["split"], result["steps_split"]) == (1, "off", 0)
        assert result["max_abs_diff"] == 0
        assert png_size(Path(result["image"])) == (64, 64)


class TestVerdict:
    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            ({}, None),
            ({"max_abs_diff": 2e-4}, "differ"),
            ({"max_abs_diff": float("nan")}, "differ"),
            ({"split": "none", "steps_split": 0, "note": "One machine: the reason."}, "One machine: the reason."),
            ({"split": "off", "steps_split": 0, "nodes": 1}, None),
        ],
    )
    def test_the_exit_code_and_a_sentence_say_whether_it_went_well(
        self,
        changes: dict[str, Any],
        says: str | None,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr(demo, "_compare", lambda *_: dataclasses.replace(GOOD, **changes))
        for as_json in ([], ["--json"]):
            code = cli.main(["demo", "--without-comfyui", "--out", str(tmp_path), *as_json])
            assert code == (0 if says is None else 1)
            output = capsys.readouterr()
            if as_json:
                assert json.loads(output.out)["steps"] == 4
            assert says is None or says in (output.err if as_json else output.out)

    def test_a_person_reads_both_times_the_picture_and_which_model_it_was(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(demo, "_compare", lambda *_: GOOD)
        monkeypatch.setattr(demo, "find_comfyui", lambda explicit: None)
        assert cli.main(["demo", "--out", str(tmp_path)]) == 0
        text = capsys.readouterr().out
        for part in ("3.00 s", "2.00 s", "1.50 times", "4 of 4 steps", "/pictures/", "built-in", "--get-comfyui"):
            assert part in text

    @pytest.mark.parametrize(
        ("cores", "load", "says"), [(2, 0.1, None), (2, 1.2, "load 1.2 on 2 cores"), (1, 0.0, "one core")]
    )
    def test_times_from_a_busy_machine_come_with_a_warning(
        self, cores: int, load: float, says: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
        monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0), raising=False)
        warning = demo._busy()
        assert (warning is None) if says is None else says in (warning or "")

    @pytest.mark.parametrize(("forwards", "split", "expected"), [(4, 4, 4), (8, 6, 3), (4, 0, 0), (0, 0, 0)])
    def test_steps_are_counted_whether_or_not_a_step_is_one_forward(
        self, forwards: int, split: int, expected: int
    ) -> None:
        assert steps_split({"forwards": forwards, "forwards_split": split}, 4) == expected


class TestUsage:
    @pytest.mark.parametrize(
        "arguments",
        [
            ["--steps", "0"],
            ["--steps", "many"],
            ["--split", "halves"],
            ["--get-comfyui", "--without-comfyui"],
            ["more"],
        ],
    )
    def test_wrong_arguments(self, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["demo", *arguments]) == 2
        assert capsys.readouterr().out == ""

    def test_a_folder_that_cannot_be_made_is_an_error_before_any_work(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(demo, "_compare", lambda *_: pytest.fail("rendered"))
        (tmp_path / "file").touch()
        assert cli.main(["demo", "--without-comfyui", "--out", str(tmp_path / "file" / "folder")]) == 2
        assert "--out" in capsys.readouterr().err

    def test_a_worker_that_does_not_start_is_one_error_with_its_words(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def fail(**_: Any) -> None:
            raise RuntimeError("the worker did not start:\nits words")

        stand_in = SimpleNamespace(run_reference=fail)  # the real one would import torch
        monkeypatch.setitem(sys.modules, "monarch_split.demo.run_reference", stand_in)
        assert cli.main(["demo", "--without-comfyui", "--out", str(tmp_path), "--json"]) == 1
        output = capsys.readouterr()
        assert "its words" in json.loads(output.out)["error"]
        assert "Traceback" not in output.err


class TestChoice:
    def choose(self, monkeypatch: pytest.MonkeyPatch, found: ComfyUI | None, missing: list[str]) -> demo._Choice:
        monkeypatch.setattr(demo, "find_comfyui", lambda explicit: found)
        monkeypatch.setattr(demo, "missing_imports", lambda python, names: missing)
        _, args = cli._parse(["demo"])
        return demo._choose(args)

    def test_comfyui_is_used_where_it_is_found_and_can_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        comfyui = ComfyUI(Path("/c"), "0.33.0", Path("/c/python"))
        assert self.choose(monkeypatch, comfyui, []).comfyui == comfyui

    @pytest.mark.parametrize(
        ("found", "missing", "says"),
        [
            (None, [], "--get-comfyui"),
            (ComfyUI(Path("/c"), "0.33.0", None), [], "PYTHON"),
            (ComfyUI(Path("/c"), "0.33.0", Path("/c/python")), ["zmq"], "/c/python -m pip install pyzmq"),
        ],
    )
    def test_else_the_reason_says_what_to_do(
        self, monkeypatch: pytest.MonkeyPatch, found: ComfyUI | None, missing: list[str], says: str
    ) -> None:
        choice = self.choose(monkeypatch, found, missing)
        assert choice.comfyui is None
        assert says in choice.why_not

    @pytest.mark.parametrize("with_comfyui", [False, True])
    def test_only_the_built_in_model_needs_an_environment_of_its_own(
        self, monkeypatch: pytest.MonkeyPatch, with_comfyui: bool
    ) -> None:
        made: list[str] = []
        monkeypatch.setattr(demo, "ensure_environment", lambda subcommand, argv: made.append(subcommand))
        self.choose(monkeypatch, ComfyUI(Path("/c"), "1", Path("/c/python")) if with_comfyui else None, [])
        _, args = cli._parse(["demo"])
        demo.prepare(args, ["demo"])
        assert made == ([] if with_comfyui else ["demo"])

    def test_with_comfyui_the_command_imports_nothing_that_python_does_not_bring(self) -> None:
        code = (
            "import runpy, sys\n"
            f"runpy.run_path({str(PACK / '__main__.py')!r})['load_pack']()\n"
            "import monarch_split.cli.demo, monarch_split.demo.run_comfyui\n"
            "assert not {'torch', 'numpy', 'zmq', 'safetensors', 'PIL'} & set(sys.modules)"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


class TestGettingComfyUI:
    @pytest.fixture
    def home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A home folder without ComfyUI, stand-ins for git and Python, and a file `offline` that makes both fail."""
        programs, home = tmp_path / "programs", tmp_path / "home"
        programs.mkdir()
        home.mkdir()
        git = programs / "git"
        git.write_text(
            '#!/bin/sh\nPATH=/usr/bin:/bin\necho "git $*" >> "$HOME/log"\n'
            'for target; do :; done\nmkdir -p "$target/comfy"\n[ -e "$HOME/offline" ] && exit 128\n'
            'touch "$target/main.py"\necho \'__version__ = "0.33.0"\' > "$target/comfyui_version.py"\n'
        )
        python = programs / "python"
        python.write_text(
            '#!/bin/sh\nPATH=/usr/bin:/bin\ncase "$*" in\n'
            '*" venv "*|"-m venv "*) for target; do :; done; mkdir -p "$target/bin"; cp "$0" "$target/bin/python";;\n'
            '*"-m pip "*) echo "pip $*" >> "$HOME/log"; [ -e "$HOME/offline" ] && exit 1; touch "$HOME/installed";;\n'
            '*) [ -e "$HOME/installed" ] || echo torch;;\nesac\n'
        )
        for program in (git, python):
            program.chmod(0o755)
        monkeypatch.setenv("HOME", str(home))
        monkeypatch.setenv("PATH", str(programs))
        for variable in ("COMFYUI_PATH", "MONARCH_PYTHON", "MONARCH_STARTED_FROM"):
            monkeypatch.delenv(variable, raising=False)
        monkeypatch.setattr(environment, "PACK", tmp_path / "elsewhere")
        # Only the environment that it makes may be found to run ComfyUI, and not the Python of this test.
        monkeypatch.setattr(sys, "executable", str(tmp_path / "no python"))
        monkeypatch.setattr(get_comfyui, "sys", SimpleNamespace(executable=str(python), stderr=sys.stderr))
        return home

    def log(self, home: Path) -> list[str]:
        return (home / "log").read_text().splitlines()

    def test_it_clones_a_release_and_makes_an_environment_once(self, home: Path) -> None:
        for _ in range(2):
            get_comfyui.get_comfyui()
        clone, pip = self.log(home)
        assert clone.startswith(
            "git clone --quiet --depth 1 --branch v0.33.0 https://github.com/comfyanonymous/ComfyUI"
        )
        assert f"--requirement={home}/comfy/ComfyUI/requirements.txt pyzmq" in pip
        assert sorted(path.name for path in (home / "comfy").iterdir()) == ["ComfyUI", "venv"]
        found = environment.find_comfyui()
        assert found is not None
        assert found.python == home / "comfy" / "venv" / "bin" / "python"

    def test_without_network_it_says_so_and_leaves_no_half_clone(self, home: Path) -> None:
        (home / "offline").touch()
        with pytest.raises(CommandError, match=r"git could not clone .* network"):
            get_comfyui.get_comfyui()
        assert list((home / "comfy").iterdir()) == []

    def test_an_installation_that_failed_is_taken_up_again_without_cloning(self, home: Path) -> None:
        get_comfyui._clone(home / "comfy" / "ComfyUI")
        (home / "offline").touch()
        with pytest.raises(CommandError, match="pip could not install"):
            get_comfyui.get_comfyui()
        (home / "offline").unlink()
        get_comfyui.get_comfyui()
        assert [line.split()[0] for line in self.log(home)] == ["git", "pip", "pip"]

    def test_without_git_it_says_so(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", str(home))
        with pytest.raises(CommandError, match="Install git"):
            get_comfyui.get_comfyui()

    def test_a_folder_of_that_name_is_left_alone(self, home: Path) -> None:
        (home / "comfy" / "ComfyUI").mkdir(parents=True)
        with pytest.raises(CommandError, match="Move it away"):
            get_comfyui.get_comfyui()

    def test_it_is_never_fetched_unasked(self, home: Path) -> None:
        _, args = cli._parse(["demo"])
        assert "--get-comfyui" in demo._choose(args).why_not
        assert not (home / "log").exists()
