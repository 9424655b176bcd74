"""Tells a person what a run did: one line on the node and in the log, and an event for the browser."""

from __future__ import annotations

import logging

from ..distributed.report import Report

STATUS_EVENT = "monarch.run"


class Notifier:
    """Takes the reports of the runs of one node. Holds no connection; a few reports at most."""

    def __init__(self, node_id: str | None) -> None:
        self.reports: list[Report] = []
        self._node_id = node_id

    def __call__(self, report: Report) -> None:
        self.reports = [*self.reports, report][-16:]
        line = report.line()
        logging.info("Monarch: %s", line)
        server = _server()
        if server is None:
            return
        server.send_sync(STATUS_EVENT, {"node": self._node_id, **report.as_dict()}, server.client_id)
        if self._node_id is not None and hasattr(server, "send_progress_text"):
            server.send_progress_text(line, self._node_id)


def _server():  # type: ignore[no-untyped-def]
    """ComfyUI's server, or None where ComfyUI is used as a library."""
    try:
        from server import PromptServer
    except ImportError:
        return None
    return getattr(PromptServer, "instance", None)
