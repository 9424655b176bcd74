"""What installing, updating and removing the pack's folder does to the rest: nothing that is not asked for.

ComfyUI-Manager clones it, installs requirements.txt with pip, pulls, and deletes it; no code of ours runs."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from monarch_split.demo.worker_process import WorkerProcess

PACK = Path(__file__).parent.parent


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A copy of the pack, as in custom_nodes."""
    return install(tmp_path / "custom_nodes" / "monarch-split")


def install(folder: Path) -> Path:
    leave_out = shutil.ignore_patterns(".*", "__pycache__", "tests", "benchmarks", "example_workflows")
    shutil.copytree(PACK, folder, ignore=leave_out)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def keys_and_settings(configuration: Path) -> dict[str, bytes]:
    """All that is in this folder; but pairing codes are new with each start, as long as nobody has used one."""
    return {name: text for name, text in contents(configuration).items() if name != "pairing-code.json"}


def run_worker(pack: Path, configuration: Path, cache: Path) -> int:
    """Start a worker of this copy and end it again; its process id."""
    with WorkerProcess(pack=pack, cache=cache, environment={"MONARCH_CONFIG_DIR": str(configuration)}) as worker:
        return worker.pid


def test_requirements_are_pyzmq_alone_in_both_places_that_installers_read() -> None:
    lines = (PACK / "requirements.txt").read_text(encoding="utf-8").split()
    project = (PACK / "pyproject.toml").read_text(encoding="utf-8")
    (dependencies,) = re.findall(r"^dependencies = \[(.*)\]$", project, re.MULTILINE)
    assert [line.strip('" ') for line in dependencies.split(",")] == lines
    assert [re.split(r"[<>=~!]", line)[0] for line in lines] == ["pyzmq"]
    assert not (PACK / "install.py").exists(), "installers run it"


def test_an_update_keeps_keys_and_settings(installed: Path, tmp_path: Path) -> None:
    configuration = tmp_path / "configuration"
    configuration.mkdir()
    (configuration / "monarch.toml").write_text('[clusters.default]\nworkers = ["192.0.2.7:7690"]\n', encoding="utf-8")
    before = contents(installed)
    run_worker(installed, configuration, tmp_path / "cache")
    assert contents(installed) == before, "something is kept in the folder that an update replaces"
    kept = keys_and_settings(configuration)
    assert len(kept) > 1, "the worker made no key"
    shutil.rmtree(installed)
    install(installed)
    run_worker(installed, configuration, tmp_path / "cache")
    assert keys_and_settings(configuration) == kept


def test_a_deleted_folder_leaves_no_process(installed: Path, tmp_path: Path) -> None:
    """The folder goes while a worker runs that was started from it: it serves, ends when told to, and nothing stays."""
    if shutil.which("ps") is None:
        pytest.skip("there is no ps here, which tells what still runs")
    (tmp_path / "configuration").mkdir()
    environment = {"MONARCH_CONFIG_DIR": str(tmp_path / "configuration")}
    with WorkerProcess(pack=installed, cache=tmp_path / "cache", environment=environment) as worker:
        shutil.rmtree(installed)
        assert str(installed) in processes(), "this cannot see the worker"
        host, _, port = worker.address.rpartition(":")
        socket.create_connection((host, int(port)), timeout=10).close()
        os.kill(worker.pid, signal.SIGTERM)
        deadline = time.monotonic() + 20
        while worker.running and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not worker.running, "it does not end when told to"
        assert worker.exit_code == 0, worker.output
    assert "Traceback" not in worker.output
    assert str(installed) not in processes()


def processes() -> str:
    """Command lines of all processes, whole."""
    return subprocess.run(["ps", "-ewwo", "args="], capture_output=True, text=True, timeout=10, check=True).stdout


def test_the_entry_imports_nothing_of_the_engine(installed: Path) -> None:
    """ComfyUI imports it at every start."""
    script = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('pack', {str(installed / '__init__.py')!r}, "
        f"submodule_search_locations=[{str(installed)!r}])\n"
        "sys.modules['pack'] = module = importlib.util.module_from_spec(spec)\n"
        "before = set(sys.modules)\n"
        "spec.loader.exec_module(module)\n"
        "print(*(set(sys.modules) - before), sep='\\n')\n"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True
    ).stdout
    assert not [name for name in loaded.split() if name.partition(".")[0] not in sys.stdlib_module_names]
