"""Ctrl-C and its relatives while other processes are started and run: none is left behind. Standard library only."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_NUMBERS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt as Ctrl-C does; a second signal does not cut the cleaning up short."""

    def stop(number: int, frame: FrameType | None) -> None:
        for each in _NUMBERS:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in _NUMBERS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Signals that arrive within it take effect at its end.

    Around subprocess.Popen: an exception in the middle of it would leave a process that nobody knows.
    """
    if threading.current_thread() is not threading.main_thread():  # no signal handler runs there
        yield
        return
    arrived: list[int] = []
    before = {number: signal.signal(number, lambda number, frame: arrived.append(number)) for number in _NUMBERS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for number in arrived:
            signal.raise_signal(number)
