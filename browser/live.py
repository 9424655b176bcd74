"""Follows one run while it goes on, and puts what the tab shows of it on the board."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from .board import LOADING, LOST, READY, RENDERING, UNREACHABLE, board
from .server import prompt_server

if TYPE_CHECKING:
    from ..distributed.addresses import Address
    from ..distributed.peer import Peer
    from ..distributed.report import Report

_INTERVAL = 0.25


class _Run(Protocol):
    @property
    def workers(self) -> tuple[Peer, ...]: ...


class LiveRun:
    """A run on the board, from when this is made until `end`. `session` tells which workers take part."""

    def __init__(self, report: Report, session: _Run, workers: Sequence[Address]) -> None:
        self._report = report
        self._session = session
        self._addresses = [str(address) for address in dict.fromkeys(workers)]
        self._client: str | None = getattr(prompt_server(), "client_id", None)
        self._lock = threading.Lock()
        self._looked_at = 0.0
        self._step = self._first_step = 0
        self._first_step_at: float | None = None
        self._taking_part: dict[str, str] = {}
        self._model = ""
        board.keep(self._addresses)

    def uses(self, model: str) -> None:
        """The name of the model's file, once it is known."""
        self._model = model

    def step(self, done: int) -> None:
        """So many of the steps are done."""
        self._step = done
        if self._first_step_at is None:
            self._first_step_at = time.monotonic()
            self._first_step = done
        self.look()

    def look(self, *, at_once: bool = False) -> None:
        """See how it goes, `at_once` or if that was not just done; called often, from any thread."""
        if not at_once and time.monotonic() < self._looked_at + _INTERVAL:
            return
        if not self._lock.acquire(blocking=at_once):
            return
        try:
            self._looked_at = time.monotonic()
            self._look_at_workers()
            board.run_goes_on(self._described_now())
        finally:
            self._lock.release()

    def end(self, *, remember: bool) -> None:
        """The run is over, and its session closed; who took part then is known from the last look.

        remember: it ran to its end, or was stopped because it could not be split.
        """
        report = self._report
        with self._lock:
            alone = remember and not report.forwards_split
            for address in self._addresses:
                if address in self._taking_part:
                    board.seen(address, READY, client=self._client)
                elif board.node(address).state in (READY, LOADING, RENDERING):
                    why = _about(report, address, board.node(address).name)
                    # A worker of which nothing was reported was not asked for.
                    state = UNREACHABLE if why else READY
                    board.seen(address, state, client=self._client, quiet=alone, detail=why)
        if report.forwards_split:
            board.was_split()
        elif alone and report.steps:
            board.fell_back("; ".join(report.reasons + report.events) or "there was nothing to split", self._client)
        board.run_ended({**self._described(), "line": report.line()} if remember else None)

    def _look_at_workers(self) -> None:
        taking_part = {peer.address: peer for peer in self._session.workers}
        for address, name in self._taking_part.items():
            if address not in taking_part:
                board.seen(address, LOST, client=self._client, detail=_about(self._report, address, name))
        for address, peer in taking_part.items():
            held = board.node(address).models
            changes: dict[str, Any] = {"name": peer.name, "device": peer.device.get("device", "")}
            if peer.ready and self._model not in held:
                changes["models"] = (*held, self._model)
            board.seen(address, RENDERING if peer.ready else LOADING, client=self._client, **changes)
        self._taking_part = {address: peer.name for address, peer in taking_part.items()}

    def _described_now(self) -> dict[str, Any]:
        """As it goes at the moment: the report goes on to count what a lost worker did."""
        described = self._described()
        return described if self._taking_part else {**described, "split": None, "shares": {}}

    def _described(self) -> dict[str, Any]:
        report = self._report
        pace = report.seconds_per_step if report.seconds else self._pace()
        shares = report.tokens or {node: rows / sum(report.rows.values()) for node, rows in report.rows.items()}
        return {
            "split": report.split,
            "shares": shares,
            "step": self._step,
            "steps": report.steps,
            "seconds_per_step": pace,
            "waiting": report.waiting,
            "speedup": report.speedup,
            "predicted": report.predicted,
        }

    def _pace(self) -> float | None:
        """Seconds per step since the first one was done."""
        if self._first_step_at is None or self._step <= self._first_step:
            return None
        return (time.monotonic() - self._first_step_at) / (self._step - self._first_step)


def _about(report: Report, address: str, name: str) -> str:
    """What was last reported about a worker."""
    return next((event for event in reversed(report.events) if name in event or address in event), "")
