"""Looks after the workers, gently, while somebody has the tab open and nothing renders.

Every few seconds it sees whether they can be reached, which they hardly notice; less often it greets them, to know
their memory and models. A render never waits for that longer than a moment.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from ..distributed import peers
from ..distributed.addresses import Address
from ..distributed.auth import AuthError, Pairings, known_worker
from ..distributed.cluster import Cluster, ConfigurationError
from ..distributed.doctor.network import Unreachable, find_way
from ..distributed.link_rate import LinkRate, measure_link
from ..distributed.peer import Peer, PeerFailed
from ..distributed.versions import Versions
from .board import READY, REFUSED, UNPAIRED, UNREACHABLE, board
from .server import pages
from .settings import chosen_cluster, settings_of
from .turns import GiveWay, turns

_LOOK_SECONDS = 4.0
_GREET_SECONDS = 20.0


class Watch:
    """A thread that lives as long as a page shows the tab."""

    def __init__(self, versions: Callable[[], Versions], model_name: Callable[[str], str]) -> None:
        """model_name: what a file is called here, by the beginning of its digest."""
        self._versions = versions
        self._model_name = model_name
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._greeted: dict[Address, float] = {}
        # By worker process: its link is measured once.
        self._links: dict[str, LinkRate] = {}

    def look_now(self) -> None:
        """Look at all workers anew, if a page shows the tab. Returns at once."""
        with self._lock:
            self._greeted.clear()
            self._wake.set()
            if self._thread is None and pages.attended() is not None:
                self._thread = threading.Thread(target=self._serve, name="monarch-watch", daemon=True)
                self._thread.start()

    def _serve(self) -> None:
        while True:
            self._wake.clear()
            with self._lock:
                user = pages.attended()
                if user is None:
                    self._thread = None
                    return
            try:
                if not turns.rendering:
                    self._look(chosen_cluster(settings_of(user).cluster))
            except ConfigurationError:
                board.keep(())  # the doctor and the next render say why
                board.publish()
            except GiveWay:
                pass
            self._wake.wait(_LOOK_SECONDS)

    def _look(self, cluster: Cluster) -> None:
        board.keep([str(address) for address in dict.fromkeys(cluster.workers)])
        board.publish()
        for address in dict.fromkeys(cluster.workers):
            if turns.rendering:
                return
            self._look_at(address, cluster)

    def _look_at(self, address: Address, cluster: Cluster) -> None:
        obstacle = _obstacle(address)
        if obstacle:
            self._greeted.pop(address, None)
            self._saw(address, UNREACHABLE, detail=obstacle)
            return
        try:
            known_worker(address)
        except AuthError as error:
            self._saw(address, UNPAIRED, detail=str(error))
            return
        if time.monotonic() < self._greeted.get(address, 0.0) + _GREET_SECONDS:
            return
        with turns.aside() as check:
            try:
                peer, warnings = peers.greet(
                    address, check, self._versions(), allow_mismatch=cluster.allow_version_mismatch
                )
                try:
                    self._saw(address, READY, detail="; ".join(warnings), **self._described(peer))
                    self._measure(address, peer)
                finally:
                    peer.close(cancel=False)
            except PeerFailed as error:
                if error.final or error.worker_id:
                    self._saw(address, REFUSED, detail=str(error))
                else:
                    # It may have ended meanwhile; then there is a better reason, with the next step.
                    self._saw(address, UNREACHABLE, detail=_obstacle(address) or str(error))
        self._greeted[address] = time.monotonic()

    def _measure(self, address: Address, peer: Peer) -> None:
        if peer.worker_id not in self._links:
            link = self._links[peer.worker_id] = measure_link(peer)
            self._saw(address, READY, rtt=link.rtt, rate=link.rate)

    def _described(self, peer: Peer) -> dict[str, Any]:
        said = peer.device
        link = self._links.get(peer.worker_id)
        total, free = (int(said.get(key) or 0) for key in ("total_bytes", "free_bytes"))
        return {
            "name": peer.name,
            "device": said.get("device", ""),
            "memory": (max(0, total - free), total) if total else None,
            "models": tuple(self._model_name(digest) for digest in said.get("holds", "").split()),
            "rtt": link.rtt if link else None,
            "rate": link.rate if link else None,
        }

    @staticmethod
    def _saw(address: Address, state: str, **changes: Any) -> None:
        try:
            paired = Pairings.load().worker_at(address)
        except AuthError:
            paired = None
        board.seen(str(address), state, paired=paired.name if paired else None, **changes)


def _obstacle(address: Address) -> str:
    """Why a worker cannot be reached, and what to do; empty if it can."""
    try:
        find_way(address)
    except Unreachable as problem:
        return f"{problem}; {problem.fix}"
    return ""
