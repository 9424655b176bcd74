"""A file whose transfer breaks off is not sent twice: what arrived is checked and continued, or thrown away."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from monarch_split.demo.reference import TINY, ReferenceDiT
from monarch_split.demo.reference_runtime import write_reference_model
from monarch_split.distributed import limits
from monarch_split.distributed.files import FileRef
from monarch_split.distributed.recipe import Recipe
from monarch_split.tests.driving import SAME, Stopped, equal_shares, forget, render
from monarch_split.tests.worker_process import Forge, Worker, ended

pytestmark = pytest.mark.timeout(120)

LARGE = replace(TINY, width=768, heads=8)


@pytest.fixture(autouse=True)
def nothing_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch)
    equal_shares(monkeypatch)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, ReferenceDiT]:
    """A model of several times what a worker records at once, and its recipe."""
    recipe = write_reference_model(LARGE, tmp_path_factory.mktemp("large") / "large.safetensors")
    assert recipe.file.bytes > 2.5 * limits.FILE_RECORD_BYTES
    return recipe, ReferenceDiT(LARGE)


def kill_at(worker: Worker, fraction: float) -> Callable[[int, int], None]:
    def progress(done: int, total: int) -> None:
        if done > fraction * total:
            worker.kill()

    return progress


def broken_off(forge: Forge, large: tuple[Recipe, ReferenceDiT], cache: Path) -> int:
    """Have a transfer end in the middle, by a kill; how much of the file is on record then."""
    recipe, model = large
    worker = forge.worker(cache=cache)
    worst, report = render([worker.address], recipe, model, steps=1, progress=kill_at(worker, 0.6), config=LARGE)
    assert worst <= SAME
    assert report.forwards_split == 0
    recorded = json.loads((cache / f"{recipe.file.digest}.part.json").read_text())["bytes"]
    assert limits.FILE_RECORD_BYTES <= recorded < recipe.file.bytes
    return recorded


def again(forge: Forge, large: tuple[Recipe, ReferenceDiT], cache: Path) -> Any:
    """Report of a run with a new worker over the same cache."""
    recipe, model = large
    worker = forge.worker(cache=cache)
    try:
        worst, report = render([worker.address], recipe, model, steps=2, config=LARGE)
    finally:
        worker.end()
    assert worst <= SAME
    assert report.forwards_split == 1, report.line()
    stored = sorted(path.name for path in cache.iterdir() if recipe.file.digest in path.name)
    assert stored == [f"{recipe.file.digest}.safetensors"]
    assert (cache / stored[0]).read_bytes() == recipe.path.read_bytes()
    return report


def test_a_new_worker_process_is_sent_only_the_rest(
    forge: Forge, large: tuple[Recipe, ReferenceDiT], tmp_path: Path
) -> None:
    recorded = broken_off(forge, large, tmp_path / "cache")
    total = large[0].file.bytes
    report = again(forge, large, tmp_path / "cache")
    assert total - recorded <= report.bytes_sent < total - recorded + 2 * limits.MIB


@pytest.mark.parametrize("damage", ["part", "record", "short", "nonsense"])
def test_a_part_that_was_tampered_with_is_sent_again(
    forge: Forge, large: tuple[Recipe, ReferenceDiT], tmp_path: Path, damage: str
) -> None:
    cache = tmp_path / "cache"
    broken_off(forge, large, cache)
    part, record = (cache / f"{large[0].file.digest}.{suffix}" for suffix in ("part", "part.json"))
    if damage == "part":
        content = bytearray(part.read_bytes())
        content[1000] ^= 1
        part.write_bytes(content)
    elif damage == "record":
        record.write_text(json.dumps({**json.loads(record.read_text()), "digest": "0" * 40}))
    elif damage == "short":
        part.write_bytes(part.read_bytes()[:1000])
    else:
        record.write_text('{"bytes": "all"')
    assert again(forge, large, cache).bytes_sent >= large[0].file.bytes


def test_a_whole_part_with_a_wrong_byte_behind_the_record_is_not_used(
    forge: Forge, large: tuple[Recipe, ReferenceDiT], tmp_path: Path
) -> None:
    import hashlib

    cache = tmp_path / "cache"
    cache.mkdir()
    content = bytearray(large[0].path.read_bytes())
    content[len(content) // 3] ^= 1
    (cache / f"{large[0].file.digest}.part").write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    record = {"bytes": len(content), "digest": digest}
    (cache / f"{large[0].file.digest}.part.json").write_text(json.dumps(record))
    worker = forge.worker(cache=cache)
    try:
        worst, report = render([worker.address], *large, steps=1, config=LARGE)
    finally:
        worker.end()
    assert worst <= SAME
    assert "arrived damaged" in report.line()
    assert not [path for path in cache.iterdir() if large[0].file.digest in path.name]
    assert again(forge, large, cache).bytes_sent >= large[0].file.bytes


def test_while_a_large_part_is_checked_others_are_answered_and_an_interrupt_ends_it(
    forge: Forge, recipe: Recipe, model: ReferenceDiT, tmp_path: Path
) -> None:
    # Zeros that the file system does not store. Hashing so many takes longer than this test may last.
    held = 128 * limits.GIB
    huge = replace(recipe, file=FileRef(None, "huge.safetensors", held + 8, "a" * 40))
    part, record = (tmp_path / f"{huge.file.digest}.{suffix}" for suffix in ("part", "part.json"))
    with part.open("wb") as file:
        file.truncate(held)
    record.write_text(json.dumps({"bytes": held, "digest": "0" * 64}))
    worker = forge.worker(cache=tmp_path)
    answers: list[tuple[str, float]] = []

    def check() -> None:
        if answers:
            raise Stopped
        if worker.reached("Checking what is here of huge.safetensors already."):
            began = time.monotonic()
            line = render([worker.address], recipe, model)[1].line()
            answers.append((line, time.monotonic() - began))

    with ended(worker):
        with pytest.raises(Stopped):
            render([worker.address], huge, model, check=check)
        began = time.monotonic()
        worst, report = render([worker.address], recipe, model)
        assert time.monotonic() - began < limits.HELLO_TIMEOUT
    assert worst <= SAME
    assert report.forwards_split == 2, report.line()
    [(line, seconds)] = answers
    assert "it is busy with a driver on this machine" in line
    assert seconds < limits.HELLO_TIMEOUT
    # It was not found wrong, so the next attempt may go on with it.
    assert part.stat().st_size == held
    assert json.loads(record.read_text())["bytes"] == held
