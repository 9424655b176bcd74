"""A render has the workers at once; whatever else talks to them leaves, and does not come in between."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest

from monarch_split.browser.turns import GiveWay, Turns


def test_what_else_uses_the_workers_leaves_before_a_render_begins() -> None:
    turns, log = Turns(), []
    inside = threading.Event()

    def look() -> None:
        with contextlib.suppress(GiveWay), turns.aside() as check:
            inside.set()
            while True:
                check()
                time.sleep(0.005)
        log.append("left")

    thread = threading.Thread(target=look)
    thread.start()
    assert inside.wait(5)
    with turns.render():
        log.append("render")
    thread.join(5)
    assert sorted(log) == ["left", "render"]


def test_a_render_does_not_wait_long_for_what_does_not_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monarch_split.browser.turns._LEAVE_SECONDS", 0.05)
    turns = Turns()
    with turns.aside(), turns.render():
        pass


def test_nothing_else_comes_in_while_there_is_a_render() -> None:
    turns = Turns()
    with turns.render(), turns.render():
        assert turns.rendering
        with pytest.raises(GiveWay), turns.aside(patience=5):
            pass
    assert not turns.rendering
    with turns.aside():
        pass


def test_two_others_do_not_use_the_workers_at_once() -> None:
    turns = Turns()
    with turns.aside():
        with pytest.raises(GiveWay), turns.aside():
            pass
        with pytest.raises(GiveWay), turns.aside(patience=0.05):
            pass
    with turns.aside():
        pass


def test_one_that_waits_comes_in_once_the_other_has_left() -> None:
    turns = Turns()
    came = threading.Event()

    def wait() -> None:
        with turns.aside(patience=5):
            came.set()

    with turns.aside():
        thread = threading.Thread(target=wait)
        thread.start()
        assert not came.wait(0.05)
    assert came.wait(5)
    thread.join(5)
