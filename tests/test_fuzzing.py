"""A driver that means harm breaks nothing: the short form of benchmarks/fuzz.py, and that it would notice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from monarch_split.benchmarks import audited, fuzz
from monarch_split.benchmarks.fuzz import Attack, Findings, attack_codec, watched_worker
from monarch_split.benchmarks.hostile import Damage
from monarch_split.demo.reference import ReferenceDiT
from monarch_split.distributed import codec, files
from monarch_split.distributed.recipe import Recipe

ROOT = Path(__file__).parent.parent


def test_frames_of_all_kinds_are_refused_or_understood(recipe: Recipe) -> None:
    findings = Findings()
    attack_codec(Damage(1, recipe), 12_000, findings)
    assert findings.problems == []
    assert findings.refused > 1000
    assert findings.taken > 1000


def test_a_worker_lives_on_and_touches_nothing_but_its_cache(
    recipe: Recipe, model: ReferenceDiT, tmp_path: Path
) -> None:
    findings = Findings()
    with watched_worker(tmp_path, findings) as worker:
        Attack(Damage(2, recipe), worker, recipe, model, findings).run(1500, 4)
    assert findings.problems == []
    assert findings.right_forwards >= 2
    assert findings.sessions >= 5


@pytest.mark.parametrize(
    ("module", "name", "broken"),
    [
        (codec, "_index", lambda value, below: value),
        (codec, "_check_spec", lambda item: codec.TensorSpec(codec.DTYPES[item[0]], tuple(item[1]), item[2], item[3])),
        (files, "_is_inside", lambda name: name.index("t")),
    ],
    ids=["numbers", "tensors", "names"],
)
def test_a_check_that_is_missing_is_a_finding(
    module: Any, name: str, broken: Callable[..., Any], recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, broken)
    codec._read_repeated_header.cache_clear()
    findings = Findings()
    try:
        attack_codec(Damage(3, recipe), 12_000, findings)
    finally:
        codec._read_repeated_header.cache_clear()
    assert findings.problems


def test_a_file_that_is_touched_elsewhere_is_a_finding(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    (outside / "secret").touch()
    (inside / "link").symlink_to(outside / "secret")
    script = inside / "script.py"
    script.write_text(
        "import os, pathlib, subprocess, sys\n"
        "here = pathlib.Path(sys.argv[0]).parent\n"
        "(here / 'fine').write_text('')\n"
        "os.rename(here / 'fine', here / 'good')\n"
        "for act in (lambda: (here / 'link').read_text(), lambda: os.rename(here / 'good', here / '../outside/new'),\n"
        "            lambda: os.mkdir(here / '../outside/folder'), lambda: subprocess.run(['true'])):\n"
        "    act()\n"
    )
    log = tmp_path / "log"
    folders = os.pathsep.join([str(inside), sys.prefix, sys.base_prefix, "/dev"])
    subprocess.run([sys.executable, audited.__file__, str(log), folders, str(script)], check=True, timeout=30)
    assert [json.loads(line)[0] for line in log.read_text().splitlines()] == [
        *("open", "os.rename", "os.mkdir", "subprocess.Popen")
    ]


def test_the_long_run_found_nothing() -> None:
    record = json.loads((ROOT / "benchmarks" / "results" / "fuzz.json").read_text())
    assert record["findings"] == 0
    assert record["frames"] >= 1_000_000
    assert record["worker"]["right_forwards"] >= record["worker"]["sessions"] // fuzz._CHECK_EVERY
