"""The worker's compute thread: jobs run one after the other, and the driver that asked gets what they answer."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import limits
from .codec import ProtocolError
from .messages import Kind
from .runtime import Runtime


class Stopped(Exception):
    """The driver does not want the result any more."""


def say(text: str, *, error: bool = False) -> None:
    """Print for whoever looks at the worker; nobody may be left to read it."""
    # Names come from other machines: none of them may move the cursor or change colours.
    text = "".join(character for character in text if character.isprintable() or character in "\n\t")
    stream = sys.stderr if error else sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    with contextlib.suppress(OSError, ValueError):
        # At once: print writes the end of a line by itself, and other threads get in between.
        stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
        stream.flush()


@dataclass(frozen=True)
class Job:
    session: bytes
    # Of the message that asked for it; 0: the worker itself did.
    number: int
    # None: nothing is answered.
    answer: Kind | None
    work: Callable[[], dict[str, Any]]
    # Of the message that asked for it, which stay in memory until the job is done.
    nbytes: int = 0


class Jobs:
    """Runs jobs one after the other in a thread of their own, which calls `answer` with what comes of each."""

    def __init__(self, runtime: Runtime, answer: Callable[[bytes, Kind, dict[str, Any]], None]) -> None:
        self._runtime = runtime
        self._answer = answer
        # A session's bytes among the jobs mean that none of its jobs follow.
        self._queue: queue.SimpleQueue[Job | bytes | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._running: bytes | None = None
        self._cancelled: set[bytes] = set()
        # Of the jobs that are not done yet.
        self._count = self._nbytes = 0
        self._thread = threading.Thread(target=self._run, name="monarch-compute", daemon=True)
        self._thread.start()

    def add(self, job: Job) -> None:
        """Have a job done after all others. Raises ProtocolError if too much that drivers asked for waits already."""
        with self._lock:
            full = self._count >= limits.MAX_WAITING_JOBS or self._nbytes + job.nbytes > limits.MAX_WAITING_BYTES
            if full and job.number:
                raise ProtocolError("more was asked for than can wait here")
            self._count += 1
            self._nbytes += job.nbytes
        self._queue.put(job)

    def cancel(self, session: bytes) -> None:
        """Stop the running job of `session` soon and skip its waiting ones."""
        with self._lock:
            self._cancelled.add(session)
            if self._running == session:
                self._runtime.interrupt(True)
        self._queue.put(session)

    @property
    def idle(self) -> bool:
        """Whether all jobs are done."""
        return self._count == 0

    def cancelled(self, session: bytes) -> bool:
        """Whether the jobs of `session` are to stop."""
        with self._lock:
            return session in self._cancelled

    def close(self) -> None:
        with self._lock:
            if self._running is not None:
                self._runtime.interrupt(True)
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            if isinstance(job, bytes):
                with self._lock:
                    self._cancelled.discard(job)
                continue
            self._do(job)
            with self._lock:
                self._count -= 1
                self._nbytes -= job.nbytes
            # What it was asked with may be large, and the next one may be long in coming.
            del job

    def _do(self, job: Job) -> None:
        with self._lock:
            if job.session in self._cancelled:
                return
            self._running = job.session
        kind, body = self._outcome(job)
        with self._lock:
            self._running = None
            self._runtime.interrupt(False)
            cancelled = job.session in self._cancelled
        if not cancelled and kind is not None:
            self._answer(job.session, kind, {"for": job.number, **body})

    def _outcome(self, job: Job) -> tuple[Kind | None, dict[str, Any]]:
        try:
            return job.answer, job.work()
        except BaseException as error:  # ComfyUI's interrupt is a BaseException; a job must not end the worker
            with self._lock:
                cancelled = job.session in self._cancelled
            if not cancelled and not isinstance(error, Stopped):
                say(traceback.format_exc())
            return Kind.FAILED, {"reason": f"{type(error).__name__}: {error}"[:2000]}
