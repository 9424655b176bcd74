"""Workers that die, freeze or are missing, interrupts, and bad input: the render is right, or one sentence says why."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.comfyui, pytest.mark.timeout(180)]


def largest_difference(one: Any, other: Any) -> float:
    return (one - other).abs().max().item()


def at_step(step: int, action: Callable[[], None]) -> Callable[..., None]:
    """A sampler callback that acts once, after `step` steps."""
    done: list[bool] = []

    def callback(current: int, *_: Any) -> None:
        if current == step and not done:
            done.append(True)
            action()

    return callback


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_worker_lost_in_a_run_and_back_for_the_next(
    idle_driver: Any, start_worker: Callable[..., Any], tiny: Callable[..., Any], how: str
) -> None:
    it = tiny("flux_schnell", scale="deep")
    expected = it.sample(cfg=4.0, steps=8)
    port = free_port()
    idle_driver.use(f"127.0.0.1:{port}")
    split = idle_driver.split(it.model)
    with start_worker(name="mortal", port=port) as worker:
        began = time.monotonic()
        latent = it.sample(split, cfg=4.0, steps=8, callback=at_step(3, getattr(worker, how)))
        assert time.monotonic() - began < 60
        assert largest_difference(latent, expected) <= 1e-5
        assert 1 <= idle_driver.report.forwards_split < 8
        assert "mortal" in idle_driver.report.line()
    without = it.sample(split, cfg=4.0, steps=8)
    assert largest_difference(without, expected) <= 1e-5
    assert "start the worker" in idle_driver.report.line()
    with start_worker(name="mortal", port=port):
        latent = it.sample(split, cfg=4.0, steps=8)
        idle_driver.assert_split()
        assert largest_difference(latent, expected) <= 1e-5


def test_interrupt_reaches_both_sides_and_the_next_prompt_is_right(
    idle_driver: Any, start_worker: Callable[..., Any], tiny: Callable[..., Any]
) -> None:
    import comfy.model_management as model_management

    it = tiny("flux_schnell", scale="deep")
    expected = it.sample(cfg=4.0, steps=4)
    steps: list[int] = []
    stop = at_step(3, model_management.interrupt_current_processing)

    def callback(step: int, *rest: Any) -> None:
        steps.append(step)
        stop(step, *rest)

    with start_worker(name="second") as worker:
        idle_driver.use(worker.address)
        split = idle_driver.split(it.model)
        with pytest.raises(model_management.InterruptProcessingException):
            it.sample(split, cfg=4.0, steps=50, callback=callback)
        assert steps[-1] <= 5
        began = time.monotonic()
        latent = it.sample(split, cfg=4.0, steps=4)
        idle_driver.assert_split()
        assert largest_difference(latent, expected) <= 1e-5
        assert time.monotonic() - began < 20
        assert "Traceback" not in worker.output


def test_twenty_prompts_of_alternating_size_leave_nothing_behind(driver: Any, tiny: Callable[..., Any]) -> None:
    import threading

    def handles() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    it = tiny("flux_schnell")
    split = driver.split(it.model)
    for batch in (1, 2):
        it.sample(split, cfg=4.0, batch=batch)
    before = handles(), threading.active_count()
    for prompt in range(20):
        it.sample(split, cfg=4.0, batch=1 + prompt % 2, steps=2)
        driver.assert_split()
    assert handles() <= before[0] + 2
    assert threading.active_count() <= before[1]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "no worker is configured"),
        ('[clusters.default]\nworkers = ["127.0.0.1:1"]\n', "nothing listens at 127.0.0.1:1"),
        ('[clusters.default]\nworkers = ["no.such.host.invalid"]\n', "not known"),
        ('[clusters.default]\nworkers = ["127.0.0.1:notaport"]\n', "is not an address"),
        ("[clusters.default\n", "not valid TOML"),
        ('[clusters.default]\nworker = ["127.0.0.1:1"]\n', "unknown settings: worker"),
    ],
)
def test_no_usable_worker_renders_here_and_says_why(
    idle_driver: Any, tiny: Callable[..., Any], text: str | None, says: str
) -> None:
    import torch

    if text is not None:
        idle_driver.configuration.write_text(text)
    it = tiny("flux_schnell")
    expected = it.sample(cfg=4.0)
    assert torch.equal(it.sample(idle_driver.split(it.model), cfg=4.0), expected)
    assert says in idle_driver.report.line()


def test_a_worker_of_another_pack_version_is_refused_with_both_versions(
    idle_driver: Any, start_worker: Callable[..., Any], tiny: Callable[..., Any], tmp_path: Path
) -> None:
    import monarch_split
    from monarch_split.demo.worker_process import PACK

    other = tmp_path / "other_version"
    shutil.copytree(PACK, other, ignore=shutil.ignore_patterns(".*", "tests", "__pycache__"))
    entry = other / "__init__.py"
    entry.write_text(entry.read_text().replace(f'"{monarch_split.__version__}"', '"9.9.9"'))
    it = tiny("flux_schnell")
    with start_worker(name="newer", pack=other) as worker:
        idle_driver.use(worker.address)
        it.sample(idle_driver.split(it.model), cfg=4.0)
    line = idle_driver.report.line()
    assert "9.9.9" in line
    assert monarch_split.__version__ in line
    assert idle_driver.report.forwards_split == 0


def test_the_file_is_sent_once_and_a_changed_one_again(
    idle_driver: Any, start_worker: Callable[..., Any], tiny: Callable[..., Any], tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    it = tiny("flux_schnell")
    size = it.path.stat().st_size
    with start_worker(name="empty", cache=cache) as worker:
        idle_driver.use(worker.address)
        it.sample(idle_driver.split(it.model), cfg=4.0)
        idle_driver.assert_split()
        assert idle_driver.report.bytes_sent > size
        it.sample(idle_driver.split(it.model), cfg=4.0)
        assert idle_driver.report.bytes_sent < size / 10
    with start_worker(name="restarted", cache=cache) as worker:
        idle_driver.use(worker.address)
        it.sample(idle_driver.split(it.model), cfg=4.0)
        assert idle_driver.report.bytes_sent < size / 10
    assert len(list(cache.iterdir())) == 1


def test_disk_full_while_streaming_leaves_nothing_half_written(
    idle_driver: Any, start_worker: Callable[..., Any], tiny: Callable[..., Any], tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    limited = tmp_path / "limited.py"
    limited.write_text(
        "import resource, runpy, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, 8 << 20))\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    it = tiny("flux_schnell")
    expected = it.sample(cfg=4.0)
    with start_worker(name="full", cache=cache, launcher=[str(limited)]) as worker:
        idle_driver.use(worker.address)
        latent = it.sample(idle_driver.split(it.model), cfg=4.0)
        assert "cannot be kept on the worker" in idle_driver.report.line()
        assert idle_driver.report.forwards_split == 0
        assert largest_difference(latent, expected) == 0
        assert list(cache.iterdir()) == []


def test_the_loader_refuses_what_cannot_work(comfy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import folder_paths

    from monarch_split.demo.tiny_models import write_model
    from monarch_split.nodes.loader import MonarchModelLoader

    good = write_model("flux_schnell", tmp_path)
    (tmp_path / "truncated.safetensors").write_bytes(good.read_bytes()[:-1000])
    (tmp_path / "really_gguf.safetensors").write_bytes(b"GGUF\x03\0\0\0" + bytes(64))
    monkeypatch.setitem(folder_paths.folder_names_and_paths, "diffusion_models", ([str(tmp_path)], {".safetensors"}))
    with pytest.raises(FileNotFoundError, match=r"missing\.safetensors"):
        MonarchModelLoader.execute("missing.safetensors", "default")
    with pytest.raises(ValueError, match=r"truncated\.safetensors"):
        MonarchModelLoader.execute("truncated.safetensors", "default")
    with pytest.raises(ValueError, match=r"really_gguf\.safetensors.*GGUF"):
        MonarchModelLoader.execute("really_gguf.safetensors", "default")
    model = MonarchModelLoader.execute(good.name, "default").result[0]
    assert model.model.diffusion_model is not None


def test_a_file_that_changes_after_it_was_loaded_is_not_split(driver: Any, tiny: Callable[..., Any]) -> None:
    import os

    import torch

    it = tiny("flux_schnell")
    split = driver.split(it.model)
    expected = it.sample(cfg=4.0)
    status = it.path.stat()
    try:
        os.utime(it.path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
        assert torch.equal(it.sample(split, cfg=4.0), expected)
        assert "changed after it was loaded" in driver.report.line()
    finally:
        os.utime(it.path, ns=(status.st_atime_ns, status.st_mtime_ns))
    it.sample(split, cfg=4.0)
    driver.assert_split()
