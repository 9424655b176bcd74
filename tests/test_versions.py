"""Different code on the two sides is refused with both versions named; other packages only warn."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

from monarch_split import __version__
from monarch_split.distributed.versions import Versions, _code_digest, mismatch, own_versions

SAME = Versions("0.1.0", "0.8.0", "abc", "2.9.0", "0.2", kitchen_backends="cuda, eager")


def other(**changes: str) -> Versions:
    return dataclasses.replace(SAME, **changes)


def test_the_same_versions_are_fine() -> None:
    assert mismatch(SAME, SAME, "w") == (None, [])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"pack": "0.2.0"}, ["w", "0.2.0", "0.1.0"]),
        ({"pack": ""}, ["unknown", "0.1.0"]),
        ({"comfyui": "0.9.0", "comfyui_code": "def"}, ["w", "0.9.0", "0.8.0"]),
        ({"comfyui_code": ""}, ["w", "0.8.0"]),
    ],
)
def test_other_code_is_refused_with_both_versions(changes: dict[str, str], named: list[str]) -> None:
    refusal, _ = mismatch(SAME, other(**changes), "w")
    assert refusal is not None
    assert all(word in refusal for word in named)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"torch": "2.8.0"}, "torch 2.8.0"),
        ({"kitchen": ""}, "missing"),
        ({"kitchen_backends": "eager"}, "comfy-kitchen's backends eager, this machine cuda, eager"),
    ],
)
def test_other_packages_only_warn(changes: dict[str, str], word: str) -> None:
    refusal, warnings = mismatch(SAME, other(**changes), "w")
    assert refusal is None
    assert len(warnings) == 1
    assert word in warnings[0]


def test_versions_survive_a_message() -> None:
    assert Versions.from_message(SAME.as_dict()) == SAME


@pytest.mark.parametrize("said", [None, 3, [], {"versions": None}, {"versions": {"pack": ["x"] * 1000, "else": 1}}])
def test_any_message_gives_versions(said: Any) -> None:
    versions = Versions.from_message(said if isinstance(said, dict) else {"versions": said})
    assert all(isinstance(value, str) and len(value) <= 200 for value in dataclasses.asdict(versions).values())
    assert mismatch(SAME, versions, "w")[0]


def test_own_versions_name_pack_and_torch() -> None:
    versions = own_versions(None)
    assert versions.pack == __version__
    assert versions.torch
    assert versions.comfyui_code == ""


def test_the_code_digest_follows_code_and_nothing_else(tmp_path: Path) -> None:
    one = tmp_path / "one" / "comfy"
    (one / "ldm").mkdir(parents=True)
    (one / "B.py").write_bytes(b"x = 1\n")
    (one / "a.py").write_bytes(b"y = 2\n")
    (one / "ldm" / "c.py").write_bytes(b"")

    def copy(name: str) -> Path:
        return Path(shutil.copytree(one, tmp_path / name / "comfy"))

    windows, cached, changed, renamed = (copy(name) for name in ("windows", "cached", "changed", "renamed"))
    (windows / "B.py").write_bytes(b"x = 1\r\n")
    (cached / "B.cpython-311.pyc").write_bytes(b"junk")
    (changed / "B.py").write_bytes(b"x = 2\n")
    (renamed / "ldm" / "c.py").rename(renamed / "ldm" / "d.py")
    assert _code_digest(one) == _code_digest(windows) == _code_digest(cached)
    assert len({_code_digest(folder) for folder in (one, changed, renamed)}) == 3


def test_other_code_of_the_same_version_is_refused() -> None:
    ours = own_versions(None)
    theirs = dataclasses.replace(ours, pack_code="other")
    refusal, warnings = mismatch(ours, theirs, "second")
    assert refusal is not None
    assert f"other code of Monarch {ours.pack}" in refusal
    assert not warnings
