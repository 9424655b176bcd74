"""Makes the folder under test importable as `monarch_split`, and by no other name, in every test.

Keys and pairings of all tests lie in a folder of their own, which the processes that tests start inherit.
"""

from __future__ import annotations

import atexit
import os
import runpy
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

runpy.run_path(str(Path(__file__).parent.parent / "__main__.py"))["load_pack"]()
os.environ["MONARCH_CONFIG_DIR"] = tempfile.mkdtemp(prefix="monarch-test-config-")
atexit.register(shutil.rmtree, os.environ["MONARCH_CONFIG_DIR"], ignore_errors=True)


@pytest.fixture(scope="module")
def model() -> Any:
    """The tiny reference model."""
    from monarch_split.tests.driving import make_model

    return make_model()


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Recipe of the tiny reference model, in a file."""
    from monarch_split.demo.reference import TINY
    from monarch_split.demo.reference_runtime import write_reference_model

    return write_reference_model(TINY, tmp_path_factory.mktemp("model") / "tiny.safetensors")


@pytest.fixture(scope="session")
def forge() -> Any:
    """Starts worker processes."""
    from monarch_split.tests.worker_process import shared_forge

    return shared_forge()


@pytest.fixture
def worker(forge: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker of the test's own, which this process knows nothing of yet; the port after its own is free."""
    from monarch_split.tests.driving import forget
    from monarch_split.tests.network_proxy import port_with_a_neighbour
    from monarch_split.tests.worker_process import ended

    forget(monkeypatch)
    made = forge.worker(port=port_with_a_neighbour())
    with ended(made):
        yield made


@pytest.fixture
def one_thread() -> Any:
    """This process computes with one thread: more of them wait for each other where other work takes the cores."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def even_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """See driving.equal_shares."""
    from monarch_split.tests.driving import equal_shares

    equal_shares(monkeypatch)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of a tiny model takes many chunks."""
    from monarch_split.distributed import limits

    monkeypatch.setattr(limits, "FILE_CHUNK_BYTES", 64 * 1024)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Three workers that this process knows nothing of yet, with equal shares."""
    from monarch_split.tests.driving import equal_shares, three_workers

    equal_shares(monkeypatch)
    return three_workers(monkeypatch)


@pytest.fixture
def addresses(workers: Any) -> list[str]:
    return [worker.address for worker in workers]


@pytest.fixture
def ranks() -> Any:
    """ranks(count) -> so many ranks of an exchange, each a process; they end with the test."""
    from monarch_split.tests.exchange_ranks import nursery

    made: list[Any] = []

    def make(count: int) -> list[Any]:
        made.extend(nursery().rank() for _ in range(count))
        return made[-count:]

    yield make
    for rank in made:
        rank.kill()


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """save(content, name="model.safetensors") -> path of a file with this content."""

    def write(content: bytes, name: str = "model.safetensors") -> Path:
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return write


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """A skipped fault is one that nobody has tested on this machine."""
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if "test_lossy_network" in report.nodeid]
    if skipped:
        terminalreporter.section("tests with lost packets were SKIPPED", sep="!", red=True, bold=True)
        terminalreporter.line(str(skipped[0].longrepr[-1]))
