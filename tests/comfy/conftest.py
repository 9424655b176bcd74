"""Fixtures for tests with a real ComfyUI: the comfy package on the CPU, tiny models, and one sampling of them.

They run in ComfyUI's own Python; anywhere else every test here is skipped, and the summary says so."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

_skipped_because: list[str] = []


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _skipped_because:
        terminalreporter.section("tests with a real ComfyUI were SKIPPED", sep="!", red=True, bold=True)
        terminalreporter.line(_skipped_because[0])


def _skip(reason: str) -> None:
    _skipped_because.append(f"{reason} Run them with ComfyUI's Python, COMFYUI_PATH set to ComfyUI's folder.")
    pytest.skip(_skipped_because[-1])


@pytest.fixture(scope="session")
def comfyui_path() -> Path:
    """ComfyUI's folder: COMFYUI_PATH, else ~/comfy/ComfyUI. Skips where there is none."""
    path = Path(os.environ.get("COMFYUI_PATH") or Path.home() / "comfy" / "ComfyUI")
    if not (path / "comfy" / "sd.py").exists():
        _skip(f"There is no ComfyUI in {path}.")
    return path


@pytest.fixture(scope="session")
def comfy(comfyui_path: Path) -> ModuleType:
    """The comfy package, on the CPU with one thread. Skips where this Python cannot import it."""
    if str(comfyui_path) not in sys.path:
        sys.path.insert(0, str(comfyui_path))
    # On some CPUs MKL adds up a matrix product in another order for another number of rows, unless it is told not to.
    os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")
    import torch

    try:
        # Only the values of the command line are needed here, and pytest's own arguments are not ComfyUI's.
        importlib.import_module("comfy.cli_args").args.cpu = True
        for name in ("sd", "sample", "samplers", "utils", "model_patcher", "patcher_extension"):
            importlib.import_module(f"comfy.{name}")
    except ImportError as problem:
        _skip(f"This Python ({sys.executable}) cannot import ComfyUI: {problem}.")
    torch.set_num_threads(1)
    override = importlib.import_module("monarch_split.demo.family_override")
    override.install()
    return sys.modules["comfy"]


@pytest.fixture(scope="session")
def models_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the tiny models and LoRA files of this session."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def plain_convolutions(comfy: ModuleType) -> Iterator[None]:
    """oneDNN off in this process: needed where a UNet's rows are compared with rows of another batch size."""
    import torch

    from monarch_split.demo.family_override import plain_convolutions as switch_off

    before = torch.backends.mkldnn.enabled
    switch_off()
    yield
    torch.backends.mkldnn.enabled = before


@dataclass
class Tiny:
    """A freshly loaded tiny MODEL of a family, with conditioning for it."""

    family: str
    path: Path
    model: Any
    positive: list
    negative: list

    def sample(
        self,
        model: Any = None,
        *,
        steps: int = 2,
        cfg: float | None = None,
        sampler: str = "euler",
        scheduler: str = "simple",
        seed: int = 0,
        batch: int = 1,
        positive: list | None = None,
        negative: list | None = None,
        **more: Any,
    ) -> Any:
        """The latent that KSampler makes with these settings; `more` goes to comfy.sample.sample (denoise, …)."""
        sample = importlib.import_module("comfy.sample")

        from monarch_split.demo import tiny_models

        latent = tiny_models.empty_latent(self.family, batch)
        return sample.sample(
            self.model if model is None else model,
            sample.prepare_noise(latent, seed),
            steps,
            tiny_models.FAMILIES[self.family].cfg if cfg is None else cfg,
            sampler,
            scheduler,
            self.positive if positive is None else positive,
            self.negative if negative is None else negative,
            latent,
            seed=seed,
            disable_pbar=True,
            **more,
        )


@pytest.fixture
def tiny(comfy: Any, models_folder: Path) -> Callable[..., Tiny]:
    """tiny(family, tokens=8, negative_tokens=None, scale="tiny") -> Tiny, loaded anew at every call."""
    from monarch_split.demo import tiny_models

    def load(family: str, tokens: int = 8, negative_tokens: int | None = None, scale: str = "tiny") -> Tiny:
        path = tiny_models.write_model(family, models_folder, scale=scale)
        return Tiny(
            family,
            path,
            comfy.sd.load_diffusion_model(str(path)),
            tiny_models.conditioning(family, 1, tokens),
            tiny_models.conditioning(family, 2, negative_tokens or tokens),
        )

    return load


# --- joined with workers ----------------------------------------------------------------------------------------------


@dataclass
class Driver:
    """This process as the driver: renders tiny models with a split and keeps the reports."""

    configuration: Path
    reports: list[Any] = field(default_factory=list)

    def use(self, *addresses: str) -> None:
        """Have the configuration name these workers."""
        listed = ", ".join(f'"{address}"' for address in addresses)
        self.configuration.write_text(f"[clusters.default]\nworkers = [{listed}]\n")

    def split(self, model: Any, mode: str = "rows") -> Any:
        """What Monarch Split does to a MODEL; reports end up in `reports`."""
        from monarch_split.nodes.attach import attach

        return attach(model, mode, self.reports.append)

    @property
    def report(self) -> Any:
        """Report of the last run."""
        return self.reports[-1]

    def assert_split(self, by: str = "rows") -> None:
        """The last run was split, all of it but the forward that proves a new worker, and nothing went wrong."""
        report = self.report
        assert report.forwards_split >= 1, report.line()
        assert report.split == by, report.line()
        assert not report.events, report.line()


@pytest.fixture(scope="session")
def start_worker(comfyui_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """start_worker(**changes) -> WorkerProcess of this ComfyUI with empty model folders; the caller closes it."""
    from monarch_split.demo import family_override
    from monarch_split.demo.worker_process import WorkerProcess

    def start(**changes: Any) -> Any:
        folder = tmp_path_factory.mktemp("worker")
        settings: dict[str, Any] = {
            "python": sys.executable,
            "runtime": "comfyui",
            "cache": folder / "cache",
            # Tiny models of families with fixed sizes load only under the test-only override, on both sides.
            "launcher": [str(family_override.__file__)],
            "arguments": ["--comfyui", str(comfyui_path), "--", "--cpu", "--base-directory", str(folder)],
        }
        return WorkerProcess(**{**settings, **changes})

    return start


@pytest.fixture(scope="session")
def shared_worker(start_worker: Callable[..., Any]) -> Iterator[Any]:
    """One worker for all tests that do it no harm."""
    with start_worker(name="second") as worker:
        yield worker


@pytest.fixture
def idle_driver(comfy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """The driver with a configuration folder of its own, which names no worker yet."""
    from monarch_split.tests.driving import share_identity

    share_identity(tmp_path)
    monkeypatch.setenv("MONARCH_CONFIG_DIR", str(tmp_path))
    return Driver(tmp_path / "monarch.toml")


@pytest.fixture
def driver(idle_driver: Driver, shared_worker: Any) -> Driver:
    """The driver joined with the shared worker."""
    idle_driver.use(shared_worker.address)
    return idle_driver
