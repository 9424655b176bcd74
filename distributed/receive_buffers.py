"""Memory that large tensors arrive in, used over and over: fresh memory costs more than the copy into it.

A block comes back by itself once nobody holds the tensor that was made in it, or a view of that.
"""

from __future__ import annotations

import weakref
from collections import deque

import torch

from . import limits


class ReceiveBuffers:
    """Blocks of one channel, pinned where CUDA is in use, so that what arrived gets to the GPU without another copy.

    Tensors outlive it; blocks that come back after it is gone are freed.
    """

    def __init__(self, keep_bytes: int = limits.RECEIVE_BUFFER_BYTES) -> None:
        """keep_bytes: of blocks that nobody uses, at most."""
        self._keep_bytes = keep_bytes
        # The one that came back last is at the end.
        self._free: deque[torch.Tensor] = deque()

    def take(self, nbytes: int) -> torch.Tensor:
        """An uninitialised CPU tensor [nbytes] of uint8. Raises RuntimeError if there is no memory."""
        block = self._fitting(nbytes)
        if block is None:
            block = torch.empty(nbytes, dtype=torch.uint8, pin_memory=_on_cuda())
        # A tensor made from an array keeps that very object for as long as anything shares the tensor's memory.
        lease = block.numpy()[:nbytes]
        weakref.finalize(lease, _give_back, weakref.ref(self), block).atexit = False
        return torch.from_numpy(lease)

    def _fitting(self, nbytes: int) -> torch.Tensor | None:
        """A free block that is not much too large. Other threads may give blocks back meanwhile."""
        for _ in range(len(self._free)):
            block = self._free.pop()
            if nbytes <= block.nbytes <= 2 * nbytes:
                return block
            self._free.appendleft(block)
        return None

    def _add(self, block: torch.Tensor) -> None:
        self._free.append(block)
        while sum(held.nbytes for held in tuple(self._free)) > self._keep_bytes:
            self._free.popleft()


def _give_back(buffers: weakref.ref[ReceiveBuffers], block: torch.Tensor) -> None:
    pool = buffers()
    if pool is not None:
        pool._add(block)


def _on_cuda() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()
