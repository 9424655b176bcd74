"""The swap of tokens between the ranks of a token split: what every engine does, and how a new one is tried.

Every rank holds the same token-major buffers [tokens, …] and fills in its own regions; an exchange fills in the rest.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from . import limits
from .layout import Span
from .outputs import synchronize

_AGREE_BYTES = 32

DISAGREEMENT = "the machines see different sizes in the same forward; check that their files are the same"


class ExchangeFailed(Exception):
    """The ranks cannot go on together; the message says why. The forward has to be computed by one machine."""


class Exchange(ABC):
    """What a token split needs of the link between its ranks. Every wait calls `check`, which may raise to end it.

    waiting: seconds in all; sent_bytes, received_bytes: of this rank.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.check: Callable[[], None] = lambda: None
        self.waiting = 0.0
        self.sent_bytes = 0
        self.received_bytes = 0

    @abstractmethod
    def begin(self, forward: int) -> None:
        """Start forward number `forward`, the same on every rank; whatever is left of earlier ones is forgotten."""

    def agree(self, plan: str) -> None:
        """Make sure that every rank has the same `plan`. Raises ExchangeFailed otherwise."""
        digest = hashlib.blake2b(plan.encode(), digest_size=_AGREE_BYTES).digest()
        own = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        table = torch.zeros(self.size, _AGREE_BYTES, dtype=torch.uint8)
        table[self.rank] = own
        self.all_gather([table], [[(rank, rank + 1)] for rank in range(self.size)])
        if not torch.equal(table, own.expand_as(table)):
            raise ExchangeFailed(DISAGREEMENT)

    def all_gather(self, buffers: Sequence[torch.Tensor], regions: Sequence[Sequence[Span]]) -> None:
        """Fill in the regions of all ranks, everywhere.

        buffers: [tokens, …], contiguous; regions[r]: what rank r has filled in before, [start, stop) in tokens.
        """
        self.start(buffers, regions)()

    def start(self, buffers: Sequence[torch.Tensor], regions: Sequence[Sequence[Span]]) -> Callable[[], None]:
        """Begin an all_gather; what is returned ends it. Nothing else may be exchanged meanwhile.

        Each rank may have its regions in places of its own, as long as their sizes and their order are the same.
        """
        others = [rank for rank in range(self.size) if rank != self.rank]
        return self._start(buffers, regions, others, others)

    def gather(self, buffers: Sequence[torch.Tensor], regions: Sequence[Sequence[Span]]) -> None:
        """The same, but only rank 0 gets the other ranks' regions, and they are in place when it returns.

        The others' buffers must not be written after it.
        """
        if self.rank == 0:
            self._start(buffers, regions, [], list(range(1, self.size)))()
        else:
            self._start(buffers, regions, [0], [])()
        # What comes after may wait for the GPU in ways that look at no `check`.
        self.settle()

    @abstractmethod
    def settle(self) -> None:
        """Wait until everything that was exchanged is in place, on a GPU too."""

    @abstractmethod
    def close(self) -> None:
        """Release sockets and memory."""

    @abstractmethod
    def _start(
        self, buffers: Sequence[torch.Tensor], regions: Sequence[Sequence[Span]], to: list[int], of: list[int]
    ) -> Callable[[], None]:
        """Begin to send this rank's regions to the ranks `to` and to receive those of the ranks `of`."""


def probe(exchange: Exchange, device: torch.device) -> tuple[float, float]:
    """Try a new exchange of tensors on `device`; every rank does so at once.

    Returns (seconds of a tiny operation, bytes per second that come in while as many go out).
    """
    exchange.begin(0)

    def operation(size: int, content: int = 0) -> tuple[float, int]:
        """(seconds of an operation of `size` bytes, the largest byte that any rank put in)"""
        buffer = torch.zeros(exchange.size, size, dtype=torch.uint8, device=device)
        buffer[exchange.rank] = content
        synchronize(buffer)
        began = time.perf_counter()
        exchange.all_gather([buffer], [[(rank, rank + 1)] for rank in range(exchange.size)])
        exchange.settle()
        synchronize(buffer)
        return time.perf_counter() - began, int(buffer.max())

    def several(count: int, size: int) -> float:
        """Seconds of such an operation."""
        taken = [operation(size)[0] for _ in range(count)]
        # Far ranks wait for each other in every other operation only: two in a row are what two of a forward take.
        return min(map(sum, itertools.pairwise(taken))) / 2

    trip, size = several(3, 1), limits.EXCHANGE_FIRST_PROBE_BYTES
    best = several(2, size)
    # Over a slow link that says enough, and more would take long; all ranks have to see it alike.
    if operation(1, int(best > limits.EXCHANGE_PROBE_SECONDS))[1] == 0:
        size = limits.EXCHANGE_PROBE_BYTES
        best = several(4, size)
    # Over the fastest links, enqueueing takes as long as the bytes do.
    return trip, size * (exchange.size - 1) / max(best - trip, best / 2)
