"""Fixtures for tests of ComfyUI's real page in Chromium, with a real server and real workers.

They need Chromium, Playwright for Python and ComfyUI's front end; without one of them they are skipped, and the summary
says so. Screenshots are kept in the folder that MONARCH_SCREENSHOTS names.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

# For a machine without a network, a screen or a sandbox of its own.
_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
_FRONTEND = "comfyui_frontend_package"
_skipped_because: list[str] = []


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _skipped_because:
        terminalreporter.section("tests in a real browser were SKIPPED", sep="!", red=True, bold=True)
        terminalreporter.line(_skipped_because[0])


def _skip(reason: str) -> NoReturn:
    _skipped_because.append(reason)
    pytest.skip(reason)


def _chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome")
    return os.environ.get("CHROMIUM_PATH") or next(filter(None, map(shutil.which, names)), None)


def _frontends() -> list[Path]:
    """Folders that ComfyUI's front end was installed into: the one that this ComfyUI pins, then the newest."""
    return [Path(folder) for folder in os.environ.get("MONARCH_FRONTENDS", "").split(os.pathsep) if folder]


def _version(folder: Path) -> str:
    found = next(folder.glob(f"{_FRONTEND}-*.dist-info"), None)
    return found.name.removeprefix(f"{_FRONTEND}-").removesuffix(".dist-info") if found else "none"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`frontend`: tests in test_story run with each front end, all others with the pinned one."""
    if "frontend" in metafunc.fixturenames:
        folders = _frontends() or [Path("no front end")]
        if metafunc.definition.path.stem != "test_story":
            folders = folders[:1]
        ids = [f"frontend-{_version(folder)}" for folder in folders]
        metafunc.parametrize("frontend", folders, ids=ids, scope="module", indirect=True)


@pytest.fixture(scope="module")
def frontend(request: pytest.FixtureRequest) -> Path:
    """The folder of the front end's files."""
    root = request.param / _FRONTEND / "static"
    if not (root / "index.html").exists():
        _skip("MONARCH_FRONTENDS names no comfyui-frontend-package (./monarch test installs it and does)")
    return root


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium. It ends with the module: Playwright keeps an event loop running in this thread."""
    executable = _chromium()
    if executable is None:
        _skip("There is no Chromium; install one (Debian: apt install chromium), or name it in CHROMIUM_PATH")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _skip("This Python has no playwright (./monarch test installs it where there is a Chromium)")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=executable, args=_FLAGS)
        yield running
        running.close()


@pytest.fixture(scope="module")
def site(comfy: Any, comfyui_path: Path, frontend: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A Site whose driver knows no worker."""
    from monarch_split.tests.comfy.browser.site import Site

    with Site(tmp_path_factory.mktemp("site"), comfyui_path, frontend) as running:
        yield running


@pytest.fixture
def open_page(browser: Any, site: Any) -> Iterator[Callable[..., Any]]:
    """open_page(width, height) -> a ComfyPage that has loaded; closed after the test."""
    from monarch_split.tests.comfy.browser.page import ComfyPage

    contexts: list[Any] = []

    def open_one(width: int = 1280, height: int = 720) -> Any:
        context = browser.new_context(viewport={"width": width, "height": height})
        contexts.append(context)
        return ComfyPage(context.new_page(), site.url)

    yield open_one
    for context in contexts:
        context.close()


@pytest.fixture
def pairable_worker(start_worker: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """pairable_worker(**changes) -> a worker of another user, which has printed a pairing code."""

    def start(name: str = "second", **changes: Any) -> Any:
        from monarch_split.tests.comfy.browser.page import wait_for

        folder = tmp_path / f"{name}-configuration"
        worker = start_worker(name=name, environment={"MONARCH_CONFIG_DIR": str(folder)}, **changes)
        wait_for(lambda: "monarch1-" in worker.output, 10)
        return worker

    return start
