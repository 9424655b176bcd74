"""Model files between machines: identity by content, a cache that stays in bounds, and nothing half-written left."""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import shutil
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from monarch_split.distributed import files, limits
from monarch_split.distributed.codec import ProtocolError
from monarch_split.distributed.file_cache import FileCache, IncomingFile
from monarch_split.distributed.file_content import ContentHash, read_chunks
from monarch_split.distributed.files import FileRef, file_digest


def write(path: Path, nbytes: int = 1000, seed: int = 0, metadata: str = "") -> Path:
    header = json.dumps({"__metadata__": {"x": metadata}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + random.Random(seed).randbytes(nbytes))
    return path


def ref_of(path: Path) -> FileRef:
    return FileRef("diffusion_models", path.name, path.stat().st_size, file_digest(path))


def transfer(cache: FileCache, path: Path, ref: FileRef | None = None) -> Path:
    incoming = begun(cache, ref or ref_of(path))
    for offset, chunk in read_chunks(path):
        incoming.write(offset, memoryview(chunk))
    return incoming.finish(content_digest(path))


def begun(cache: FileCache, ref: FileRef) -> IncomingFile:
    incoming = cache.receive(ref)
    assert incoming.ready(patience=10)
    return incoming


def content_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def cache(tmp_path: Path) -> FileCache:
    return FileCache(tmp_path / "cache")


def left_behind(cache: FileCache) -> list[str]:
    return sorted(path.name for path in cache.folder.iterdir()) if cache.folder.exists() else []


# --- identity ---------------------------------------------------------------------------------------------------------


def test_a_file_in_the_cache_is_read_once_and_remembered_once(
    cache: FileCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Path] = []
    stock = files.sampled_digest
    monkeypatch.setattr(files, "sampled_digest", lambda path, size: reads.append(path) or stock(path, size))
    path = write(tmp_path / "a.safetensors")
    ref = ref_of(path)
    held = transfer(cache, path)
    reads.clear()
    remembered = set()
    for _ in range(3):
        assert cache.find(ref) == held
        remembered.add(len(files._digests))
    assert reads == [held]
    assert len(remembered) == 1
    held.write_bytes(held.read_bytes()[:-1] + b"x")
    assert cache.find(ref) is None


def test_the_digest_is_of_the_content_and_not_of_the_name(tmp_path: Path) -> None:
    one, copy = write(tmp_path / "one"), write(tmp_path / "copy")
    others = [write(tmp_path / "a", seed=1), write(tmp_path / "b", 1001), write(tmp_path / "c", metadata="y")]
    assert file_digest(one) == file_digest(copy)
    assert len({file_digest(path) for path in (one, *others)}) == 4


def test_any_changed_byte_of_a_small_file_changes_the_digest(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", 60).read_bytes()
    digests = {file_digest(tmp_path / "whole")}
    for position in range(len(whole)):
        changed = tmp_path / f"{position}"
        changed.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        digests.add(file_digest(changed))
    assert len(digests) == len(whole) + 1


def test_large_files_are_sampled_and_every_part_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DIGEST_BLOCK_BYTES", 100)
    path = write(tmp_path / "large", 10_000)
    size = path.stat().st_size
    data_start = size - 10_000
    whole = path.read_bytes()
    digests = {file_digest(path)}
    middle_block = data_start + (10_000 - 100) * 7 // (limits.DIGEST_BLOCKS - 1)
    changes = [0, 9, data_start, middle_block + 50, size - 1]
    for number, position in enumerate(changes):
        changed = tmp_path / str(number)
        changed.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        digests.add(file_digest(changed))
    assert len(digests) == len(changes) + 1


@pytest.mark.parametrize(
    "content", [b"", b"1234", b"\xff" * 8, b"\xff" * 100, struct.pack("<Q", 50) + b"short"], ids=len
)
def test_files_that_are_no_models_have_a_digest_too(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "odd").write_bytes(content)
    assert len(file_digest(tmp_path / "odd")) == 40


def test_a_file_replaced_with_the_same_size_and_times_gets_another_digest(tmp_path: Path) -> None:
    path, new = write(tmp_path / "model", seed=1), write(tmp_path / "new", seed=2)
    before = file_digest(path)
    times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    os.utime(new, ns=times)
    os.replace(new, path)
    assert file_digest(path) != before
    rewritten = file_digest(path)
    time.sleep(0.02)
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.write(content[:-1] + b"!")
    os.utime(path, ns=times)
    assert file_digest(path) != rewritten


@pytest.mark.parametrize(
    "change",
    [
        {"digest": "../../etc/passwd"},
        {"digest": "A" * 40},
        {"digest": "a" * 40 + "\n"},
        {"digest": 3},
        {"bytes": -1},
        {"bytes": 7},
        {"bytes": 1.5e9},
        {"bytes": True},
        {"bytes": 10**400},
        {"name": None},
        {"folder": 3},
        {"more": 1},
    ],
    ids=str,
)
def test_a_reference_from_the_network_is_checked(change: dict[str, Any]) -> None:
    good = FileRef("checkpoints", "x", 100, "a" * 40)
    assert FileRef.from_message(good.as_dict()) == good
    with pytest.raises(ProtocolError):
        FileRef.from_message({**good.as_dict(), **change})


@pytest.mark.parametrize("data", [None, [], "x", {}, {"name": "x"}], ids=str)
def test_what_is_no_reference_is_refused(data: Any) -> None:
    with pytest.raises(ProtocolError):
        FileRef.from_message(data)


# --- receiving --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1000, limits.FILE_CHUNK_BYTES * 2 + 5])
def test_a_file_arrives_whole_and_is_found_again(tmp_path: Path, cache: FileCache, nbytes: int) -> None:
    path = write(tmp_path / "model", nbytes)
    assert cache.find(ref_of(path)) is None
    received = transfer(cache, path)
    assert received.read_bytes() == path.read_bytes()
    assert cache.find(ref_of(path)) == received
    assert left_behind(cache) == [received.name]


def test_a_file_is_read_in_pieces_of_their_own_memory_and_hashed_to_the_last_byte(tmp_path: Path) -> None:
    path = write(tmp_path / "model", limits.FILE_CHUNK_BYTES * 3 + 5)
    with ContentHash() as behind:
        behind.update(b"something else")
        behind.restart()
        pieces = []
        for offset, chunk in read_chunks(path):
            behind.update(chunk)
            pieces.append((offset, chunk))
        assert behind.hexdigest() == content_digest(path)
    assert [offset for offset, _ in pieces] == [i * limits.FILE_CHUNK_BYTES for i in range(4)]
    assert b"".join(chunk for _, chunk in pieces) == path.read_bytes()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("monarch-hash")]


@pytest.mark.parametrize("end", ["finish", "discard", "leave"])
def test_no_thread_outlives_a_file_that_was_received(tmp_path: Path, cache: FileCache, end: str) -> None:
    incoming, content = _begin(tmp_path, cache)
    incoming.write(0, memoryview(content))
    incoming.finish(hashlib.sha256(content).hexdigest()) if end == "finish" else getattr(incoming, end)()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("monarch-hash")]


def test_a_name_with_dots_stays_in_the_folder(tmp_path: Path, cache: FileCache) -> None:
    path = write(tmp_path / "model")
    ref = FileRef(None, "../../outside", path.stat().st_size, file_digest(path))
    assert transfer(cache, path, ref).parent == cache.folder


def _begin(tmp_path: Path, cache: FileCache) -> tuple[IncomingFile, bytes]:
    path = write(tmp_path / "model")
    return begun(cache, ref_of(path)), path.read_bytes()


@pytest.mark.parametrize(
    "pieces",
    [[(1, 10)], [(0, 10), (0, 10)], [(0, 10), (20, 30)], [(0, 10), (10, 5000)], [(-1, 5)]],
    ids=["later", "twice", "gap", "too_long", "negative"],
)
def test_bytes_out_of_order_or_too_many_are_refused(
    tmp_path: Path, cache: FileCache, pieces: list[tuple[int, int]]
) -> None:
    incoming, content = _begin(tmp_path, cache)
    for offset, length in pieces[:-1]:
        incoming.write(offset, memoryview(content[offset : offset + length]))
    offset, length = pieces[-1]
    with pytest.raises(ProtocolError, match="out of order"):
        incoming.write(offset, memoryview(bytes(length)))
    incoming.discard()
    incoming.discard()
    assert left_behind(cache) == []


@pytest.mark.parametrize("damage", ["byte", "short", "digest", "other"])
def test_a_file_that_arrives_otherwise_than_announced_is_not_kept(
    tmp_path: Path, cache: FileCache, damage: str
) -> None:
    incoming, content = _begin(tmp_path, cache)
    digest = hashlib.sha256(content).hexdigest()
    if damage in ("byte", "other"):
        content = content[:500] + b"!" + content[501:]
    if damage == "other":
        digest = hashlib.sha256(content).hexdigest()
    incoming.write(0, memoryview(content[: -1 if damage == "short" else None]))
    with pytest.raises(OSError, match=r"model (arrived damaged|changed while it was sent); render again"):
        incoming.finish("0" * 40 if damage == "digest" else digest)
    assert left_behind(cache) == []
    assert cache.find(incoming.ref) is None


def test_a_cached_file_that_was_damaged_is_not_used_and_is_replaced(tmp_path: Path, cache: FileCache) -> None:
    path = write(tmp_path / "model")
    received = transfer(cache, path)
    for damaged in (path.read_bytes()[:-1], path.read_bytes()[:-1] + b"!"):
        received.write_bytes(damaged)
        assert cache.find(ref_of(path)) is None
    assert transfer(cache, path).read_bytes() == path.read_bytes()


def test_what_was_never_sent_to_its_end_goes_in_the_end(tmp_path: Path, cache: FileCache) -> None:
    cache.folder.mkdir()
    stale, fresh = cache.folder / "old.part", cache.folder / "new.part"
    for part in (stale, fresh):
        part.touch()
        part.with_suffix(".part.json").touch()
    long_ago = time.time() - limits.FILE_PART_SECONDS - 60
    os.utime(stale, (long_ago, long_ago))
    transfer(cache, write(tmp_path / "model"))
    assert {path.name for path in cache.folder.glob("*.part*")} == {"new.part", "new.part.json"}


def test_parts_make_room_unless_they_are_being_written(tmp_path: Path) -> None:
    path = write(tmp_path / "model", 1000)
    cache = FileCache(tmp_path / "cache", max_bytes=path.stat().st_size + 10)
    cache.folder.mkdir()
    parts = [cache.folder / "left.part", cache.folder / "busy.part"]
    for part, age in zip(parts, (limits.STALL_TIMEOUT + 60, 0), strict=True):
        part.write_bytes(bytes(100))
        os.utime(part, (time.time() - age, time.time() - age))
    transfer(cache, path)
    assert [part.exists() for part in parts] == [False, True]


def test_a_transfer_that_was_left_goes_on_where_it_was(tmp_path: Path, cache: FileCache) -> None:
    incoming, content = _begin(tmp_path, cache)
    incoming.write(0, memoryview(content[:700]))
    incoming.leave()
    incoming = begun(cache, incoming.ref)
    assert incoming.received == 700
    incoming.write(700, memoryview(content[700:]))
    received = incoming.finish(hashlib.sha256(content).hexdigest())
    assert received.read_bytes() == content
    assert left_behind(cache) == [received.name]


def test_only_one_process_receives_a_file(tmp_path: Path, cache: FileCache) -> None:
    incoming, _ = _begin(tmp_path, cache)
    with pytest.raises(OSError, match="is being received there from another driver"):
        cache.receive(incoming.ref)
    incoming.leave()
    cache.receive(incoming.ref).discard()
    assert left_behind(cache) == []


# --- bounds -----------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_files_make_room(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{i}", 1000, seed=i) for i in range(4)]
    size = paths[0].stat().st_size
    cache = FileCache(tmp_path / "cache", max_bytes=3 * size)
    for age, path in enumerate(paths[:3]):
        os.utime(transfer(cache, path), (1000 + age, 1000 + age))
    assert cache.find(ref_of(paths[0])) is not None
    transfer(cache, paths[3])
    assert [cache.find(ref_of(path)) is not None for path in paths] == [True, False, True, True]


def test_a_file_larger_than_the_cache_is_refused_and_evicts_nothing(tmp_path: Path) -> None:
    small, large = write(tmp_path / "small", 100), write(tmp_path / "large", 5000)
    cache = FileCache(tmp_path / "cache", max_bytes=1000)
    transfer(cache, small)
    with pytest.raises(OSError, match=r"large needs 0\.0 GB, the worker's file cache holds"):
        cache.receive(ref_of(large))
    assert cache.find(ref_of(small)) is not None


def test_a_file_larger_than_the_disk_is_refused_before_it_is_sent(cache: FileCache) -> None:
    free = shutil.disk_usage(cache.folder.parent).free
    cache.max_bytes = 1 << 62
    with pytest.raises(OSError, match=r"needs .* GB, the worker's disk has .* GB free"):
        cache.receive(FileRef(None, "huge", free, "a" * 40))
    assert left_behind(cache) == []


def test_a_full_disk_has_room_in_place_of_older_files_and_none_for_what_cannot_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [write(tmp_path / f"{i}", 100_000, seed=i) for i in range(3)]
    cache = FileCache(tmp_path / "cache")
    for age, path in enumerate(paths):
        os.utime(transfer(cache, path), (1000 + age, 1000 + age))
    size = paths[0].stat().st_size
    monkeypatch.setattr(limits, "FILE_CHUNK_BYTES", 1000)
    monkeypatch.setattr(cache, "_free", lambda: size // 2)
    assert cache.free_bytes() == size // 2 + 3 * size
    with pytest.raises(OSError, match="free some space there"):
        cache.receive(FileRef(None, "huge", 4 * size, "a" * 40))
    assert [cache.find(ref_of(path)) is not None for path in paths] == [True] * 3
    for age, path in enumerate(paths):
        os.utime(cache.find(ref_of(path)) or path, (1000 + age, 1000 + age))
    cache.receive(FileRef(None, "new", size, "b" * 40)).leave()
    assert [cache.find(ref_of(path)) is not None for path in paths] == [False, True, True]


_FULL_DISK = """
import resource, runpy, signal, sys
from pathlib import Path
runpy.run_path(sys.argv[1])["load_pack"]()
from monarch_split.distributed.file_cache import FileCache
from monarch_split.distributed.files import FileRef
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
cache = FileCache(Path(sys.argv[2]))
for step, chunk in ((50_000, 50_000), (99_999, 4_096)):
    incoming = cache.receive(FileRef(None, "model", 150_000, "a" * 40))
    incoming.ready(patience=10)
    try:
        for offset in range(0, 150_000, chunk):
            incoming.write(offset, memoryview(bytes(min(chunk, 150_000 - offset))))
        incoming.finish("b" * 40)
        print("stored")
    except OSError as error:
        print("full" if error.errno else "damaged")
        incoming.discard()
incoming = cache.receive(FileRef(None, "model", 100_001, "a" * 40))
incoming.ready(patience=10)
incoming.write(0, memoryview(bytes(99_999)))
incoming.write(99_999, memoryview(bytes(2)))  # stays in the buffer until the file is closed
try:
    incoming.finish("b" * 40)
except OSError as error:
    print("full" if error.errno else "damaged")
print(sorted(path.name for path in Path(sys.argv[2]).iterdir()))
"""


def test_a_disk_that_runs_full_leaves_nothing_behind(tmp_path: Path) -> None:
    main = Path(__file__).parent.parent / "__main__.py"
    command = [sys.executable, "-c", _FULL_DISK, str(main), str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split("\n")[:4] == ["full", "full", "full", "[]"], done.stderr
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 100_000


def test_files_that_differ_in_one_tensor_far_from_the_sampled_blocks_are_not_the_same(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors = {f"block{i:03}": torch.zeros(1 << 18) for i in range(40)}
    one, other = tmp_path / "one.safetensors", tmp_path / "other.safetensors"
    save_file(tensors, one)
    for changed in tensors:
        save_file({**tensors, changed: tensors[changed] + 0.01}, other)
        assert file_digest(one) != file_digest(other), changed
