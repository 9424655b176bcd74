"""A network that loses one packet in a hundred, or takes half a second there and back, is used like any other."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from monarch_split.tests.driving import SAME
from monarch_split.tests.faults import POINTS

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def runs() -> dict[str, Any]:
    """What came of runs in a network namespace. Skipped, with a note in the summary, where there can be none."""
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("no network of its own to lose packets in: there is no unshare (util-linux)")
    separate = [unshare, "--map-root-user", "--net"]
    allowed = subprocess.run([*separate, "true"], capture_output=True, text=True, timeout=20, check=False)
    if allowed.returncode:
        pytest.skip(f"no network of its own to lose packets in: {allowed.stderr.strip()}")
    command = [*separate, sys.executable, str(Path(__file__).parent / "lossy_network.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=os.environ, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    if "not allowed" in found:
        pytest.skip(f"no network of its own to lose packets in: {found['not allowed']}")
    return found


@pytest.mark.parametrize("fault", ["1 % loss, rows", "1 % loss, tokens", "500 ms, rows"])
def test_a_bad_network_is_no_loss(runs: dict[str, Any], fault: str) -> None:
    run = runs[fault]
    assert run["worst"] <= SAME
    assert run["forwards_split"] >= run["forwards"] - 1, run["line"]
    assert not run["events"], run["line"]
    assert ("loss" in fault) == (run["lost"] > 0)


@pytest.mark.parametrize("at", [*POINTS, "between runs"])
def test_lost_packets_from_any_point_of_a_run_on_are_no_loss(runs: dict[str, Any], at: str) -> None:
    run = runs[at]
    assert run["worst"] <= SAME
    assert run["forwards_split"] >= run["forwards"] - 1, run["line"]
    assert not run["events"], run["line"]
    assert run["lost"] > 0
