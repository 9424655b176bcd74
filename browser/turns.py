"""Who uses the workers: a render goes first, and whatever else talks to them leaves when one begins."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

# How long a render waits for others to leave; they look every few hundredths of a second.
_LEAVE_SECONDS = 3.0


class GiveWay(BaseException):
    """A render begins, or is on: whatever else uses the workers ends. A BaseException, as ComfyUI's interrupt is."""


class Turns:
    """Renders may overlap with one another; anything else has the workers for itself."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._renders = 0
        self._aside = False

    @property
    def rendering(self) -> bool:
        return self._renders > 0

    @contextlib.contextmanager
    def render(self) -> Iterator[None]:
        """Within it, a render uses the workers."""
        with self._changed:
            self._renders += 1
            self._changed.wait_for(lambda: not self._aside, _LEAVE_SECONDS)
        try:
            yield
        finally:
            with self._changed:
                self._renders -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def aside(self, patience: float = 0.0) -> Iterator[Callable[[], None]]:
        """Within it, something other than a render uses the workers; it calls what it is given often.

        That raises GiveWay once a render begins; entering does at once while there is one, and if something else does
        not leave within `patience` seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._aside or self._renders, patience) or self._renders:
                raise GiveWay
            self._aside = True
        try:
            yield self._check
        finally:
            with self._changed:
                self._aside = False
                self._changed.notify_all()

    def _check(self) -> None:
        if self._renders:
            raise GiveWay


turns = Turns()
