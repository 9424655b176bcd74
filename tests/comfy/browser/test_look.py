"""How the tab looks and is used: nothing overlaps or is cut off, in both themes; keyboard and screen reader suffice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from monarch_split.tests.comfy.browser.page import code_of, wait_for
from monarch_split.tests.comfy.browser.site import render

pytestmark = [pytest.mark.comfyui, pytest.mark.timeout(240)]

SIZES = [(1280, 720), (1920, 1080)]
# What WCAG asks of text of this size.
LEAST_CONTRAST = 4.5


@pytest.fixture(scope="module")
def rendered(site: Any, browser: Any, start_worker: Callable[..., Any]) -> Iterator[Any]:
    """A page with the tab after a render on two machines, whose size and theme change while it is open."""
    from monarch_split.tests.comfy.browser.page import ComfyPage

    with start_worker(name="a-worker-with-a-rather-long-name.example.internal") as worker:
        site.name_workers(worker.address)
        site.run(render())
        context = browser.new_context()
        page = ComfyPage(context.new_page(), site.url)
        page.open_tab()
        page.card("a-worker").get_by_text("round trip").wait_for(timeout=20_000)
        yield page
        context.close()


@pytest.mark.parametrize("theme", ["dark", "light"])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_nothing_is_cut_off_or_lies_over_something_else(rendered: Any, theme: str, width: int, height: int) -> None:
    page = rendered
    page.page.set_viewport_size({"width": width, "height": height})
    page.use_theme(theme)
    page.screenshot(f"tab-{theme}-{width}x{height}")
    assert not page.clipped()
    low = {text: ratio for text, ratio in page.contrasts().items() if ratio < LEAST_CONTRAST}
    assert not low
    assert not page.errors


def test_findings_of_the_doctor_have_the_fix_beside_them(site: Any, open_page: Callable[..., Any]) -> None:
    site.name_workers("127.0.0.1:9")
    page = open_page()
    page.open_tab()
    page.wait_until("127.0.0.1:9", "Not reachable", 15)
    page.button("Check").focus()
    page.page.keyboard.press("Enter")
    doctor = page.region("Check")
    doctor.get_by_text("Not ready.").wait_for(timeout=90_000)
    failed = doctor.get_by_role("listitem").filter(has_text="reach 127.0.0.1:9")
    assert "fail" in failed.inner_text()
    assert "What to do: start the worker there" in failed.inner_text()
    page.screenshot("doctor")
    assert not page.clipped()


def test_the_keyboard_reaches_everything_in_order_and_pairs(
    site: Any, open_page: Callable[..., Any], pairable_worker: Callable[..., Any]
) -> None:
    site.name_workers()
    page = open_page()
    page.open_tab()
    page.wait_until("this machine", "Ready", 15)
    page.button("Check").focus()
    reached = [page.focused()]
    for _ in range(3):
        page.page.keyboard.press("Tab")
        reached.append(page.focused())
    assert reached == ["Check", "Free memory", "Pairing code", "Pair"]
    with pairable_worker() as worker:
        page.panel.get_by_label("Pairing code").focus()
        page.page.keyboard.insert_text(code_of(worker))
        page.page.keyboard.press("Enter")
        status = page.panel.get_by_role("status").first
        wait_for(lambda: "Paired with second" in status.inner_text(), 20)
        page.wait_until("second", "Ready", 20)
    page.wait_until("second", "Lost", 20)
    page.panel.get_by_role("button", name="Forget the worker second").focus()
    page.page.keyboard.press("Enter")
    page.page.get_by_role("dialog").get_by_role("button", name="Confirm").press("Enter")
    wait_for(lambda: page.card("second").count() == 0, 20)


def test_a_worker_that_is_not_paired_is_shown_as_that(
    site: Any, open_page: Callable[..., Any], start_worker: Callable[..., Any]
) -> None:
    from monarch_split.distributed.addresses import local_addresses

    # One on the loopback is taken for this user's own.
    address = next((text for _, text in local_addresses() if ":" not in text), None)
    if address is None:
        pytest.skip("this machine has no address in any network")
    with start_worker(runtime="reference", launcher=(), arguments=["--listen", address]) as worker:
        site.name_workers(worker.address)
        page = open_page()
        page.open_tab()
        page.wait_until(worker.address, "Not paired", 20)
        page.card(worker.address).get_by_text("this machine is not paired with the worker").wait_for(timeout=5_000)
        assert not page.clipped()


def test_a_wrong_code_is_answered_with_what_to_do(site: Any, open_page: Callable[..., Any]) -> None:
    site.name_workers()
    page = open_page()
    page.open_tab()
    page.pair("monarch1-abc")
    page.panel.get_by_text("copy all of the line that begins with monarch1-").wait_for(timeout=10_000)
    assert not page.clipped()
