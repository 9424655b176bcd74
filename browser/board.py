"""What the tab shows: the nodes and their state, the running render, the last ones, what the doctor found.

Whoever finds something out puts it here; pages are sent the whole of it, which is small, whenever it changed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from . import own
from .paths import without_folders
from .server import pages, send
from .settings import cluster_names, settings_of

STATE_EVENT, MESSAGE_EVENT = "monarch.state", "monarch.message"
# States of a node.
SEEKING, READY, LOADING, RENDERING = "seeking", "ready", "loading", "rendering"
LOST, UNREACHABLE, UNPAIRED, REFUSED = "lost", "unreachable", "unpaired", "refused"
_WELL = (READY, LOADING, RENDERING)
_REMEMBERED_RUNS = 8


@dataclass(frozen=True)
class Node:
    """A worker as it was last seen. memory: bytes (used, total). rtt: seconds. rate: bytes per second.

    detail: why it is in this state, and what to do. paired: its name among the pairings, by which it can be forgotten.
    """

    id: str
    name: str
    state: str = SEEKING
    detail: str = ""
    device: str = ""
    memory: tuple[int, int] | None = None
    models: tuple[str, ...] = ()
    rtt: float | None = None
    rate: float | None = None
    paired: str | None = None


@dataclass
class Findings:
    """What the doctor found: checks as `monarch doctor --json` gives them. problem: why there are none.

    at: when it was done, in seconds since 1970.
    """

    running: bool = False
    problem: str = ""
    checks: list[dict[str, Any]] = field(default_factory=list)
    at: float | None = None


class Board:
    """One per process; may be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nodes: dict[str, Node] = {}
        self._run: dict[str, Any] | None = None
        self._runs: deque[dict[str, Any]] = deque(maxlen=_REMEMBERED_RUNS)
        self._findings = Findings()
        self._told: str | None = None

    # --- what was found out ---------------------------------------------------------------------------------------

    def keep(self, workers: Collection[str]) -> None:
        """These are the workers there are now, by address."""
        with self._lock:
            self._nodes = {address: self._nodes.get(address, Node(address, address)) for address in workers}

    def node(self, address: str) -> Node:
        with self._lock:
            return self._nodes.get(address, Node(address, address))

    def seen(self, address: str, state: str, *, client: str | None = None, quiet: bool = False, **changes: Any) -> None:
        """A worker is in this state; `changes` are other fields of its Node. A loss and a return are told.

        client: whose page shows that; None for all. quiet: it will be told of something else that says so, too.
        """
        with self._lock:
            before = self._nodes.get(address, Node(address, address))
            if state == UNREACHABLE and (before.state in _WELL or before.state == LOST):
                state = LOST
            after = replace(before, state=state, **{"detail": "", **changes})
            self._nodes[address] = after
        if after == before:
            return
        if not quiet and before.state in _WELL and state == LOST:
            self.tell("lost", client, name=after.name, detail=after.detail, rendering=self._run is not None)
        elif not quiet and before.state == LOST and state in _WELL:
            self.tell("back", client, name=after.name)
        self.publish()

    def run_goes_on(self, run: dict[str, Any]) -> None:
        with self._lock:
            self._run = run
        self.publish()

    def run_ended(self, run: dict[str, Any] | None) -> None:
        """There is no running render any more; `run` is remembered as the last one."""
        with self._lock:
            self._run = None
            if run is not None:
                self._runs.appendleft({"at": time.time(), **run})
        self.publish()

    def fell_back(self, why: str, client: str | None) -> None:
        """A render ran on this machine alone. Told once, until a render is split again or there is another reason."""
        with self._lock:
            known, self._told = self._told, why
        if known != why:
            self.tell("alone", client, detail=why)

    def was_split(self) -> None:
        with self._lock:
            self._told = None

    def found(self, findings: Findings, *, quiet: bool = False) -> None:
        """quiet: do not publish it yet; then it returns at once."""
        with self._lock:
            self._findings = findings if findings.running else replace(findings, at=time.time())
        if not quiet:
            self.publish()

    # --- what pages are sent --------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """All that the tab shows, as plain data without folders of this machine."""
        with self._lock:
            nodes, run, runs, findings = list(self._nodes.values()), self._run, list(self._runs), self._findings
        busy = RENDERING if run is not None else READY
        return shown(
            {
                "nodes": [own.described(busy), *map(asdict, nodes)],
                "run": run,
                "runs": runs,
                "doctor": asdict(findings),
                "clusters": cluster_names(),
            }
        )

    def publish(self) -> None:
        """Send the state to all pages, if one shows the tab."""
        if pages.attended() is not None:
            send(STATE_EVENT, self.state())

    def tell(self, kind: str, client: str | None, **what: Any) -> None:
        """Have a page show a message, unless its user does not want any."""
        if settings_of(pages.user_of(client)).messages:
            send(MESSAGE_EVENT, shown({"kind": kind, **what}), client)


def shown(data: Any) -> Any:
    """Plain data as it may be shown: no folders of this machine in any text."""
    if isinstance(data, str):
        return without_folders(data, *own.folders(), home=str(Path.home()))
    if isinstance(data, dict):
        return {key: shown(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [shown(value) for value in data]
    return data


board = Board()
