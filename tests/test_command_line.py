"""The command line's bootstrap: finding ComfyUI, choosing a Python, usage, and what loading the pack leaves alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from monarch_split import __version__, cli
from monarch_split.cli import environment, test, worker
from monarch_split.cli.environment import CommandError, find_comfyui
from monarch_split.distributed.addresses import local_addresses

PACK = Path(__file__).parent.parent


def make_comfyui(path: Path, version: str = "0.33.0") -> Path:
    (path / "comfy").mkdir(parents=True)
    (path / "main.py").touch()
    (path / "comfyui_version.py").write_text(f'# generated\n__version__ = "{version}"\n')
    return path


def make_python(path: Path, *, prints: str = "") -> Path:
    """A stand-in for an interpreter, which claims to lack the modules in `prints`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\nprintf '%s' '{prints}'\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder without ComfyUI, and a pack that lies in no custom_nodes."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("COMFYUI_PATH", raising=False)
    monkeypatch.delenv("MONARCH_PYTHON", raising=False)
    monkeypatch.setattr(environment, "PACK", tmp_path / "elsewhere" / "monarch")
    return home


def start(*arguments: str, cwd: Path = PACK, **variables: str) -> subprocess.CompletedProcess[str]:
    """`python <pack> …` in a process of its own."""
    command = [sys.executable, str(PACK), *arguments]
    return subprocess.run(command, cwd=cwd, env={**os.environ, **variables}, capture_output=True, text=True, timeout=60)


class TestFindingComfyUI:
    def test_the_order_is_explicit_then_variable_then_custom_nodes_then_home(
        self, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert find_comfyui() is None

        places = [home / "comfy" / "ComfyUI", home / "ComfyUI", tmp_path / "above"]
        for version, place in enumerate(places):
            make_comfyui(place, f"0.{version}.0")
            if place.name == "above":
                monkeypatch.setattr(environment, "PACK", place / "custom_nodes" / "any name")
            found = find_comfyui()
            assert found is not None
            assert (found.path, found.version) == (place, f"0.{version}.0")

        by_variable = make_comfyui(tmp_path / "variable")
        monkeypatch.setenv("COMFYUI_PATH", str(by_variable))
        found = find_comfyui()
        assert found is not None
        assert found.path == by_variable

        explicit = make_comfyui(tmp_path / "explicit")
        found = find_comfyui(explicit)
        assert found is not None
        assert found.path == explicit

    def test_a_pack_linked_into_custom_nodes_finds_the_comfyui_above_the_link(
        self, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        comfyui = make_comfyui(tmp_path / "ComfyUI")
        (comfyui / "custom_nodes").mkdir()
        (tmp_path / "checkout").mkdir()
        link = comfyui / "custom_nodes" / "monarch"
        link.symlink_to(tmp_path / "checkout")
        monkeypatch.setattr(environment, "PACK", link)
        found = find_comfyui()
        assert found is not None
        assert found.path == comfyui

    @pytest.mark.parametrize("by_variable", [False, True])
    def test_a_named_folder_that_is_no_comfyui_is_an_error_and_not_another_comfyui(
        self, home: Path, monkeypatch: pytest.MonkeyPatch, by_variable: bool
    ) -> None:
        make_comfyui(home / "ComfyUI")
        if by_variable:
            monkeypatch.setenv("COMFYUI_PATH", str(home))
        with pytest.raises(CommandError, match="COMFYUI_PATH" if by_variable else "--comfyui") as error:
            find_comfyui(None if by_variable else home)
        assert error.value.code == 2

    @pytest.mark.parametrize("missing", ["main.py", "comfyui_version.py"])
    def test_a_folder_that_only_resembles_comfyui_does_not_count(self, home: Path, missing: str) -> None:
        (make_comfyui(home / "ComfyUI") / missing).unlink()
        assert find_comfyui() is None

    def test_the_version_is_read_from_the_text_and_else_from_pyproject(self, home: Path) -> None:
        comfyui = make_comfyui(home / "ComfyUI")
        (comfyui / "comfyui_version.py").write_text("raise SystemExit('executed')\n__version__ = '0.8.1'\n")
        found = find_comfyui()
        assert found is not None
        assert found.version == "0.8.1"

        (comfyui / "comfyui_version.py").unlink()
        (comfyui / "pyproject.toml").write_text('[project]\nname = "ComfyUI"\nversion = "0.9.2"\n')
        found = find_comfyui()
        assert found is not None
        assert found.version == "0.9.2"

    def test_its_python_is_the_nearest_venv_that_has_torch(self, home: Path) -> None:
        comfyui = make_comfyui(home / "comfy" / "ComfyUI")
        make_python(comfyui / ".venv" / "bin" / "python", prints="torch")
        beside = make_python(comfyui.parent / "venv" / "bin" / "python")
        found = find_comfyui()
        assert found is not None
        assert found.python == beside

        inside = make_python(comfyui / "venv" / "bin" / "python")
        found = find_comfyui()
        assert found is not None
        assert found.python == inside

    def test_an_environment_with_torch_alone_is_not_taken_for_comfyuis(
        self, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        make_comfyui(home / "ComfyUI")
        monkeypatch.delenv("MONARCH_STARTED_FROM", raising=False)
        monkeypatch.setattr(sys, "executable", str(make_python(home / "bin" / "python")))
        monkeypatch.setattr(environment, "missing_imports", lambda python, names: [n for n in names if n != "torch"])
        found = find_comfyui()
        assert found is not None
        assert found.python is None


class TestUsage:
    @pytest.mark.parametrize(
        "arguments",
        [
            [],
            ["unknown"],
            ["pair"],
            ["worker", "--unknown"],
            ["worker", "--port", "70000"],
            ["worker", "--port", "-1"],
            ["worker", "--runtime", "other"],
            ["worker", "stray"],
        ],
    )
    def test_wrong_arguments_exit_with_2_and_say_why_on_stderr(
        self, arguments: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(arguments) == 2
        output = capsys.readouterr()
        assert output.out == ""
        assert "usage: monarch" in output.err

    def test_help_names_exactly_what_there_is(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["--help"]) == 0
        text = capsys.readouterr().out
        assert all(name in text for name in cli.SUBCOMMANDS)
        assert set(cli.SUBCOMMANDS) == {"bench", "convert", "demo", "doctor", "inspect", "pair", "test", "worker"}

    def test_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["--version"]) == 0
        assert capsys.readouterr().out == f"monarch {__version__}\n"

    @pytest.mark.parametrize("address", ["*", "0.0.0.0", "::", "192.0.2.5", "2001:db8::1", "spark-2.local", ""])
    @pytest.mark.parametrize("own_environment", [False, True])
    def test_a_worker_refuses_to_listen_on_what_is_none_of_this_machine_s_addresses(
        self, address: str, own_environment: bool, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(["worker", f"--listen={address}"], own_environment=own_environment) == 2
        output = capsys.readouterr()
        assert output.out == ""
        assert output.err.count("\n") == 1
        assert "address" in output.err

    def hosts(self, *argv: str) -> list[str]:
        return worker._hosts(cli._parse(["worker", *argv])[1])

    def test_a_worker_listens_on_loopback_unless_it_is_told_otherwise(self) -> None:
        assert self.hosts() == ["127.0.0.1"]
        assert self.hosts("--listen", "localhost", "--listen", "127.0.0.2") == ["127.0.0.1", "127.0.0.2"]
        assert self.hosts("--listen", "::1") == ["::1"]
        assert self.hosts("--facing", "127.0.0.9") == ["127.0.0.1"]

    def test_all_interfaces_are_only_meant_by_name(self) -> None:
        every = [address for _, address in local_addresses()]
        if every:
            assert self.hosts("--listen", "all") == [*every, "127.0.0.1"]
        else:
            with pytest.raises(CommandError, match="not known"):
                self.hosts("--listen", "all")

    def test_arguments_after_two_dashes_are_comfyuis(self) -> None:
        _, args = cli._parse(["worker", "--port", "0", "--", "--lowvram", "--port", "8188"])
        assert args.port == 0
        assert args.passed_on == ["--lowvram", "--port", "8188"]

    def test_unknown_arguments_of_test_are_pytests(self) -> None:
        _, args = cli._parse(["test", "-k", "codec", "--without-comfyui", "-x", "tests/test_command_line.py"])
        assert args.without_comfyui
        assert args.passed_on == ["-k", "codec", "-x", "tests/test_command_line.py"]


class TestJson:
    def test_a_result_is_one_object_on_stdout_and_nothing_else(self) -> None:
        done = start("test", "--prepare-only", "--json")
        assert done.returncode == 0
        assert json.loads(done.stdout) == {"ok": True, "python": sys.executable}

    def test_an_error_is_one_object_on_stdout_and_a_sentence_on_stderr(self, tmp_path: Path) -> None:
        done = start("test", "--json", "--comfyui", str(tmp_path))
        assert done.returncode == 2
        assert json.loads(done.stdout)["ok"] is False
        assert "not a ComfyUI folder" in done.stderr


class TestChoosingTests:
    def test_paths_go_to_the_part_they_belong_to(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(PACK)
        here = "tests/test_command_line.py"
        engine, comfyui, options = test._sort([f"{here}::TestJson", "-k", "worker", "tests", "no/such/file.py"])
        assert engine == [f"{PACK / here}::TestJson"]
        assert comfyui == []
        assert options == ["-k", "worker", "no/such/file.py"]

    @pytest.mark.parametrize(
        ("codes", "selected", "expected"),
        [
            ([0, 0], False, 0),
            ([0, 1], False, 1),
            ([0, 5], False, 1),
            ([0, 5], True, 0),
            ([5, 5], True, 1),
            ([0, 3], True, 1),
            ([], True, 1),
        ],
    )
    def test_any_failure_and_any_part_without_tests_fails_the_whole(
        self, codes: list[int], selected: bool, expected: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        outcomes = [test._outcome(code, tmp_path / "never written") for code in codes]
        assert test._summary(outcomes, None, selected=selected, as_json=False) == expected
        assert capsys.readouterr().out.splitlines()[-1].startswith("monarch: 0 passed, ")


class TestLoadingThePack:
    def run(self, code: str, cwd: Path, **variables: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=cwd,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def test_it_imports_neither_torch_nor_its_own_engine(self, tmp_path: Path) -> None:
        code = (
            "import runpy, sys\n"
            f"pack = runpy.run_path({str(PACK / '__main__.py')!r})['load_pack']()\n"
            "heavy = {'torch', 'numpy', 'zmq', 'comfy', 'comfy_api', 'safetensors'} & set(sys.modules)\n"
            "own = [name for name in sys.modules if name.startswith('monarch_split.')]\n"
            "print(sorted(heavy), own, pack.WEB_DIRECTORY, hasattr(pack, 'NODE_CLASS_MAPPINGS'))"
        )
        assert self.run(code, tmp_path) == "[] [] ./web False\n"

    @pytest.mark.parametrize("first_entry", ["", str(PACK), f"{PACK}/tests/.."])
    def test_its_folders_do_not_hide_modules_of_the_same_name(self, tmp_path: Path, first_entry: str) -> None:
        for name in ("nodes", "distributed"):
            (tmp_path / f"{name}.py").write_text("from_comfyui = True")
        code = (
            "import runpy, sys\n"
            f"sys.path.insert(0, {first_entry!r})\n"
            f"runpy.run_path({str(PACK / '__main__.py')!r})['load_pack']()\n"
            "import nodes, distributed, monarch_split.cli.environment\n"
            "print(nodes.from_comfyui, distributed.from_comfyui)"
        )
        assert self.run(code, PACK, PYTHONPATH=str(tmp_path)) == "True True\n"

    def test_a_link_of_any_name_works_from_any_folder(self, tmp_path: Path) -> None:
        link = tmp_path / "a pack-name.with odd characters"
        link.symlink_to(PACK)
        done = subprocess.run(
            [sys.executable, link.name, "--version"], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert done.stdout == f"monarch {__version__}\n"

    def test_the_versions_of_the_pack_and_of_the_distribution_agree(self) -> None:
        assert f'version = "{__version__}"' in (PACK / "pyproject.toml").read_text(encoding="utf-8")

    def test_the_pack_asks_pip_for_pyzmq_alone(self) -> None:
        assert (PACK / "requirements.txt").read_text(encoding="utf-8").split() == ["pyzmq>=25"]


class TestEnvironment:
    def test_what_is_installed_once_is_not_installed_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log = tmp_path / "calls"
        pip = tmp_path / "pip"
        pip.write_text(f'#!/bin/sh\necho "$@" >> {log}\n')
        pip.chmod(0o755)
        stamp = tmp_path / "stamp"
        for wanted in (["one"], ["one"], ["one", "two"]):
            environment.install_once(wanted, stamp=stamp, arguments=[str(pip), "install"], why="to test")
        calls = log.read_text().splitlines()
        assert [call.split()[-1] for call in calls] == ["one", "two"]

    def test_a_failed_installation_is_tried_again(self, tmp_path: Path) -> None:
        stamp = tmp_path / "stamp"
        for _ in range(2):
            with pytest.raises(CommandError, match="pip could not"):
                environment.install_once(["one"], stamp=stamp, arguments=["false"], why="to test")
        assert not stamp.exists()

    def test_a_chosen_python_that_lacks_something_is_told_what_to_install(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        python = make_python(tmp_path / "python", prints="numpy")
        monkeypatch.setenv("MONARCH_PYTHON", str(python))
        with pytest.raises(CommandError, match=r"-m pip install 'numpy'$"):
            environment.make_environment("demo")
        make_python(python)
        assert environment.make_environment("demo") == python

    def test_a_command_in_a_python_without_its_modules_names_them(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setitem(environment.REQUIREMENTS, "worker", {"no-such-package": "no_such_module"})
        assert cli.main(["worker"]) == 1
        assert "no_such_module" in capsys.readouterr().err
