"""Carries the messages of a token split between GPUs, over NCCL, on a stream of its own.

The host only enqueues: it runs at most two operations ahead of the GPU, so that it is never stuck inside CUDA behind a
peer that is gone. exchange_group joins the ranks and is the engine around this.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from . import limits

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# What is used of it has no declared types.
dist: Any = torch.distributed
# (the other rank, bytes in place), in the same order on both ranks
Messages = Sequence[tuple[int, torch.Tensor]]

# How torch watches a group unless told otherwise: it ends the whole process when a peer is lost. It reads these once,
# while a group is made.
_WATCH_ONLY = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
_environment = threading.Lock()
_AHEAD = 2
_QUERY_SECONDS = 1e-4


def can_use_nccl() -> bool:
    """Whether this torch has NCCL with all that is needed of it."""
    if not dist.is_nccl_available():
        return False
    group = dist.ProcessGroupNCCL
    return all(hasattr(group, name) for name in ("_start_coalescing", "_end_coalescing", "eager_connect_single_device"))


class NcclCarrier:
    """Carries bytes on `device` between all ranks of a store. Making it blocks until all of them do."""

    def __init__(self, store: Store, rank: int, size: int, device: torch.device) -> None:
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timedelta(seconds=limits.STALL_TIMEOUT)
        with torch.cuda.device(device), _environment_of(_WATCH_ONLY):
            self._group: Any = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, options)
            # One communicator for all ranks. Made lazily, there would be one per pair, and no bound on making them.
            self._group.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
        self._device = device
        self.waiting = 0.0
        # Of what is not known to be over, when the stream began to wait and when it went on.
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._aborted = False
        try:
            self._connect(rank, size)
        except BaseException:
            self.abort()
            raise

    def _connect(self, rank: int, size: int) -> None:
        # NCCL connects two ranks when they first exchange something, and blocks the host until both are there.
        deadline = time.monotonic() + limits.GROUP_JOIN_TIMEOUT

        def check() -> None:
            if time.monotonic() > deadline:
                raise RuntimeError("the other machines do not answer over NCCL")

        byte = torch.zeros(size, dtype=torch.uint8, device=self._device)
        others = [other for other in range(size) if other != rank]
        self.start(
            [(other, byte[rank : rank + 1]) for other in others],
            [(other, byte[other : other + 1]) for other in others],
            0,
            check,
        )()
        self.finish(check)
        self.waiting = 0.0

    def start(self, sends: Messages, receives: Messages, tag: int, check: Callable[[], None]) -> Callable[[], None]:
        """Send and receive these bytes once the current stream has got here; what is returned has it wait for them.

        NCCL has no tags: messages are matched by their order.
        """
        if not sends and not receives:
            return lambda: None
        self._settle(_AHEAD - 1, check)
        with torch.cuda.device(self._device):
            # As one group, so that sends and receives cannot wait for each other.
            self._group._start_coalescing()
            try:
                for rank, piece in sends:
                    self._group.send([piece], rank, 0)
                for rank, piece in receives:
                    self._group.recv([piece], rank, 0)
            finally:
                work = self._group._end_coalescing()

        def end() -> None:
            with torch.cuda.device(self._device):
                reached, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                reached.record()
                work.wait()
                ended.record()
            self._pending.append((reached, ended))

        return end

    def finish(self, check: Callable[[], None]) -> None:
        """Wait until everything that was carried is in place."""
        self._settle(0, check)

    def _settle(self, left: int, check: Callable[[], None]) -> None:
        """Wait until all but the last `left` operations are over on the GPU."""
        while len(self._pending) > left:
            reached, ended = self._pending[0]
            next_check = time.monotonic() + limits.POLL_SECONDS
            while not ended.query():
                if time.monotonic() > next_check:
                    check()
                    next_check = time.monotonic() + limits.POLL_SECONDS
                time.sleep(_QUERY_SECONDS)
            if self._aborted:
                raise RuntimeError("it was closed meanwhile")
            self.waiting += reached.elapsed_time(ended) / 1000
            self._pending.popleft()

    def abort(self) -> None:
        """End NCCL's kernels, wherever they are; what they should have received is not there."""
        self._aborted = True
        # Before torch 2.6, what is called shutdown does the same.
        (getattr(self._group, "abort", None) or self._group._shutdown)()


@contextlib.contextmanager
def _environment_of(values: dict[str, str]) -> Iterator[None]:
    with _environment:
        before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
