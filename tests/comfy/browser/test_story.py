"""A render on two machines in ComfyUI's page, from the template to the finished picture, though one machine is lost.

Runs with the front end that this ComfyUI pins and with the newest one; the test's id says which.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from monarch_split.tests.comfy.browser.page import code_of, wait_for

pytestmark = [pytest.mark.comfyui, pytest.mark.timeout(300)]


def test_pair_render_lose_the_worker_pair_again_render_and_check(
    site: Any, open_page: Callable[..., Any], pairable_worker: Callable[..., Any]
) -> None:
    page = open_page()
    page.open_tab()
    page.wait_until("this machine", "Ready", 15)
    page.region("Machines").get_by_text("No second machine yet").wait_for(timeout=5_000)

    with pairable_worker() as worker:
        page.pair(code_of(worker))
        page.panel.get_by_text("Paired with second").wait_for(timeout=20_000)
        page.wait_until("second", "Ready", 20)

        page.open_template("monarch_templates", "tiny_flux")
        page.show_node("MonarchSampler", 0.8)
        page.run()
        page.wait_until("second", "Rendering", 60)
        running = page.region("Running render")
        running.get_by_text("by rows").wait_for(timeout=20_000)
        running.get_by_text("this machine 50 %, second 50 %").wait_for(timeout=5_000)
        assert running.get_by_role("progressbar").get_attribute("aria-valuemax") == "20"
        page.screenshot("rendering")

        worker.kill()
        wait_for(lambda: page.has_toast("second is lost", "Start the worker there again"), 20)
        page.wait_until("second", "Lost", 5)
        page.screenshot("lost")
        wait_for(lambda: len(site.finished()) == 1, 60)
    (entry,) = site.finished()
    assert entry["status"]["status_str"] == "success"
    (picture,) = [output["images"][0] for output in entry["outputs"].values() if "images" in output]
    assert len(site.view(picture)) > 100
    wait_for(lambda: picture["filename"] in str(page.page.evaluate("() => window.app.nodeOutputs")), 10)
    last = page.region("Last renders").get_by_role("listitem")
    last.get_by_text("the render went on without it").wait_for(timeout=10_000)

    page.panel.get_by_role("button", name="Forget the worker second").click()
    page.page.get_by_role("dialog").get_by_role("button", name="Confirm").click()
    page.panel.get_by_text("second is forgotten").wait_for(timeout=10_000)
    wait_for(lambda: page.card("second").count() == 0, 10)

    with pairable_worker("third") as worker:
        page.pair(code_of(worker))
        page.wait_until("third", "Ready", 20)
        # ComfyUI computes an unchanged graph only once.
        site.free()
        page.run()
        wait_for(lambda: len(site.finished()) == 2, 90)
        last.first.get_by_text("third 1").wait_for(timeout=10_000)
        line = page.page.locator(".monarch-line")
        assert "on 2 machines by rows" in line.inner_text()
        page.screenshot("node", page.show_node("MonarchSampler"))
        assert line.evaluate("element => element.scrollHeight - element.clientHeight") <= 1, "the line is cut off"
        assert line.inner_text() not in str(page.page.evaluate("() => window.app.graph.serialize()"))
        page.wait_until("third", "Ready", 10)
        assert not page.has_toast("third")

        page.button("Check").click()
        doctor = page.region("Check")
        doctor.get_by_text("Ready: the next render can be split.").wait_for(timeout=120_000)
        assert doctor.get_by_role("listitem").filter(has_text="a tiny model was split by rows").count() == 1
        assert str(site.base) not in page.panel.inner_text()
        page.screenshot("checked")

        page.button("Free memory").click()
        page.panel.get_by_text("ComfyUI unloads its models").wait_for(timeout=10_000)
        wait_for(lambda: "Let go of 1 model" in worker.output, 30)
    assert not page.errors
