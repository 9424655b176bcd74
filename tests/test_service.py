"""The systemd unit of a worker: it says what was asked for, whatever the paths, and is written only after a yes."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from monarch_split import cli
from monarch_split.cli import service
from monarch_split.cli.environment import PACK, CommandError

ODD = [
    "a b",
    "a;b",
    ";",
    'say "hi"',
    "back\\slash\\",
    "50%",
    "%h",
    "$HOME",
    "${HOME}",
    "$$",
    "it's",
    "",
    "-",
    "ünïcode",
]


def parse(*argv: str) -> argparse.Namespace:
    return cli._parse(["worker", "--runtime=reference", *argv])[1]


def value(text: str, name: str) -> list[str]:
    """The values of a setting in a unit."""
    return [line.partition("=")[2] for line in text.splitlines() if line.startswith(f"{name}=")]


def words(text: str) -> list[str]:
    """The command of a unit. Inside double quotes systemd and a shell agree, but for dollar and per cent signs."""
    (command,) = value(text, "ExecStart")
    read = [word.replace("%%", "%") for word in shlex.split(command)]
    assert read[0].startswith(":"), "without a colon, systemd replaces $NAME"
    return [read[0][1:], *read[1:]]


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that is run by systemd, whose user has no units. Returns where the worker's would be."""
    for name in service._KEPT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(service, "_BOOTED", tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "systemd" / "user" / "monarch-worker.service"


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a person at the terminal will answer; questions that are asked are added in front."""
    given: list[str] = []
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: print(question) or given.pop())
    return given


class TestTheUnit:
    def test_it_runs_the_same_worker_in_the_same_python(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        args = parse(
            *("--listen", "127.0.0.1", "--listen", "127.0.0.2", "--port", "7777", "--name", "spark 2", "--pair"),
            *("--cache", "big disk", "--install-service", "--yes", "--", "--use-sage-attention", "--base-directory=x"),
        )
        command = service.worker_command(args, tmp_path / "ComfyUI")
        assert command[:3] == [sys.executable, str(PACK), "worker"]
        assert cli._parse(command[2:])[1] == argparse.Namespace(
            **{
                **vars(args),
                "comfyui": tmp_path / "ComfyUI",
                "cache": tmp_path / "big disk",
                **dict.fromkeys(("install_service", "yes", "pair"), False),
            }
        )

    def test_words_arrive_as_they_were_given(self) -> None:
        command = ["/opt/a b/50% $HOME/python", *ODD]
        assert words(service.unit_text(command, {}, None)) == command

    def test_what_could_break_a_line_is_escaped(self) -> None:
        text = service.unit_text(["/python", "a\nExecStartPre=/bin/evil\t\x7f"], {"XDG_CACHE_HOME": "/a\nb"}, None)
        assert value(text, "ExecStart") == ['":/python" "a\\x0aExecStartPre=/bin/evil\\x09\\x7f"']
        assert value(text, "Environment") == ['"XDG_CACHE_HOME=/a\\x0ab"']

    def test_it_has_the_keys_and_files_of_this_shell(self) -> None:
        variables = {"MONARCH_CONFIG_DIR": '/my keys/50%"', "XDG_CACHE_HOME": "", "PATH": "/bin", "SECRET": "x"}
        assert value(service.unit_text(["/python"], variables, Path("/a b/50%")), "Environment") == [
            '"MONARCH_CONFIG_DIR=/my keys/50%%\\""'
        ]
        assert value(service.unit_text(["/python"], {}, Path("/a b/50%")), "WorkingDirectory") == ["/a b/50%%"]

    def test_it_comes_back_after_a_crash_for_ever(self) -> None:
        text = service.unit_text(["/python"], {}, None)
        assert value(text, "Restart") == ["on-failure"]
        assert 1 <= int(value(text, "RestartSec")[0]) <= 30
        assert value(text, "StartLimitIntervalSec") == ["0"]
        assert value(text, "StandardOutput") == ["journal"]

    @pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
    @pytest.mark.parametrize("folder", ["plain", "50% of $HOME;"])
    def test_systemd_has_nothing_against_it(self, tmp_path: Path, folder: str) -> None:
        python = tmp_path / folder / "python"
        python.parent.mkdir()
        python.symlink_to(sys.executable)
        unit = tmp_path / "monarch-worker.service"
        unit.write_text(service.unit_text([str(python), *ODD], {"XDG_CACHE_HOME": 'a "b"'}, python.parent))
        runtime = tmp_path / "run"
        runtime.mkdir(mode=0o700)
        done = subprocess.run(
            ["systemd-analyze", "--user", "verify", str(unit)],
            env={**os.environ, "XDG_RUNTIME_DIR": str(runtime)},
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert (done.returncode, done.stderr) == (0, "")


class TestInstalling:
    def install(self, *argv: str) -> int:
        return cli.main(["worker", "--runtime=reference", "--install-service", *argv])

    def test_it_is_shown_asked_about_and_written(
        self, systemd: Path, answers: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        answers += ["y"]
        assert self.install("--listen=127.0.0.2") == 0
        out = capsys.readouterr().out
        assert out.index(systemd.read_text()) < out.index("Write it? [y/N]")
        assert "systemctl --user daemon-reload" in out
        assert "loginctl enable-linger" in out
        assert words(systemd.read_text())[2:] == ["worker", "--port=7690", "--runtime=reference", "--listen=127.0.0.2"]

    @pytest.mark.parametrize("answer", ["", "n", "nyes"])
    def test_without_a_yes_nothing_is_written(self, systemd: Path, answers: list[str], answer: str) -> None:
        answers += [answer]
        assert self.install() == 1
        assert not systemd.exists()

    def test_a_script_has_to_say_yes(
        self, systemd: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
        assert self.install() == 1
        assert f"Give --yes to write {systemd}" in capsys.readouterr().err
        assert not systemd.exists()
        assert self.install("--yes") == 0
        assert systemd.exists()

    def test_another_unit_under_this_name_is_not_replaced_without_asking(
        self, systemd: Path, answers: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        systemd.parent.mkdir(parents=True)
        systemd.write_text("mine")
        answers += ["y", "n"]
        assert self.install() == 1
        assert "Replace the other one that is there?" in capsys.readouterr().out
        assert systemd.read_text() == "mine"
        assert self.install() == 0
        assert "ExecStart" in systemd.read_text()
        answers.clear()
        assert self.install() == 0  # the same: nothing to ask

    def test_where_there_is_no_systemd_it_says_what_to_run_instead(
        self, systemd: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(service, "_BOOTED", systemd / "no")
        assert self.install("--yes", "--name=spark 2") == 1
        assert capsys.readouterr().err.endswith("worker --port=7690 --runtime=reference '--name=spark 2'\n")
        assert not systemd.exists()

    def test_a_service_needs_a_port_that_stays(self, systemd: Path) -> None:
        assert self.install("--yes", "--port=0") == 2

    def test_a_python_that_systemd_would_not_start_is_named(
        self, systemd: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "executable", '/opt/"my"/python')
        with pytest.raises(CommandError, match="Move that Python"):
            service.install(parse("--yes"), None)
        assert not systemd.exists()
