"""The systemd unit in a systemd of the test's own: it starts, comes back after a crash, logs, and goes."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_split.cli.environment import PACK
from monarch_split.cli.service import NAME
from monarch_split.demo.reference import ReferenceDiT
from monarch_split.distributed.recipe import Recipe
from monarch_split.tests.driving import SAME, equal_shares, forget, render
from monarch_split.tests.network_proxy import port_with_a_neighbour
from monarch_split.tests.worker_process import until

pytestmark = pytest.mark.timeout(120)

# Nothing of the machine's own systemd is seen or changed: /run and processes are this namespace's own.
_START = """
set -e
mount -t tmpfs tmpfs /run
mkdir -p /run/systemd/system /run/systemd/journal /run/user/own
chmod 700 /run/user/own
export XDG_RUNTIME_DIR=/run/user/own
unset DBUS_SESSION_BUS_ADDRESS
set +e
/lib/systemd/systemd-journald 2>/dev/null &
/lib/systemd/systemd --user --log-target=null --unit=basic.target 2>/dev/null &
"""
_READY = "sleep 0.1; test -S /run/systemd/journal/stdout && systemctl --user is-system-running"
_END = "--- that was it:"


class Systemd:
    """A systemd for one user, and a journal, in namespaces of their own."""

    def __init__(self, configuration: Path) -> None:
        env = {**os.environ, "XDG_CONFIG_HOME": str(configuration), "HOME": str(configuration)}
        namespaces = ["--map-root-user", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc"]
        self._shell = subprocess.Popen(
            ["unshare", *namespaces, "sh"],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, command: str) -> tuple[int, str]:
        """(exit code, what it printed)"""
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        try:
            print(f"{command}\necho; echo {shlex.quote(_END)} $?", file=self._shell.stdin, flush=True)
        except BrokenPipeError:
            return 1, self._shell.stdout.read()
        lines: list[str] = []
        for line in self._shell.stdout:
            if line.startswith(_END):
                return int(line.removeprefix(_END)), "".join(lines[:-1])
            lines.append(line)
        return 1, "".join(lines)

    def done(self, command: str) -> str:
        code, printed = self.run(command)
        assert code == 0, printed
        return printed

    def shows(self, what: str) -> str:
        return self.done(f"systemctl --user show -p {what} --value {NAME}").strip()

    def journal(self) -> str:
        return self.done(f"journalctl --no-pager -o cat -t {NAME}")

    def close(self) -> None:
        # Which takes its control groups with it.
        self.run("systemctl --user exit; sleep 0.5")
        # The first process of the namespace: all others end with it.
        self._shell.kill()
        self._shell.communicate(timeout=20)


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Systemd]:
    """Skipped where there can be none: no systemd here, no namespaces, no control groups."""
    if not Path("/lib/systemd/systemd-journald").exists() or shutil.which("unshare") is None:
        pytest.skip("there is no systemd or no unshare here")
    made = Systemd(tmp_path / "config")
    try:
        started, problem = made.run(_START + "true")
        for _ in range(50):
            ready, problem = made.run(_READY)
            if started == 0 and ready == 0:
                break
        else:
            pytest.skip(f"systemd cannot run in a namespace here: {problem.strip()}")
        yield made
    finally:
        made.close()


def test_the_unit_starts_comes_back_after_a_crash_and_can_be_removed(
    systemd: Systemd, recipe: Recipe, model: ReferenceDiT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget(monkeypatch)
    equal_shares(monkeypatch)
    port = port_with_a_neighbour()

    def serves() -> bool:
        worst, report = render([f"127.0.0.1:{port}"], recipe, model)
        assert worst <= SAME
        return report.forwards_split >= 2

    pack = tmp_path / "pack"
    leave_out = shutil.ignore_patterns(".*", "__pycache__", "benchmarks", "example_workflows")
    shutil.copytree(PACK, pack, ignore=leave_out)
    arguments = ["worker", "--runtime=reference", f"--port={port}", f"--cache={tmp_path / 'cache'}", "--name=w"]
    install = [sys.executable, os.fspath(pack), *arguments, "--install-service", "--yes"]
    printed = systemd.done(shlex.join(install))
    unit = tmp_path / "config" / "systemd" / "user" / f"{NAME}.service"
    assert unit.exists()
    # The test does not wait the seconds that a service waits.
    systemd.done(f"mkdir {unit}.d && printf '[Service]\\nRestartSec=100ms\\n' > {unit}.d/soon.conf")
    # The commands that were printed.
    for command in [line.strip() for line in printed.splitlines() if line.startswith("  systemctl")]:
        systemd.done(command)
    until(serves, "the service to serve")
    assert systemd.shows("ActiveState") == "active"

    crashed = systemd.shows("MainPID")
    systemd.done(f"kill -KILL {crashed}")
    until(lambda: systemd.shows("NRestarts") == "1", "systemd to start it again")
    until(serves, "the service to serve again")
    assert systemd.shows("MainPID") not in ("0", crashed)
    assert systemd.journal().count(f"Listening on 127.0.0.1:{port}\n") == 2

    systemd.done(f"systemctl --user stop {NAME}")
    assert (systemd.shows("ActiveState"), systemd.shows("Result")) == ("inactive", "success")

    shutil.rmtree(pack)
    systemd.done(f"systemctl --user start {NAME}")
    assert (systemd.shows("ActiveState"), systemd.shows("ConditionResult")) == ("inactive", "no")
    assert systemd.journal().count("Listening on") == 2, "what is uninstalled was started"
    systemd.done(f"systemctl --user disable {NAME} && rm -r {unit} {unit}.d && systemctl --user daemon-reload")
    assert "could not be found" in systemd.run(f"systemctl --user status {NAME}")[1]
