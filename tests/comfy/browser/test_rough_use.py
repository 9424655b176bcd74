"""The tab in rough use: reloads, two pages, a server that restarts, odd names and codes, other languages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from monarch_split.tests.comfy.browser.page import code_of, wait_for
from monarch_split.tests.comfy.browser.site import render

pytestmark = [pytest.mark.comfyui, pytest.mark.timeout(240)]

ODD_NAME = "<img src=x onerror=document.title='broken'>-" + 60 * "W"


def test_codes_that_are_none_are_refused_with_a_sentence_and_a_wrapped_one_pairs(
    site: Any, open_page: Callable[..., Any], pairable_worker: Callable[..., Any]
) -> None:
    site.name_workers()
    page = open_page()
    page.open_tab()
    for code in ("monarch1-" + 2000 * "x", "<script>", "👋 " * 100, 5000 * "y"):
        # The sentence about the code before is still there.
        with page.page.expect_response("**/monarch/pair") as answer:
            page.pair(code)
        assert 400 <= answer.value.status < 500, code[:20]
        wait_for(lambda: page.panel.locator(".monarch-failed:visible").count() == 1, 10)
        assert not page.clipped()
    with pairable_worker() as worker:
        code = code_of(worker)
        # As it is copied from a narrow terminal.
        page.pair(f"  {code[:40]}\n  {code[40:]} \n")
        page.panel.get_by_text("Paired with second").wait_for(timeout=20_000)
        assert page.panel.locator(".monarch-failed:visible").count() == 0
        # A double click does it once.
        page.panel.get_by_role("button", name="Forget the worker second").dblclick()
        page.page.get_by_role("dialog").get_by_role("button", name="Cancel").first.click()
        assert page.card("second").count() == 1
        page.button("Free memory").dblclick()
        page.panel.get_by_text("ComfyUI unloads its models").wait_for(timeout=10_000)
    assert not page.errors


def test_a_page_that_is_reloaded_and_a_second_one_show_the_running_render(
    site: Any, open_page: Callable[..., Any], start_worker: Callable[..., Any]
) -> None:
    with start_worker(name=ODD_NAME) as worker:
        site.name_workers(worker.address)
        pages = [open_page(), open_page()]
        for page in pages:
            page.open_tab()
        site.queue(render(31, steps=200))
        for page in pages:
            page.wait_until("WWWW", "Rendering", 60)
            assert not page.clipped()
        pages[0].page.reload()
        pages[0].tab_button.wait_for(timeout=90_000)
        if not pages[0].panel.is_visible():
            pages[0].open_tab()
        pages[0].wait_until("WWWW", "Rendering", 10)
        for page in pages:
            assert page.region("Running render").get_by_role("progressbar").get_attribute("aria-valuemax") == "200"
        site.interrupt()
        for page in pages:
            page.wait_until("WWWW", "Ready", 90)
            assert page.page.title() != "broken"
            page.region("Running render").wait_for(state="hidden", timeout=5_000)
            assert not page.errors
        pages[0].screenshot("odd-name")


def test_a_page_whose_server_restarts_follows_the_new_one(
    site: Any, open_page: Callable[..., Any], start_worker: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with start_worker(name="second") as worker:
        site.name_workers(worker.address)
        page = open_page()
        page.open_tab()
        site.queue(render(32, steps=40))
        page.wait_until("second", "Rendering", 60)
        port = site.port
        monkeypatch.setattr("monarch_split.demo.comfy_server._free_port", lambda: port)
        site.stop()
        page.panel.get_by_text("ComfyUI does not answer.").wait_for(timeout=10_000)
        page.screenshot("away")
        assert not page.clipped()
        assert not page.region("Running render").is_visible()
        assert "Rendering" not in page.panel.inner_text()
        site.__enter__()
        page.wait_until("second", "Ready", 60)
        assert not page.region("Running render").is_visible()
        assert not page.panel.get_by_text("ComfyUI does not answer.").is_visible()
        site.run(render(33))
        page.region("Last renders").get_by_text("on 2 machines by rows").wait_for(timeout=20_000)


def test_another_language_fits(site: Any, open_page: Callable[..., Any], start_worker: Callable[..., Any]) -> None:
    with start_worker(name="second") as worker:
        site.name_workers(worker.address)
        site.run(render(40))
        # The one with the longest words that this front end has.
        site._request("/settings", {"Comfy.Locale": "ru"})
        try:
            page = open_page()
            page.open_tab()
            page.panel.get_by_text("second", exact=True).wait_for(timeout=20_000)
            page.screenshot("language-ru")
            assert not page.clipped()
            assert "Machines" not in page.panel.inner_text()
            assert not page.errors
        finally:
            site._request("/settings", {"Comfy.Locale": "en"})
