"""Tells a person what a run did: one line on the node and in the log, and an event for the browser."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

from ..browser.server import prompt_server
from ..distributed.report import Report

STATUS_EVENT = "monarch.run"
# ComfyUI runs one prompt at a time, in one thread.
_followers: list[Callable[[Report], None]] = []


@contextlib.contextmanager
def followed(follower: Callable[[Report], None]) -> Iterator[None]:
    """Within it, `follower` is given the report of every run, too."""
    _followers.append(follower)
    try:
        yield
    finally:
        _followers.remove(follower)


class Notifier:
    """Takes the reports of the runs of one node. Holds no connection; a few reports at most."""

    def __init__(self, node_id: str | None) -> None:
        self.reports: list[Report] = []
        self._node_id = node_id

    def __call__(self, report: Report) -> None:
        self.reports = [*self.reports, report][-16:]
        line = report.line()
        logging.info("Monarch: %s", line)
        for follower in _followers:
            follower(report)
        server = prompt_server()
        if server is not None:
            server.send_sync(STATUS_EVENT, {"node": self._node_id, **report.as_dict()}, server.client_id)
