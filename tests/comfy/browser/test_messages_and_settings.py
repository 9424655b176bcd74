"""Messages in the page, and what the settings of ComfyUI's dialog do to renders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from monarch_split.tests.comfy.browser.page import wait_for
from monarch_split.tests.comfy.browser.site import render

pytestmark = [pytest.mark.comfyui, pytest.mark.timeout(240)]

NOTHING_THERE = "127.0.0.1:9"


@pytest.fixture
def page(site: Any, open_page: Callable[..., Any]) -> Any:
    """A page whose user has chosen nothing yet."""
    page = open_page()
    page.choose("Monarch.WhenNotSplit", "run")
    page.choose("Monarch.Cluster", "monarch.toml")
    page.choose("Monarch.Messages", True)
    return page


def test_a_render_on_one_machine_is_told_once_with_cause_and_next_step(site: Any, page: Any) -> None:
    site.name_workers(NOTHING_THERE)
    for seed in (1, 2):
        site.run({**render(seed)})
    wait_for(lambda: page.has_toast("rendered on one machine", "nothing listens", "start the worker"), 10)
    page.screenshot("one-machine")
    assert len(page.toasts()) == 1


def test_a_worker_that_is_lost_and_comes_back_is_told_and_shown_at_once(
    site: Any, page: Any, start_worker: Callable[..., Any]
) -> None:
    page.open_tab()
    running = page.region("Running render")
    with start_worker(name="second") as worker:
        site.name_workers(worker.address)
        site.queue(render(7, steps=1000))
        running.get_by_text("this machine 50 %, second 50 %").wait_for(timeout=60_000)
        running.get_by_text("predicted)").wait_for(timeout=30_000)
        worker.kill()
        wait_for(lambda: page.has_toast("second is lost", "Start the worker there again"), 20)
        running.get_by_text("one machine now").wait_for(timeout=10_000)
        assert not running.get_by_text("50 %").is_visible(), "what is shown is over"
    with start_worker(name="second", port=int(worker.address.rpartition(":")[2])):
        wait_for(lambda: page.has_toast("second is back", "It takes part again"), 60)
        running.get_by_text("by rows").wait_for(timeout=30_000)
        site.interrupt()
        page.wait_until("second", "Ready", 30)
        assert len(page.toasts()) <= 2


def test_no_messages_for_who_wants_none(site: Any, page: Any, start_worker: Callable[..., Any]) -> None:
    page.choose("Monarch.Messages", False)
    page.open_tab()
    with start_worker(name="second") as worker:
        site.name_workers(worker.address)
        site.run(render(3))
        worker.kill()
        site.run(render(4))
    page.region("Last renders").get_by_role("listitem").first.get_by_text("one machine").first.wait_for(timeout=10_000)
    assert not page.toasts()


def test_a_render_that_cannot_be_split_stops_if_the_user_chose_that(site: Any, page: Any) -> None:
    site.name_workers(NOTHING_THERE)
    page.choose("Monarch.WhenNotSplit", "stop")
    before = len(site.finished())
    page.open_template("monarch_templates", "tiny_flux")
    page.run()
    wait_for(lambda: len(site.finished()) > before, 30)
    page.page.get_by_text("View details").first.click()
    wait_for(lambda: "Monarch stopped this render" in page.page.locator("body").inner_text(), 10)
    page.screenshot("stopped")
    said = page.page.locator("body").inner_text()
    assert "nothing listens at 127.0.0.1:9" in said
    assert site.finished()[-1]["status"]["status_str"] == "error"


def test_what_cannot_be_reproduced_stops_the_render_after_its_first_step(
    site: Any, page: Any, start_worker: Callable[..., Any]
) -> None:
    from monarch_split.demo.comfy_server import ComfyError

    page.choose("Monarch.WhenNotSplit", "stop")
    with start_worker(name="second") as worker:
        site.name_workers(worker.address)
        site.run(render(5))
        # A single row, and rows are asked for.
        with pytest.raises(ComfyError, match="one row"):
            site.run(render(6, cfg=1.0, step_log="stopped.jsonl"))
    steps = site.output / "stopped.jsonl"
    assert not steps.exists() or len(steps.read_text().splitlines()) == 1


def test_a_node_says_nothing_of_an_earlier_run_when_it_is_not_split(
    site: Any, page: Any, start_worker: Callable[..., Any]
) -> None:
    with start_worker(name="second") as worker:
        site.name_workers(worker.address)
        page.open_template("monarch_templates", "tiny_flux")
        page.show_node("MonarchSampler", 0.8)
        page.set_widget("MonarchSampler", "steps", 4)
        page.run()
        line = page.page.locator(".monarch-line")
        wait_for(lambda: line.count() and line.inner_text(), 60)
        before = len(site.finished())
        page.set_widget("MonarchSampler", "split", "off")
        page.run()
        wait_for(lambda: len(site.finished()) > before, 30)
        wait_for(lambda: not line.inner_text(), 5)


def test_the_cluster_of_the_settings_is_used(site: Any, page: Any, start_worker: Callable[..., Any]) -> None:
    with start_worker(name="second") as worker:
        site.name_workers(NOTHING_THERE, other=[worker.address])
        page.choose("Monarch.Cluster", "other")
        entry = site.run(render(7))
        report = next(output["monarch"][-1] for output in entry["outputs"].values() if "monarch" in output)
        assert report["forwards_split"] >= 3, report["line"]
    page.choose("Monarch.Cluster", "gone")
    entry = site.run(render(8))
    report = next(output["monarch"][-1] for output in entry["outputs"].values() if "monarch" in output)
    assert "ComfyUI's settings name the cluster 'gone'" in report["line"]
    assert "default, other" in report["line"]


def test_the_settings_dialog_shows_them_with_the_clusters_there_are(
    site: Any, page: Any, open_page: Callable[..., Any]
) -> None:
    site.name_workers(NOTHING_THERE, other=[NOTHING_THERE])
    page = open_page()  # which knows these clusters
    page.page.evaluate("() => window.app.extensionManager.command.execute('Comfy.ShowSettingsDialog')")
    dialog = page.page.get_by_role("dialog")
    dialog.get_by_text("Monarch", exact=True).first.click()
    for text in ("Cluster", "When a render cannot be split", "Show messages", "monarch.toml", "Run it here"):
        dialog.get_by_text(text, exact=True).first.wait_for(timeout=5_000)
    page.screenshot("settings")
    dialog.get_by_text("monarch.toml", exact=True).click()
    page.page.get_by_role("option", name="other", exact=True).click()
    wait_for(lambda: site._request("/settings/Monarch.Cluster") == "other", 5)
    page.choose("Monarch.Cluster", "monarch.toml")
