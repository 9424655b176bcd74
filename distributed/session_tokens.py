"""Forwards of a run by tokens: whether a split pays, its proof, and what is done when it does not work out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from . import limits, plan
from .compute_path import NATIVE
from .exchange import ExchangeFailed
from .layout import NotSplittable
from .ledger import DRIVER, Forward, Ledger
from .outputs import device_of, relative_difference, shapes, tolerance
from .peer import Peer
from .peers import Peers
from .plan import Costs
from .report import Report
from .rows import Call
from .split_tokens import PeerLost, TokenForward, TokenRun

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
        refused = self.tokens.refused or self._refusal()
        if refused:
            self._report.add_reason(refused)
        elif (plain := self._plain(call)) is not None and (peers := self._peers.ready()):
            output = self._with(peers, forward, call, plain)
        return forward(*call.args, **call.kwargs) if output is None else output

    def _refusal(self) -> str | None:
        recipe = self._peers.recipe
        if recipe is not None and recipe.tree.get("paths", {}).get("nvfp4") == NATIVE:
            return (
                "NVFP4 layers that multiply natively scale by the largest activation of all tokens, which no machine "
                "of a token split sees; use CFG above 1, a batch, or another format"
            )
        return None

    def close(self) -> None:
        """Leave the exchange."""
        self._report.add_traffic(*self.tokens.traffic)
        self.tokens.close()

    def _with(self, peers: list[Peer], forward: Forward, call: Call, plain: Call) -> Any:
        costs = self._ledger.costs(peers, (_SPLIT, shapes(call)))
        costs.proportional = False
        if not self._ledger.pays(costs, 1):
            return None
        # A family's row can be wrong for one argument and right for all others.
        split = f"{_SPLIT} {sorted(name for name, value in call.kwargs.items() if value is not None)}"
        if not self._ledger.unproven(peers, split):
            if self._ledger.wants_measure_alone(costs):
                return self._measure(forward, call, costs)
            done = self._split(peers, forward, call, plain, costs)
            if done is None:
                return None
            self._report.forwards_split += 1
            self._ledger.record_split(costs, done.seconds, 1, split=True)
            return done.output
        expected = self._measure(forward, call, costs)
        if expected is None or (self._report.mode == "auto" and not self._link_pays(peers, call, costs)):
            return expected
        # Here alone, and then again by tokens: only a split that was seen to be right is used.
        done = self._split(peers, forward, call, plain, costs)
        if done is None:
            return expected
        difference = relative_difference(done.output, expected)
        if difference <= tolerance(expected):
            for peer in peers:
                self._ledger.prove(peer, split)
        else:
            self.tokens.refused = (
                f"the machines together compute something else than this one (relative difference "
                f"{difference:.1e}); check that all have the same software and model file"
            )
            self._report.add_event(self.tokens.refused)
        return expected

    def _measure(self, forward: Forward, call: Call, costs: Costs) -> Any:
        """The output of a forward that is computed here, what it costs and would have to swap; None if it cannot be."""

        def measured(*args: Any, **kwargs: Any) -> Any:
            output, volume = self.tokens.measure(forward, Call(args, kwargs))
            costs.swapped_bytes, costs.exchanges = volume.bytes, volume.operations
            return output

        with self._failures():
            return self._ledger.alone(measured, call, costs)
        return None

    def _link_pays(self, peers: list[Peer], call: Call, costs: Costs) -> bool:
        with self._failures():
            link, alone = self.tokens.join(peers, device_of(call.args[0])), costs.alone or 0.0
            predicted = link.predict(costs.swapped_bytes, costs.exchanges, alone, len(peers) + 1)
            if predicted <= limits.WORTHWHILE_RATIO * alone:
                return True
            costs.refuse(
                f"a token split would not be faster over this link: {link.rate / 1e9:.2g} GB/s for "
                f"{costs.swapped_bytes / 1e9:.2g} GB per forward, which takes {alone:.2g} s here"
            )
            self._report.add_reason(costs.verdict)
        return False

    def _split(self, peers: list[Peer], forward: Forward, call: Call, plain: Call, costs: Costs) -> TokenForward | None:
        """A forward computed by tokens, or None if that did not work out."""
        for kind, peer, part, seconds in self.tokens.heard():
            self._ledger.record_pace(kind, peer.worker_id, part, seconds)
        parts = plan.fractions(costs, [DRIVER, *(peer.worker_id for peer in peers)])
        overlap = self.tokens.overlaps(costs.swapped_bytes, costs.alone, len(parts))
        with self._failures():
            done = self.tokens.forward(forward, call, plain, peers, parts, kind=costs, overlap=overlap)
            self._ledger.record_pace(costs, DRIVER, done.parts[0], done.busy)
            self._report.split, self._report.rows = _SPLIT, {}
            self._report.tokens = dict(zip([DRIVER, *(peer.name for peer in peers)], done.parts, strict=True))
            self._report.waiting += done.waiting
            return done
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
