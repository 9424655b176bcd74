"""Forwards of a run by tokens: whether a split pays, its proof, and what is done when it does not work out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
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
        refused = self._refusal()
        if refused:
            self._report.add_reason(refused)
        elif (plain := self._plain(call)) is not None and (peers := self._peers.ready()):
            output = self._with(peers, forward, call, plain)
        return forward(*call.args, **call.kwargs) if output is None else output

    def beat_rows(self, peers: list[Peer], call: Call, rows: Costs) -> bool:
        """Whether to compute a forward by tokens that could be, and has been, split by rows at these costs.

        Where rows divide evenly among the machines, there is nothing to gain, and nothing is tried. A split that is an
        approximation does not take the place of an exact one.
        """
        if self._report.mode != "auto" or self.tokens.compress or self._refusal():
            return False
        by_rows, tokens = plan.seconds(rows, call.rows, DRIVER), self._costs(peers, call)
        if by_rows is None or plan.is_refused(tokens):
            return False
        if len(tokens.trials) >= limits.TRIAL_FORWARDS:
            if min(tokens.trials) < by_rows:
                return True
            tokens.refuse("rows are faster than tokens here")
            return False
        balance = plan.balance(rows, _nodes(peers), call.rows, measured=1 if plan.is_refused(rows) else 2)
        if balance > limits.TOKENS_OVER_ROWS_RATIO or not rows.exchanges:
            return False
        tokens.swapped_bytes, tokens.exchanges = rows.swapped_bytes, rows.exchanges
        return self._link_pays(peers, call, tokens, by_rows * balance, limits.TOKENS_OVER_ROWS_RATIO * by_rows)

    def alone(self, forward: Forward, call: Call, peers: list[Peer], rows: Costs) -> Any:
        """Compute a forward of several rows here, to know what that costs and, if need be, what a split would swap."""
        output = None
        if not self._refusal() and self._report.mode == "auto":
            balance = plan.balance(rows, _nodes(peers), call.rows, measured=1)
            if balance <= limits.TOKENS_OVER_ROWS_RATIO:
                output = self._measure(forward, call, rows)
        return self._ledger.alone(forward, call, rows) if output is None else output

    def instead_of_rows(
        self, forward: Forward, call: Call, plain: Call, peers: list[Peer], rows: Costs, by_rows: Callable[[], Any]
    ) -> Any:
        """Compute a forward that beat_rows; the first of its kind `by_rows` as well, with which it has to agree."""
        tokens = self._costs(peers, call)
        alone = rows.alone_estimate(call.rows, DRIVER)
        if alone is not None:
            tokens.record_alone(alone, first_of_run=False)
        for node in _nodes(peers):
            # What is known of rows is good enough to begin with.
            known = [max(paces) / call.rows for paces in (rows.paces.get(node),) if paces]
            tokens.paces.setdefault(node, known * 2)
        kind = self._kind(call)
        if self._ledger.unproven(peers, kind):
            return self._prove(peers, forward, call, plain, tokens, kind, by_rows())
        done = self._split(peers, forward, call, plain, tokens)
        return forward(*call.args, **call.kwargs) if done is None else done.output

    def _costs(self, peers: list[Peer], call: Call) -> Costs:
        costs = self._ledger.costs(peers, (_SPLIT, self.tokens.compress, shapes(call)))
        costs.proportional = False
        return costs

    def _kind(self, call: Call) -> str:
        """What a proof is good for: a family's row can be wrong for one argument and right for all others."""
        names = sorted(name for name, value in call.kwargs.items() if value is not None)
        return f"{_SPLIT} {names}{' compressed' if self.tokens.compress else ''}"

    def _refusal(self) -> str | None:
        """Why this model is not split by tokens."""
        if self.tokens.refused:
            return self.tokens.refused
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
        costs, kind = self._costs(peers, call), self._kind(call)
        self._hear()
        if not self._ledger.pays(costs, 1, call):
            return None
        if not self._ledger.unproven(peers, kind):
            if self._ledger.wants_measure_alone(costs):
                return self._measure(forward, call, costs)
            done = self._split(peers, forward, call, plain, costs)
            return None if done is None else done.output
        expected = self._measure(forward, call, costs)
        if expected is None:
            return None
        if self._report.mode == "auto":
            alone = costs.alone or 0.0
            if not self._link_pays(peers, call, costs, alone / (len(peers) + 1), limits.WORTHWHILE_RATIO * alone):
                return expected
        return self._prove(peers, forward, call, plain, costs, kind, expected)

    def _prove(
        self, peers: list[Peer], forward: Forward, call: Call, plain: Call, costs: Costs, kind: str, expected: Any
    ) -> Any:
        """`expected`, which a forward has given already; it is computed again by tokens.

        Only a split that was seen to be right is used.
        """
        if any(peer not in self._peers for peer in peers):
            return expected
        done = self._compute(peers, forward, call, plain, costs)
        if done is None:
            return expected
        difference = relative_difference(done.output, expected)
        allowed = limits.CHECK_TOLERANCE_COMPRESSED if self.tokens.compress else tolerance(expected)
        if difference <= allowed:
            for peer in peers:
                self._ledger.prove(peer, kind)
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

    def _link_pays(self, peers: list[Peer], call: Call, costs: Costs, computing: float, at_most: float) -> bool:
        """Whether a forward that takes each machine `computing` seconds takes `at_most` seconds over the link."""
        with self._failures():
            link = self.tokens.join(peers, device_of(call.args[0]))
            if link.predict(computing, costs.swapped_bytes, costs.exchanges, len(peers) + 1) <= at_most:
                return True
            costs.refuse(
                f"a token split would not be faster over this link: {link.rate / 1e9:.2g} GB/s for "
                f"{costs.swapped_bytes / 1e9:.2g} GB per forward, which takes {costs.alone or at_most:.2g} s here"
            )
            self._report.add_choice(costs.verdict)
        return False

    def _predict(self, peers: list[Peer], call: Call, costs: Costs, parts: Sequence[float]) -> None:
        alone = costs.alone_estimate(1, DRIVER) or costs.alone
        if alone is not None and costs.exchanges:
            link = self.tokens.join(peers, device_of(call.args[0]))
            seconds = link.predict(parts[0] * alone, costs.swapped_bytes, costs.exchanges, len(parts))
            self._ledger.predict(costs, 1, lambda: alone / seconds)

    def _split(self, peers: list[Peer], forward: Forward, call: Call, plain: Call, costs: Costs) -> TokenForward | None:
        """A forward computed by tokens, which counts, or None if that did not work out."""
        done = self._compute(peers, forward, call, plain, costs)
        if done is not None:
            self._report.forwards_split += 1
            given = dict(zip(_nodes(peers), done.parts, strict=True))
            self._ledger.record_split(costs, done.seconds, given, split=True)
        return done

    def _compute(
        self, peers: list[Peer], forward: Forward, call: Call, plain: Call, costs: Costs
    ) -> TokenForward | None:
        """A forward computed by tokens, or None if that did not work out."""
        self._hear()
        parts = plan.fractions(costs, _nodes(peers))
        overlap = self.tokens.overlaps(costs.swapped_bytes, costs.alone, len(parts))
        with self._failures():
            self._predict(peers, call, costs, parts)
            done = self.tokens.forward(forward, call, plain, peers, parts, kind=costs, overlap=overlap)
            self._ledger.record_pace(costs, DRIVER, done.parts[0], done.busy)
            self._report.split, self._report.rows = _SPLIT, {}
            self._report.approximate = self.tokens.compress
            self._report.tokens = dict(zip([DRIVER, *(peer.name for peer in peers)], done.parts, strict=True))
            self._report.waiting += done.waiting
            return done
        return None

    def _hear(self) -> None:
        """Take down what workers have said of earlier forwards."""
        for kind, peer, part, seconds in self.tokens.heard():
            self._ledger.record_pace(kind, peer.worker_id, part, seconds)

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """What can go wrong between the machines ends a split, not the render."""
        try:
            yield
        except PeerLost as lost:
            self._report.add_failure(str(lost))
            self.tokens.close()
            self._peers.release(lost.peer, cancel=True)
        except ExchangeFailed as error:
            self._report.add_event(str(error))
            self.tokens.failed(str(error))
        except NotSplittable as error:
            self._report.add_reason(str(error))
            self.tokens.refused = str(error)


def _nodes(peers: list[Peer]) -> list[str]:
    return [DRIVER, *(peer.worker_id for peer in peers)]
