"""Ends a render that cannot be split, for a user who chose that in ComfyUI's settings."""

from __future__ import annotations

from ..distributed.report import Report
from ..distributed.session import Session


class RenderStopped(RuntimeError):
    """The render cannot be split, and the user chose to stop then; the message says why and what to do."""

    # ComfyUI shows it before the name, and it would be the path of a folder.
    __module__ = "monarch"

    def __init__(self, why: list[str]) -> None:
        super().__init__(
            f"Monarch stopped this render, which cannot be split: {'; '.join(why) or 'no worker takes part'}. "
            "To render on this machine alone, set split to off, or choose so under Monarch in ComfyUI's settings."
        )


def require_split(report: Report, session: Session) -> None:
    """Raises RenderStopped if nothing was split so far and something stands against it but `auto`'s own choice."""
    if not report.forwards_split and (report.hindrances or not session.workers):
        raise RenderStopped(report.hindrances or report.events)
