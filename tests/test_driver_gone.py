"""What is left on a worker: nothing of a driver that is gone, and no worker of a pack that is uninstalled."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_split.demo.reference_runtime import ReferenceRuntime
from monarch_split.distributed import limits
from monarch_split.distributed import worker as worker_module
from monarch_split.distributed.auth import own_identity
from monarch_split.distributed.file_cache import FileCache
from monarch_split.distributed.peer import Peer
from monarch_split.distributed.recipe import Recipe
from monarch_split.distributed.versions import own_versions
from monarch_split.distributed.worker import Worker
from monarch_split.tests.worker_process import until

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    """A worker in this process, so that what is left of a driver can be looked at."""
    worker = Worker(ReferenceRuntime(), FileCache(tmp_path), ["127.0.0.1"], 0, "worker", own=own_identity())
    thread = threading.Thread(target=worker.run)
    thread.start()
    yield worker
    worker.stop()
    thread.join(20)
    assert not thread.is_alive()


def test_a_worker_whose_pack_was_uninstalled_ends_once_it_serves_nobody(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = tmp_path / "worker.py"
    code.touch()
    monkeypatch.setattr(worker_module, "_OWN_CODE", code)
    monkeypatch.setattr(limits, "UNINSTALLED_SECONDS", 0.6)
    peer = Peer(worker.addresses[0], lambda: None)
    peer.connect(own_versions(None), allow_mismatch=False)
    code.unlink()
    time.sleep(1.5)
    assert not worker._stopping, "it ended in a run"
    # As an update does.
    code.touch()
    peer.close(cancel=False)
    time.sleep(1.5)
    assert not worker._stopping, "it ended though it is installed"
    code.unlink()
    until(lambda: worker._stopping, "its end", 10)
    assert "Monarch was removed" in capsys.readouterr().out


def test_nothing_is_left_of_a_driver_that_is_gone(worker: Worker, recipe: Recipe) -> None:
    gc.collect()
    gc.disable()
    try:
        peer = Peer(worker.addresses[0], lambda: None)
        peer.connect(own_versions(None), allow_mismatch=False)
        peer.prepare(recipe, lambda done, total: None)
        peer.wait_ready(recipe)
        assert worker._driver is not None
        left = [weakref.ref(worker._driver), weakref.ref(worker._driver._computing._replica)]
        assert all(ref() is not None for ref in left)
        peer.close(cancel=False)
        until(lambda: all(ref() is None for ref in left), "the driver and its model are gone", 10)
    finally:
        gc.enable()
