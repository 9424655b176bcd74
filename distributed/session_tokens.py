"""Forwards of a run by tokens: whether a split pays, its proof, and what is done when it does not work out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from . import limits, plan
from .exchange import ExchangeFailed
from .layout import NotSplittable
from .ledger import DRIVER, Forward, Ledger
from .outputs import device_of, relative_difference, shapes, tolerance
from .peer import Peer
from .peers import Peers
from .plan import Costs
from .report import Report
from .rows import Call
from .split_tokens import PeerLost, TokenRun

_SPLIT = "tokens"


class ByTokens:
    """The forwards by tokens of one run."""

    def __init__(
        self,
        tokens: TokenRun,
        peers: Peers,
        ledger: Ledger,
        report: Report,
        plain: Callable[[Call], Call | None],
    ) -> None:
        """`plain` gives a call as it travels, or None with the reason on record."""
        self.tokens = tokens
        self._peers = peers
        self._ledger = ledger
        self._report = report
        self._plain = plain

    def forward(self, forward: Forward, call: Call) -> Any:
        """Compute a forward, by tokens as far as that is possible and pays."""
        self._peers.look()
        output = None
        if self.tokens.refused:
            self._report.add_reason(self.tokens.refused)
        elif (plain := self._plain(call)) is not None and (peers := self._peers.ready()):
            output = self._with(peers, forward, call, plain)
        return forward(*call.args, **call.kwargs) if output is None else output

    def close(self) -> None:
        """Leave the exchange."""
        self._report.add_traffic(*self.tokens.traffic)
        self.tokens.close()

    def _with(self, peers: list[Peer], forward: Forward, call: Call, plain: Call) -> Any:
        costs = self._ledger.costs(peers, (_SPLIT, shapes(call)))
        if self._ledger.unproven(peers, _SPLIT):
            return self._prove(peers, forward, call, plain, costs)
        if not self._ledger.pays(costs, 1):
            return None
        if self._ledger.wants_measure_alone(costs):
            return self._ledger.alone(forward, call, costs)
        output = self._split(peers, forward, call, plain, costs)
        self._report.forwards_split += output is not None
        return output

    def _prove(self, peers: list[Peer], forward: Forward, call: Call, plain: Call, costs: Costs) -> Any:
        """Compute a forward here, and then again by tokens: only a split that was seen to be right is used."""
        with self._failures():
            expected, alone = self.tokens.measure(forward, call)
            costs.record_alone(alone, first_of_run=self._report.forwards == 1)
            if self._report.mode == "auto" and not self._link_pays(peers, call, alone):
                return expected
            output = self._split(peers, forward, call, plain, costs)
            if output is None:
                return expected
            difference = relative_difference(output, expected)
            if difference <= tolerance(expected):
                for peer in peers:
                    self._ledger.prove(peer, _SPLIT)
            else:
                self.tokens.refused = (
                    f"the machines together compute something else than this one (relative difference "
                    f"{difference:.1e}); check that all have the same software and model file"
                )
                self._report.add_event(self.tokens.refused)
            return expected
        return None

    def _link_pays(self, peers: list[Peer], call: Call, alone: float) -> bool:
        with self._failures():
            link = self.tokens.join(peers, device_of(call.args[0]))
            volume = self.tokens.volume
            if link.predict(volume, alone, len(peers) + 1) <= limits.WORTHWHILE_RATIO * alone:
                return True
            self.tokens.refused = (
                f"a token split would not be faster over this link: {link.rate / 1e9:.2g} GB/s for "
                f"{volume.bytes / 1e9:.2g} GB per forward, which takes {alone:.2g} s here"
            )
            self._report.add_reason(self.tokens.refused)
        return False

    def _split(self, peers: list[Peer], forward: Forward, call: Call, plain: Call, costs: Costs) -> Any:
        """The output of a forward computed by tokens, or None if that did not work out."""
        for peer, part, seconds in self.tokens.heard():
            self._ledger.record_pace(costs, peer.worker_id, part, seconds)
        parts = plan.fractions(costs, [DRIVER, *(peer.worker_id for peer in peers)])
        with self._failures():
            done = self.tokens.forward(forward, call, plain, peers, parts)
            self._ledger.record_pace(costs, DRIVER, done.parts[0], done.busy)
            self._report.split, self._report.rows = _SPLIT, {}
            self._report.tokens = dict(zip([DRIVER, *(peer.name for peer in peers)], done.parts, strict=True))
            self._report.waiting += done.waiting
            self._ledger.record_split(costs, done.seconds, 1, split=True)
            return done.output
        return None

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """What can go wrong between the machines ends a split, not the render."""
        try:
            yield
        except PeerLost as lost:
            self._report.add_event(str(lost))
            self.tokens.close()
            self._peers.release(lost.peer, cancel=True)
        except ExchangeFailed as error:
            self._report.add_event(str(error))
            self.tokens.failed(str(error))
        except NotSplittable as error:
            self._report.add_reason(str(error))
            self.tokens.refused = str(error)
