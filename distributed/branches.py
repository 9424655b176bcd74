"""Two forwards at once from one sampler: a branch runs ComfyUI's own code for the remote one, in strict turns.

Only one of the threads runs at any time, so models and devices are never used from two threads at once.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any

import torch


class _Abandoned(BaseException):
    """Unwinds a branch whose caller gave up."""


class Branch:
    """Runs `work` in a thread that only moves while `advance` is being called.

    Inside `work`, `park` hands the turn back until the next `advance`.
    """

    def __init__(self, work: Callable[[Branch], Any]) -> None:
        self._work = work
        self._turn = threading.Semaphore(0)
        self._back = threading.Semaphore(0)
        self._abandoned = False
        self._result: Any = None
        self._error: BaseException | None = None
        self.done = False
        # What a forward waits for while parked; the owner looks at it before the next advance.
        self.waiting_for: Any = None
        self._inference = torch.is_inference_mode_enabled()
        self._grad = torch.is_grad_enabled()
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._stream = torch.cuda.current_stream() if self._device is not None else None
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=lambda: context.run(self._run), name="monarch-branch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._turn.acquire()
        try:
            if not self._abandoned:
                self._result = self._in_torch_state()
        except BaseException as error:  # handed to the caller's thread, which raises it
            self._error = error
        finally:
            self.done = True
            self._back.release()

    def _in_torch_state(self) -> Any:
        # Inference mode, device and stream belong to a thread; take over those of the caller.
        with torch.inference_mode(self._inference), torch.set_grad_enabled(self._grad):
            if self._device is None:
                return self._work(self)
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                return self._work(self)

    def park(self, waiting_for: Any) -> None:
        """Hand the turn back until the owner advances again. Called from inside `work`."""
        self.waiting_for = waiting_for
        self._back.release()
        self._turn.acquire()
        self.waiting_for = None
        if self._abandoned:
            raise _Abandoned

    def advance(self) -> None:
        """Let the branch run until it parks or ends."""
        if not self.done:
            self._turn.release()
            self._back.acquire()

    def result(self) -> Any:
        """What `work` returned; raises what it raised. Only once it is done."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result

    def abandon(self) -> None:
        """Unwind a branch that is not needed any more."""
        self._abandoned = True
        while not self.done:
            self.advance()
        self._thread.join()
