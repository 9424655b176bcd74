"""The tab when a user is impatient, a worker breaks at the wrong moment, or a name is as long as names can be."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from monarch_split.tests.comfy.browser.page import code_of, wait_for
from monarch_split.tests.comfy.browser.site import render
from monarch_split.tests.network_proxy import network_to

pytestmark = [pytest.mark.comfyui, pytest.mark.timeout(240)]

LONG_NAME = "<b>w</b>" + 56 * "W"
LONG_MODEL = 108 * "m" + ".safetensors"
_TOO_WIDE = """(element) => [element, ...element.querySelectorAll('*')]
  .filter((each) => [...each.childNodes].some((node) => node.nodeType === 3 && node.data.trim()))
  .filter((each) => each.scrollWidth > each.clientWidth + 1 && getComputedStyle(each).display !== 'inline')
  .map((each) => each.textContent)"""
_REMEMBER_STATES = """(name) => {
  window.states = []
  window.app.api.addEventListener('monarch.state', ({ detail }) => {
    const state = detail.nodes.find((node) => node.name === name)?.state
    if (state && window.states.at(-1) !== state) window.states.push(state)
  })
}"""


def requests_to(page: Any, path: str) -> list[str]:
    """Fills with the requests that the page makes to this path from now on."""
    made: list[str] = []
    page.page.on("request", lambda request: made.append(request.url) if request.url.endswith(path) else None)
    return made


def states_of(page: Any, name: str) -> Callable[[], list[str]]:
    """What the page is told of the state of a worker from now on, without repetitions."""
    page.page.evaluate(_REMEMBER_STATES, name)
    return lambda: page.page.evaluate("() => window.states")


@pytest.fixture(scope="module")
def page(browser: Any, site: Any) -> Iterator[Any]:
    """One page with the tab open, for all tests here."""
    from monarch_split.tests.comfy.browser.page import ComfyPage

    context = browser.new_context(viewport={"width": 1280, "height": 720})
    page = ComfyPage(context.new_page(), site.url)
    page.open_tab()
    yield page
    context.close()
    assert not page.errors


@pytest.fixture(scope="module")
def worker(site: Any, start_worker: Callable[..., Any]) -> Iterator[Any]:
    """A worker with a long name; the last test here ends it."""
    with start_worker(name=LONG_NAME) as running:
        yield running


@pytest.fixture
def network(site: Any, page: Any, worker: Any) -> Iterator[Any]:
    """The network to the worker, once the page shows all of it."""
    with network_to(int(worker.address.rpartition(":")[2])) as between:
        site.name_workers(between.address)
        page.wait_until("WWWW", "Ready", 20)
        page.card("WWWW").get_by_text("round trip").wait_for(timeout=20_000)
        yield between


def test_impatience_and_escape_do_nothing_twice_and_nothing_unasked(
    site: Any, page: Any, pairable_worker: Callable[..., Any]
) -> None:
    site.name_workers()
    pairings, forgotten = requests_to(page, "/monarch/pair"), requests_to(page, "/monarch/forget")
    field = page.panel.get_by_label("Pairing code")
    field.press("Enter")
    page.button("Pair").dblclick()
    assert not pairings, "an empty field was sent"
    field.fill("   ")
    field.press("Enter")
    page.panel.get_by_text("the code is missing").wait_for(timeout=5_000)
    page.pair(200_000 * "x")
    page.panel.get_by_text("too large").wait_for(timeout=10_000)
    with pairable_worker(LONG_NAME) as worker:
        field.fill(code_of(worker))
        pairings.clear()
        page.button("Pair").dblclick()
        page.panel.get_by_text("Paired with").wait_for(timeout=20_000)
        assert len(pairings) == 1
        assert page.panel.locator(".monarch-failed:visible").count() == 0
        page.wait_until("WWWW", "Ready", 20)

        forget, dialog = page.panel.get_by_role("button", name="Forget the worker"), page.page.get_by_role("dialog")
        forget.focus()
        page.page.keyboard.press("Enter")
        dialog.get_by_text("WWWW").first.wait_for(timeout=5_000)
        page.screenshot("forget")
        assert not dialog.evaluate(_TOO_WIDE)
        page.page.keyboard.press("Escape")
        dialog.wait_for(state="hidden", timeout=5_000)
        wait_for(lambda: "Forget the worker" in page.focused(), 2)  # the keyboard's place is kept
        forget.dblclick()
        dialog.first.wait_for(timeout=5_000)
        page.page.keyboard.press("Escape")
        dialog.wait_for(state="hidden", timeout=5_000)
        assert not forgotten
        assert page.card("WWWW").count() == 1
        forget.press("Enter")
        dialog.get_by_role("button", name="Confirm").press("Enter")
        wait_for(lambda: page.card("WWWW").count() == 0, 20)
        assert len(forgotten) == 1


def test_a_worker_that_loads_early_does_not_flicker_and_long_names_fit(
    site: Any, page: Any, worker: Any, network: Any
) -> None:
    folder = site.models_folder("diffusion_models")
    shutil.copy(folder / "flux_schnell_deep.safetensors", folder / LONG_MODEL)
    graph = render(52, steps=200, loader_node="MonarchModelLoader")
    graph["model"]["inputs"]["unet_name"] = LONG_MODEL
    # A sampler before the split one: the worker begins to load meanwhile, and is not done when the split one begins.
    graph["first"] = render(53, steps=20, sampler_node="KSampler", split=None)["sampler"]
    graph["sampler"]["inputs"]["latent_image"] = ["first", 0]
    states = states_of(page, LONG_NAME)
    network.throttle((folder / LONG_MODEL).stat().st_size / 6)
    site.queue(graph)
    page.wait_until("WWWW", "Loading", 20)
    assert not page.region("Running render").is_visible(), "it did not load early"
    page.wait_until("WWWW", "Rendering", 60)
    page.card("WWWW").get_by_text(LONG_MODEL).wait_for(timeout=5_000)
    page.screenshot("long-names")
    assert not page.clipped()
    site.interrupt()
    page.wait_until("WWWW", "Ready", 30)
    network.heal()
    # A single row, which no worker is asked for.
    site.run(render(54, cfg=1.0))
    page.region("Last renders").get_by_text("one row").wait_for(timeout=10_000)
    assert states() == ["ready", "loading", "rendering", "ready"]
    assert not [text for text in page.toasts() if "WWWW" in text]


def test_a_check_leaves_for_a_render_and_ends_with_the_worker(site: Any, page: Any, worker: Any, network: Any) -> None:
    asked = requests_to(page, "/monarch/check")
    check, doctor = page.button("Check"), page.region("Check")
    check.dblclick()
    doctor.get_by_text("Checking").wait_for(timeout=10_000)
    assert len(asked) == 1
    for _ in range(5):
        assert check.is_disabled(), "Check can be asked for while it runs"
        page.page.wait_for_timeout(100)
    entry = site.run(render(51))
    report = next(output["monarch"][-1] for output in entry["outputs"].values() if "monarch" in output)
    assert report["forwards_split"] >= 3, report["line"]
    doctor.get_by_text("a render needs the workers").wait_for(timeout=10_000)
    page.wait_until("WWWW", "Ready", 10)
    assert not [text for text in page.toasts() if "WWWW" in text]

    said = worker.output
    check.click()
    wait_for(lambda: worker.output != said, 60)
    worker.kill()
    network.close()
    doctor.get_by_text("Not ready.").wait_for(timeout=60_000)
    page.wait_until("WWWW", "Lost", 10)
    wait_for(lambda: page.has_toast("WWWW", "start the worker there"), 10)
    page.page.wait_for_timeout(500)
    page.screenshot("killed-while-checked")
    assert not page.clipped()
    assert not page.page.locator(".p-toast-message").first.evaluate(_TOO_WIDE)
    # What to do can be copied: news does not take a selection away.
    doctor.locator(".monarch-fix").first.select_text()
    selected = page.page.evaluate("() => String(getSelection())")
    news = states_of(page, LONG_NAME)
    wait_for(news, 10)
    assert page.page.evaluate("() => String(getSelection())") == selected != ""
