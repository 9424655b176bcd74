"""Decides which nodes compute how many rows, and whether splitting pays, from what earlier forwards cost.

Knows only numbers: rows, seconds, node names. What a forward is, and how it is sent, is left to session.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from . import limits

# A verdict against splitting is tried again after this many seconds: the other machine may have been busy.
_VERDICT_SECONDS = 600.0
_REMEMBERED_KINDS = 256
_FORGIVENESS = 1.05
_LATEST_PACES = 3
# Paces that differ by less are taken for equal.
_ALIKE = 1.04


def share_rows(rows: int, paces: Sequence[float], at_least: Sequence[int] | None = None) -> list[int]:
    """Rows for each node so that the slowest finishes first: sum is `rows`, paces are rows per second.

    `at_least`: rows that nodes get in any case. Ties go to the earlier node; nodes may get no rows.
    """
    shares = list(at_least) if at_least else [0] * len(paces)
    for _ in range(rows - sum(shares)):
        finish = [(share + 1) / pace for share, pace in zip(shares, paces, strict=True)]
        shares[finish.index(min(finish))] += 1
    return shares


@dataclass(eq=False)
class Costs:
    """What forwards of one kind (model, shapes, nodes) have cost, in seconds."""

    # The latest paces of each node, rows per second.
    paces: dict[str, list[float]] = field(default_factory=dict)
    # How much faster than measured a node is taken to be for the time being.
    forgiven: dict[str, float] = field(default_factory=dict)
    # Whether a part of a forward takes its part of the time. Parts of one row's tokens do not: some cost is the same.
    proportional: bool = True
    alone: float | None = None
    alone_is_cold: bool = True
    trials: list[float] = field(default_factory=list)
    # What each node had of the latest of them, and whether these shares were chosen for want of a better result.
    tried: dict[str, float] = field(default_factory=dict)
    is_second_try: bool = False
    splits_from: float = 0.0
    # Why not before then.
    verdict: str = "splitting is not faster here"
    # What the ranks of a token split have to swap in a forward, and in how many exchanges, once that is known.
    swapped_bytes: int = 0
    exchanges: int = 0

    def pace(self, node: str) -> float | None:
        """Rows per second: the best of the last few, since interference only ever slows. None until measured twice."""
        latest = self.paces.get(node, [])
        return max(latest) * self.forgiven.get(node, 1.0) if len(latest) > 1 else None

    def record_pace(self, node: str, rows: float, seconds: float) -> None:
        """A node computed `rows` rows, or a part of one, in `seconds`."""
        if rows > 0 and seconds > 0:
            self.paces[node] = [*self.paces.get(node, []), rows / seconds][-_LATEST_PACES:]
            self.forgiven.pop(node, None)

    def forgive(self, node: str) -> None:
        """A node that gets nothing is not measured either; take it to be a little faster than it was."""
        self.forgiven[node] = self.forgiven.get(node, 1.0) * _FORGIVENESS

    def record_alone(self, seconds: float, *, first_of_run: bool) -> None:
        """The driver computed all rows of a forward. The first forward of a run also pays for warming up."""
        self.alone = seconds if self.alone is None else min(self.alone, seconds)
        self.alone_is_cold = self.alone_is_cold and first_of_run

    def record_split(self, seconds: float, given: Mapping[str, float]) -> None:
        """A forward was shared out: `given` rows, or parts of one, to each node."""
        self.trials = [*self.trials, seconds][-limits.TRIAL_FORWARDS :]
        self.tried = dict(given)

    def refuse(self, verdict: str) -> None:
        """Splitting does not pay, for a while: the other machine or the link may have been busy."""
        self.splits_from = time.monotonic() + _VERDICT_SECONDS
        self.verdict = verdict
        self.trials = []
        self.is_second_try = False

    def alone_estimate(self, rows: int, driver: str) -> float | None:
        """Seconds the driver alone needs for `rows` rows; at its own pace at most, because batching only helps."""
        pace = self.pace(driver)
        linear = rows / pace if pace and self.proportional else None
        # A first forward that also paid for warming up would flatter the split.
        alone = None if self.alone_is_cold else self.alone
        known = [seconds for seconds in (alone, linear) if seconds is not None]
        return min(known) if known else None


class History:
    """Costs per kind of forward, bounded; shared by the runs of one process."""

    def __init__(self) -> None:
        self._costs: OrderedDict[Hashable, Costs] = OrderedDict()

    def costs(self, kind: Hashable) -> Costs:
        costs = self._costs.setdefault(kind, Costs())
        self._costs.move_to_end(kind)
        while len(self._costs) > _REMEMBERED_KINDS:
            self._costs.popitem(last=False)
        return costs


def shares(costs: Costs, nodes: Sequence[str], rows: int, *, everyone: bool = False) -> list[int]:
    """Rows per node by measured pace, at least one for the first node, which is the driver.

    `everyone`: no node goes without as long as there are rows, the fastest first. Nodes not measured yet count as fast
    as the average of the others. One that was too slow to get a row is taken to be a little faster each time, so that
    it is tried again.
    """
    paces = _paces(costs, nodes)
    workers = sorted(range(1, len(nodes)), key=lambda node: -paces[node])
    served = {0, *(workers[: rows - 1] if everyone else [])}
    result = share_rows(rows, paces, [int(node in served) for node in range(len(nodes))])
    for node, share in zip(nodes, result, strict=True):
        if share == 0:
            costs.forgive(node)
    return result


def fractions(costs: Costs, nodes: Sequence[str]) -> list[float]:
    """Part of the tokens of a row per node, by measured pace: they are to finish together.

    Equal until measured, and for machines that are as good as alike: that is what their noise would spoil.
    """
    paces = _paces(costs, nodes)
    if max(paces) < _ALIKE * min(paces):
        paces = [1.0] * len(paces)
    return [pace / sum(paces) for pace in paces]


def _paces(costs: Costs, nodes: Sequence[str]) -> list[float]:
    known = [pace for node in nodes if (pace := costs.pace(node))]
    default = sum(known) / len(known) if known else 1.0
    return [costs.pace(node) or default for node in nodes]


def predict(costs: Costs, nodes: Sequence[str], given: Sequence[int]) -> float:
    """How many times as fast as the first node alone, the driver, a split into these rows should be.

    By the paces of the nodes, which count as alike as long as none was measured; what sending takes is not known.
    """
    paces = _paces(costs, nodes)
    slowest = max(share / pace for share, pace in zip(given, paces, strict=True))
    measured = costs.pace(nodes[0]) is not None
    alone = costs.alone_estimate(sum(given), nodes[0]) if measured else None
    return (alone or sum(given) / paces[0]) / slowest


def tried_speedup(costs: Costs, rows: int, driver: str) -> float | None:
    """What a split into shares that were tried already was; None if that is not known."""
    alone = costs.alone_estimate(rows, driver)
    return alone / min(costs.trials) if alone and costs.trials else None


def balance(costs: Costs, nodes: Sequence[str], rows: int, *, measured: int = 2) -> float:
    """Time of a forward whose nodes all finish together, over that of the slowest node when it is split by rows.

    By paces that were measured so many times; as if the nodes were alike as long as one was not.
    """
    latest = [costs.paces.get(node, []) for node in nodes]
    known = all(len(paces) >= measured for paces in latest)
    paces = [max(found) if known else 1.0 for found in latest]
    given = share_rows(rows, paces, [1, *[0] * (len(nodes) - 1)])
    return rows / sum(paces) / max(share / pace for share, pace in zip(given, paces, strict=True))


def seconds(costs: Costs, rows: int, driver: str) -> float | None:
    """What a forward takes as it is computed now, split or, where that did not pay, alone; None until that is known."""
    if is_refused(costs):
        return costs.alone_estimate(rows, driver)
    judged = len(costs.trials) >= limits.TRIAL_FORWARDS and not costs.alone_is_cold
    return min(costs.trials) if judged else None


def is_refused(costs: Costs) -> bool:
    """Whether a verdict against splitting is in force."""
    return time.monotonic() < costs.splits_from


def wants_measure_alone(costs: Costs) -> bool:
    """Whether the next forward should run on the driver alone, to know what a split has to beat."""
    if costs.alone is None:
        return True
    # A first forward that was slowed by warming up says too little to judge a split by.
    return costs.alone_is_cold and len(costs.trials) >= limits.TRIAL_FORWARDS


def pays(costs: Costs, rows: int, driver: str) -> bool:
    """Whether to go on splitting forwards of this kind. Remembers a verdict against it for a while."""
    if is_refused(costs):
        return False
    if len(costs.trials) < limits.TRIAL_FORWARDS or costs.alone_is_cold:
        return True
    alone = costs.alone_estimate(rows, driver)
    if alone is None:
        return True
    if min(costs.trials) <= limits.WORTHWHILE_RATIO * alone:
        costs.is_second_try = False
        return True
    if not costs.is_second_try and _shift(costs, limits.WORTHWHILE_RATIO * alone):
        return True
    costs.refuse("splitting is not faster here")
    return False


def _shift(costs: Costs, at_most: float) -> bool:
    """Whether shares by the paces of the last trials should bring a forward down to `at_most` seconds.

    If so, these paces are what counts from now on: equal shares say little of machines that are not alike, nor do old
    paces of one that has slowed down.
    """
    latest = {node: max(costs.paces.get(node, [0.0])[-limits.TRIAL_FORWARDS :]) for node in costs.tried}
    paces, tried = list(latest.values()), list(costs.tried.values())
    if not all(paces):
        return False
    if costs.proportional:
        shifted: Sequence[float] = share_rows(round(sum(tried)), paces, [1, *[0] * (len(paces) - 1)])
    else:
        shifted = [sum(tried) * pace / sum(paces) for pace in paces]
    before, after = (
        max(share / pace for share, pace in zip(shares, paces, strict=True)) for shares in (tried, shifted)
    )
    if max(0.0, min(costs.trials) - before) + after > at_most:
        return False
    costs.paces.update({node: [pace] * 2 for node, pace in latest.items()})
    costs.trials = []
    costs.is_second_try = True
    return True
