"""How long a step of the doctor may take."""

from __future__ import annotations

import time
from collections.abc import Callable


class Impatient(Exception):
    """Something took longer than it may; the message says how long that is."""


def within(seconds: float) -> Callable[[], None]:
    """A `check` for a wait, which raises Impatient once so much time has passed."""
    until = time.monotonic() + seconds

    def check() -> None:
        if time.monotonic() > until:
            raise Impatient(f"no result within {seconds:g} s")

    return check
