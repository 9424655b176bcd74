"""What a process took is what it took since it was asked to begin anew, here and on a real worker."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_split.demo.reference import TINY, ReferenceDiT
from monarch_split.demo.reference_runtime import write_reference_model
from monarch_split.distributed.addresses import Address
from monarch_split.distributed.peer import Peer
from monarch_split.distributed.usage import Usage
from monarch_split.distributed.versions import own_versions
from monarch_split.tests.driving import render
from monarch_split.tests.worker_process import Forge, Worker, ended

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the peak begins anew on Linux alone")


def test_a_peak_of_before_is_not_counted() -> None:
    usage = Usage()
    usage.add_load(1.5)
    block = bytearray(os.urandom(1) * 150_000_000)
    high = usage.taken()
    assert high["load_ms"] == 1500
    del block
    usage.begin()
    low = usage.taken()
    assert low["load_ms"] == 0
    assert low["main"] < high["main"] - 100_000_000


@pytest.fixture
def worker(forge: Forge) -> Iterator[Worker]:
    made = forge.worker("second")
    with ended(made):
        yield made


def asked(worker: Worker, *, begin: bool) -> dict[str, int]:
    peer = Peer(Address("127.0.0.1", worker.port), lambda: None)
    try:
        peer.connect(own_versions(None), allow_mismatch=False, begin_usage=begin)
        return peer.usage
    finally:
        peer.close(cancel=False)


def test_a_worker_tells_what_loading_took_since_a_driver_had_it_begin_anew(worker: Worker, tmp_path: Path) -> None:
    worker.behave(build=0.2)
    model = ReferenceDiT(TINY)
    recipe = write_reference_model(TINY, tmp_path / "model.safetensors")
    asked(worker, begin=True)
    _, report = render([worker.address], recipe, model)
    assert report.forwards_split, report.line()
    told = asked(worker, begin=False)
    assert told["load_ms"] >= 200
    assert told["main"] > 10_000_000
    assert asked(worker, begin=True)["load_ms"] == told["load_ms"]
    assert asked(worker, begin=False)["load_ms"] == 0
