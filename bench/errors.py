"""Why a measurement cannot be made."""

from __future__ import annotations


class BenchError(Exception):
    """Ends the measurement with a sentence for the user: the thing, the cause, the next step."""

    def __init__(self, message: str, *, usage: bool = False) -> None:
        super().__init__(message)
        self.usage = usage
