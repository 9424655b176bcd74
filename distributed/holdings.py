"""What workers hold of this process's models, and telling them once it is not wanted here any more.

A run tells a worker when it greets it; outside runs one thread of this process greets it for that alone. The nodes say
when a model is not wanted any more.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from . import limits
from .addresses import Address
from .peer import Peer

# How long to wait before telling a worker again that was busy or did not answer; after that the next run tells it.
_PAUSES = (1.0, 5.0, 20.0)


# (address, check) -> (the worker there, warnings)
Greet = Callable[[Address, Callable[[], None]], tuple[Peer, list[str]]]


class Holdings:
    """Files, by digest, that workers were seen to hold models of."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[Address, set[str]] = {}
        self._unwanted: dict[Address, set[str]] = {}
        self._greet: dict[Address, Greet] = {}
        self._models: dict[str, weakref.WeakSet[Any]] = {}
        # Digests whose model is gone, or None to look again. Garbage collection may put one here at any moment, even in
        # a thread that holds the lock, which nothing else here is made for.
        self._news: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def note(self, address: Address, digest: str, greet: Greet) -> None:
        """A worker holds a model of this file; `greet` tells it what `take_unwanted` says, or raises PeerFailed."""
        with self._lock:
            self._held.setdefault(address, set()).add(digest)
            self._unwanted.get(address, set()).discard(digest)
            self._greet[address] = greet

    def follow(self, model: Any, digest: str) -> None:
        """Once `model`, and all others followed for the same file, are gone here, workers need not hold it either."""
        with self._lock:
            models = self._models.setdefault(digest, weakref.WeakSet())
            if model not in models:
                models.add(model)
                # At the end of this process workers keep what they hold: it will often be wanted again.
                weakref.finalize(model, self._news.put, digest).atexit = False
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="monarch-holdings", daemon=True)
                self._thread.start()

    def release(self) -> None:
        """No worker needs to hold anything for this process. Returns at once; they are told in the background."""
        with self._lock:
            for address, held in self._held.items():
                self._unwanted.setdefault(address, set()).update(held)
            self._held.clear()
        self._news.put(None)

    def take_unwanted(self, address: Address) -> set[str]:
        """What the worker at this address is to let go of; whoever asks tells it."""
        with self._lock:
            return self._unwanted.pop(address, set())

    def put_back(self, address: Address, files: set[str]) -> None:
        """The worker could not be told after all."""
        with self._lock:
            self._unwanted.setdefault(address, set()).update(files)

    # --- the thread -----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        pauses = iter(())
        while True:
            with contextlib.suppress(queue.Empty):
                news = {self._news.get(timeout=next(pauses, None))}
                # What goes together is told together.
                time.sleep(limits.FREE_GATHER_SECONDS)
                with contextlib.suppress(queue.Empty):
                    while True:
                        news.add(self._news.get_nowait())
                self._sort_out(news)
                pauses = iter(_PAUSES)
            if self._tell():
                pauses = iter(())

    def _sort_out(self, news: set[str | None]) -> None:
        with self._lock:
            for address, held in self._held.items():
                gone = {digest for digest in held if digest in news and not self._models.get(digest)}
                held -= gone
                self._unwanted.setdefault(address, set()).update(gone)
            for digest in [digest for digest, models in self._models.items() if not models]:
                del self._models[digest]

    def _tell(self) -> bool:
        """Whether every worker knows what it is to let go of."""
        with self._lock:
            addresses = [address for address, files in self._unwanted.items() if files]
        for address in addresses:
            with contextlib.suppress(Exception):  # it is tried again
                self._greet[address](address, lambda: None)[0].close(cancel=False)
        with self._lock:
            return not any(self._unwanted.values())


holdings = Holdings()
