"""Looks for the workers of one run, each in a thread of its own, so that no step waits for one that is not there.

A worker that is lost is looked for again, less and less often, as long as the run lasts. Addresses that were silent are
remembered over the runs of this process. What a run does with its workers is peers' business.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from . import limits
from .addresses import Address
from .peer import Peer, PeerFailed


@dataclass(frozen=True)
class Arrival:
    """A worker that was met, with what there is to say about it; or why one cannot be."""

    address: Address
    peer: Peer | None = None
    warnings: tuple[str, ...] = ()
    problem: PeerFailed | None = None


class _RunOver(BaseException):
    """Ends what a thread waits for once its run is over."""


class Joining:
    """The workers that one run looks for.

    connect(address, check): greets the worker; gives it and warnings, or raises PeerFailed.
    prepare(peer): has a late worker build the run's model and waits until it has, or raises PeerFailed.
    Both are called in threads of this class.
    """

    def __init__(
        self,
        connect: Callable[[Address, Callable[[], None]], tuple[Peer, list[str]]],
        prepare: Callable[[Peer], None],
    ) -> None:
        self._connect = connect
        self._prepare = prepare
        # Guards all that follows.
        self._changed = threading.Condition()
        self._arrivals: deque[Arrival] = deque()
        # Addresses whose first attempt `first` waits for.
        self._awaited: list[Address] = []
        self._begun = False
        self._given_up: set[Address] = set()
        self._over = False

    def seek(self, address: Address, *, after: float = 0.0) -> None:
        """Look for a worker, beginning `after` seconds from now."""
        with self._changed:
            if not self._begun:
                self._awaited.append(address)
        # A daemon: a name that does not resolve or an address that is silent keeps it longer than its run.
        threading.Thread(target=self._seek, args=(address, after), name="monarch-join", daemon=True).start()

    def first(self, check: Callable[[], None]) -> list[Arrival]:
        """What came of everyone's first attempt. Calls `check` while it waits, and waits little for the known absent.

        Workers that are met afterwards are prepared, once `begin` was called, before `late` tells of them.
        """
        began = time.monotonic()
        with self._changed:
            patience = {address: _patience(address) for address in self._awaited}
        while True:
            with self._changed:
                waited = time.monotonic() - began
                if all(waited >= patience[address][0] for address in self._awaited):
                    arrivals, self._arrivals = list(self._arrivals), deque()
                    awaited, self._awaited = self._awaited, []
                    break
                self._changed.wait(limits.POLL_SECONDS)
            check()
        for address in awaited:
            seconds, why = patience[address]
            arrivals.append(Arrival(address, problem=PeerFailed(why)))
            if seconds:
                _note_silence(address, why)
        return arrivals

    def begin(self) -> None:
        """It is known now what workers have to build."""
        with self._changed:
            self._begun = True
            self._changed.notify_all()

    def late(self) -> list[Arrival]:
        """Workers that became ready since this was last asked, and what late ones failed of. Does not wait."""
        if not self._arrivals:
            return []
        with self._changed:
            arrivals, self._arrivals = list(self._arrivals), deque()
        return arrivals

    def give_up(self, address: Address) -> None:
        """Look for this one no more."""
        with self._changed:
            self._given_up.add(address)
            self._changed.notify_all()

    def end(self) -> None:
        """The run is over. Does not wait for threads; each lets go of its worker within a moment."""
        with self._changed:
            self._over = True
            arrivals, self._arrivals = list(self._arrivals), deque()
            self._changed.notify_all()
        for arrival in arrivals:
            if arrival.peer is not None:
                arrival.peer.close(cancel=True)

    # --- in the threads -------------------------------------------------------------------------------------------

    def _seek(self, address: Address, pause: float) -> None:
        backoff = limits.REJOIN_FIRST_SECONDS
        try:
            while self._sleep(address, pause):
                problem = self._try(address)
                if problem is None:
                    return
                pause, backoff = backoff, min(2 * backoff, limits.REJOIN_MAX_SECONDS)
                # That one is still not there is no news.
                if not self._deliver(Arrival(address, problem=problem), only_first=True) and problem.final:
                    self._deliver(Arrival(address, problem=problem))
                if problem.final:
                    return
        except _RunOver:
            pass

    def _try(self, address: Address) -> PeerFailed | None:
        """Meet a worker and leave it for the run, or say why that cannot be; `final` if trying again is no use."""
        peer: Peer | None = None
        try:
            peer, warnings = self._attempt(address)
            arrival = Arrival(address, peer, tuple(warnings))
            if self._deliver(arrival, only_first=True):
                return None
            self._wait_until_begun()
            self._prepare(peer)
            if not self._deliver(arrival):
                raise _RunOver
            return None
        except BaseException as error:
            if peer is not None:
                peer.close(cancel=True)
            if isinstance(error, PeerFailed):
                error.final = error.final or (peer is not None and not peer.lost)
                return error
            if isinstance(error, Exception):  # whatever a worker says, it must not end the render
                return PeerFailed(f"{address} cannot be used ({type(error).__name__}: {error})", final=True)
            raise

    def _check(self) -> None:
        if self._over:
            raise _RunOver

    def _sleep(self, address: Address, seconds: float) -> bool:
        """Whether to go on after so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or address in self._given_up, seconds)
            return not self._over and address not in self._given_up

    def _wait_until_begun(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._begun)
        self._check()

    def _deliver(self, arrival: Arrival, *, only_first: bool = False) -> bool:
        """Leave an arrival for the run; False if that is over, or if it was only for `first`, which has looked."""
        with self._changed:
            is_first = arrival.address in self._awaited
            if self._over or (only_first and not is_first):
                return False
            if is_first:
                self._awaited.remove(arrival.address)
            self._arrivals.append(arrival)
            self._changed.notify_all()
            return True

    def _attempt(self, address: Address) -> tuple[Peer, list[str]]:
        with _turn(address, self._check):
            began = time.monotonic()
            try:
                met = self._connect(address, self._check)
            except PeerFailed as problem:
                if time.monotonic() - began > limits.SILENT_SECONDS:
                    _note_silence(address, str(problem))
                raise
            with _lock:
                _absences.pop(address, None)
            return met


# --- what is remembered over runs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Absence:
    """An address that was silent `times` in a row, why, and until when a run does not wait for it at all."""

    why: str
    times: int
    until: float


_lock = threading.Lock()
_absences: dict[Address, _Absence] = {}
# Addresses that a thread is connecting to, perhaps for a run that is over: one attempt at a time is enough.
_trying: set[Address] = set()


def _patience(address: Address) -> tuple[float, str]:
    """Seconds that a run's start may wait for the first attempt at an address, and why not for ever."""
    with _lock:
        absence = _absences.get(address)
    if absence is None:
        return math.inf, ""
    return (limits.ABSENT_GRACE_SECONDS if time.monotonic() >= absence.until else 0.0), absence.why


def _note_silence(address: Address, why: str) -> None:
    with _lock:
        times = _absences[address].times + 1 if address in _absences else 1
        # The first run after one that found it silent still waits a moment; later ones do so less and less often.
        pause = min(4.0 ** (times - 1) - 1, limits.ABSENT_MAX_SECONDS)
        _absences[address] = _Absence(why, times, time.monotonic() + pause)


@contextlib.contextmanager
def _turn(address: Address, check: Callable[[], None]) -> Iterator[None]:
    """Within it, no other thread connects to this address. Calls `check` while it waits for that."""
    while True:
        with _lock:
            if address not in _trying:
                _trying.add(address)
                break
        check()
        time.sleep(limits.POLL_SECONDS)
    try:
        yield
    finally:
        with _lock:
            _trying.discard(address)
