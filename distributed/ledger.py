"""What the forwards of a run cost, and which workers were seen to compute the same: kept over the runs of a process."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from . import plan
from .outputs import shapes, synchronize
from .peer import Peer
from .peers import Peers
from .plan import Costs, History
from .report import Report
from .rows import Call

DRIVER = "this machine"

Forward = Callable[..., Any]

_history = History()
# (model, worker process, kind of split)
_agreed: set[tuple[str, str, str]] = set()


class Ledger:
    """One run's view of it."""

    def __init__(self, report: Report, peers: Peers) -> None:
        self._report = report
        self._peers = peers
        self._warm: set[tuple[str, Costs]] = set()
        # By the shapes of a call: those who took part when `auto` decided against splitting it, and its costs.
        self._settled: dict[Hashable, tuple[tuple[Peer, ...], Costs]] = {}
        # By kind of forward: what was predicted before the first split of it.
        self._predicted: dict[Costs, float] = {}

    @property
    def _model(self) -> str:
        return self._peers.recipe.digest if self._peers.recipe else ""

    def unproven(self, peers: Sequence[Peer], split: str) -> list[Peer]:
        """Those that were not seen to compute this model as this machine does, in splits of this kind."""
        return [peer for peer in peers if (self._model, peer.worker_id, split) not in _agreed]

    def prove(self, peer: Peer, split: str) -> None:
        """The peer was seen to compute the same."""
        _agreed.add((self._model, peer.worker_id, split))

    def costs(self, peers: Sequence[Peer], what: Hashable) -> Costs:
        """Costs of forwards of the kind `what`, computed with these peers over these links."""
        return _history.costs((self._model, tuple((peer.worker_id, peer.address) for peer in peers), what))

    def pays(self, costs: Costs, size: int, call: Call | None = None) -> bool:
        """Whether to go on splitting, as far as `auto` decides that; notes why not.

        call: the forward, if other ways to split it were considered before.
        """
        refused = plan.is_refused(costs)
        if self._report.mode != "auto" or plan.pays(costs, size, DRIVER):
            return True
        self._report.add_choice(costs.verdict)
        members = self._peers.members
        # A verdict of just now may yet have the next forward try the other split.
        if refused and call is not None and all(peer.ready for peer in members):
            self._settled[shapes(call)] = members, costs
        return False

    def is_settled(self, call: Call) -> bool:
        """Whether `auto` has decided against splitting such a forward. Cheap: a short forward has no time to lose."""
        found = self._settled.get(shapes(call)) if self._settled else None
        return found is not None and found[0] == self._peers.members and plan.is_refused(found[1])

    def wants_measure_alone(self, costs: Costs) -> bool:
        """Whether `auto` needs to know what this machine alone takes for the next forward."""
        return self._report.mode == "auto" and plan.wants_measure_alone(costs)

    def alone(self, forward: Forward, call: Call, costs: Costs) -> Any:
        """Compute a forward here, and record what it costs this machine alone."""
        cold = self._report.forwards == 1
        output, seconds = timed(forward, call)
        costs.record_alone(seconds, first_of_run=cold)
        return output

    def record_pace(self, costs: Costs, node: str, size: float, seconds: float) -> None:
        """A node's first share of a kind in a run also pays for warming up, which says nothing of its pace."""
        if (node, costs) in self._warm:
            costs.record_pace(node, size, seconds)
        self._warm.add((node, costs))

    def predict(self, costs: Costs, size: int, speedup: Callable[[], float]) -> None:
        """A forward of `size` rows is about to be split, which should make it `speedup()` times as fast.

        What such splits were in earlier runs is a better guess. Only the first guess of a run counts.
        """
        if costs not in self._predicted:
            self._predicted[costs] = plan.tried_speedup(costs, size, DRIVER) or speedup()
        self._report.predicted = self._predicted[costs]

    def record_split(self, costs: Costs, seconds: float, given: Mapping[str, float], *, split: bool) -> None:
        """A forward was shared out, rows (or conditionings, or tokens) to nodes; `split`: whether any to a worker."""
        costs.record_split(seconds, given)
        alone = costs.alone_estimate(round(sum(given.values())), DRIVER)
        if not split:
            self._report.add_choice("the workers are too slow to get a share")
        elif alone is not None:
            self._report.split_seconds += seconds
            self._report.alone_seconds += alone


def timed(forward: Forward, call: Call) -> tuple[Any, float]:
    """(output, seconds) of a forward."""
    began = time.perf_counter()
    output = forward(*call.args, **call.kwargs)
    synchronize(output)
    return output, time.perf_counter() - began
