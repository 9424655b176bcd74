"""Conditionings computed side by side: a branch of ComfyUI's own code for each peer that takes some of them.

Which peer takes which is session's business; how branches take turns is branches'.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .branches import Branch
from .peer import Peer


class PeerBranch:
    """The conditionings of one peer, computed by ComfyUI's code in a branch whose forwards go to that peer."""

    def __init__(self, owner: Conditionings, peer: Peer, calls: Sequence[Callable[[], Any]]) -> None:
        self.peer = peer
        self.conditionings = len(calls)
        self.remote = 0
        self.seconds = 0.0
        self._owner = owner
        self._branch = Branch(lambda _: [call() for call in calls])

    def park(self, ticket: int) -> None:
        self._branch.park(ticket)

    def advance(self) -> None:
        """Let it go on until it waits for its peer again or is done."""
        self._owner.branch = self
        try:
            self._branch.advance()
        finally:
            self._owner.branch = None

    def advance_if_arrived(self) -> None:
        ticket = self._branch.waiting_for
        if ticket is not None and self.peer.arrived(ticket):
            self.advance()

    def finish(self) -> list[Any]:
        while not self._branch.done:
            self.advance()
        return self._branch.result()

    def abandon(self) -> None:
        self._owner.branch = self
        self._branch.abandon()
        self._owner.branch = None


class Conditionings:
    """Where a run stands with conditionings that are computed side by side."""

    def __init__(self) -> None:
        # Conditionings reach this run in forwards of their own, so even a single row can go elsewhere.
        self.apart = False
        # Set while forwards belong to conditionings that are shared out as a whole.
        self.underway = False
        self.branch: PeerBranch | None = None
        self._branches: list[PeerBranch] = []

    @contextlib.contextmanager
    def open(self, nodes: list[tuple[Peer, Sequence[Callable[[], Any]]]]) -> Iterator[list[PeerBranch]]:
        self.underway = True
        try:
            for peer, calls in nodes:
                self._branches.append(PeerBranch(self, peer, calls))
                self._branches[-1].advance()
            yield self._branches
        finally:
            self.abandon()

    def all_here(self, stock: Callable[[], Any]) -> Any:
        self.underway = True
        try:
            return stock()
        finally:
            self.underway = False

    def advance_arrived(self) -> None:
        for branch in self._branches:
            branch.advance_if_arrived()

    def abandon(self) -> None:
        for branch in self._branches:
            branch.abandon()
        self._branches = []
        self.underway = False
