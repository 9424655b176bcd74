"""One run on the driver: its peers, which of them compute what of each forward, and what happens when one is lost.

Knows forwards only as callables with arguments, so that any model can be split; ComfyUI's side is in nodes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import torch

from . import limits, plan, rows
from .cluster import Cluster
from .codec import NotPlainData, pack_plain
from .families import Family
from .ledger import DRIVER, Forward, Ledger, timed
from .options import NotReproducible, owner, plain_arguments, plain_options
from .outputs import continues, on_device, relative_difference, shapes, synchronize, tolerance
from .peer import Peer, PeerFailed
from .peers import Peers
from .plan import Costs
from .recipe import Recipe
from .report import Report
from .rows import Call
from .session_tokens import ByTokens
from .side_by_side import Conditionings, PeerBranch
from .split_tokens import Link, TokenRun
from .versions import Versions


class Session:
    """A run. A context manager: leaving it ends the run on every worker, and cancels it there after an exception."""

    def __init__(
        self,
        cluster: Cluster,
        versions: Versions,
        report: Report,
        describe: Callable[[], Recipe],
        *,
        check: Callable[[], None],
        progress: Callable[[int, int], None] = lambda done, total: None,
        dequantised: Callable[[Collection[str]], contextlib.AbstractContextManager[None]] | None = None,
        model: torch.nn.Module | None = None,
        family: Family | None = None,
    ) -> None:
        """`describe` gives the model's recipe or raises NotReproducible.

        `check` raises when the run is to stop; `progress(done, total)` follows a file that is sent, in bytes;
        `dequantised(formats)` has the model here multiply layers of these formats dequantised (see compute_path);
        `model` and its `family`, if that is known, are needed to split its forwards by tokens.
        """
        self.report = report
        self._peers = Peers(cluster, versions, report, describe, check, progress, dequantised)
        self._ledger = Ledger(report, self._peers)
        self._tokens: ByTokens | None = None
        if model is not None and report.mode != "rows":
            run = TokenRun(model, family, cluster, check, report.add_event)
            self._tokens = ByTokens(run, self._peers, self._ledger, report, self._plain)
        self._conditionings = Conditionings()
        self._first_forward_at: float | None = None
        self._next_look = 0.0

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._conditionings.abandon()
        if self._tokens is not None:
            self._tokens.close()
        self.report.seconds = self._seconds()
        self._peers.end(cancel=kind is not None)

    def start(self) -> None:
        """Describe the model, connect to the workers and have them load; returns while they still load."""
        self._peers.start()

    @property
    def link(self) -> Link | None:
        """What the exchange of tokens was measured to be; None while there is none."""
        return self._tokens.tokens.link if self._tokens is not None else None

    @property
    def workers(self) -> tuple[Peer, ...]:
        """Those that take part, or will once they have loaded the model; may be asked from any thread."""
        return self._peers.members

    @property
    def splits_tokens(self) -> bool:
        """Whether a forward of a single row can be shared out, too."""
        return self._tokens is not None and self._tokens.tokens.refused is None

    # --- forwards -------------------------------------------------------------------------------------------------

    def forward(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute `forward(*args, **kwargs)`, over the nodes as far as that is possible and pays.

        Same result as calling it. Raises what it raises, and what `check` raises.
        """
        self._begin_time()
        output = self._compute(forward, args, kwargs)
        if not self.report.first_seconds:
            synchronize(output)
            self.report.first_seconds = self._seconds()
        return output

    def _compute(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = Call(args, kwargs)
        self.report.forwards += 1
        if self._conditionings.branch is not None:
            return self._forward_in_branch(forward, call, self._conditionings.branch)
        if self._conditionings.underway:
            output = forward(*args, **kwargs)
            self._conditionings.advance_arrived()
            return output
        if self._ledger.is_settled(call):
            return self._settled(forward, call)
        if self.report.mode == "tokens" or (call.rows < 2 and not self._conditionings.apart):
            if self._tokens is not None:
                return self._tokens.forward(forward, call)
            self._peers.look()
            self.report.add_reason("one row (CFG 1 and batch 1) has nothing to split by rows")
            return forward(*args, **kwargs)
        plain = self._plain(call)
        peers = self._peers.ready() if plain else []
        if plain is None or not peers:
            return self._here(forward, call)
        unproven = self._ledger.unproven(peers, "rows")
        if unproven:
            return self._prove(forward, call, plain, peers, unproven)
        if call.rows < 2:
            return self._here(forward, call)
        return self._split_rows(forward, call, plain, peers)

    def _begin_time(self) -> None:
        if self._first_forward_at is None:
            self._first_forward_at = time.perf_counter()

    def _seconds(self) -> float:
        """Since the first forward began, without those that passed while workers were loading."""
        if self._first_forward_at is None:
            return 0.0
        return time.perf_counter() - self._first_forward_at - self._peers.load_seconds

    def _plain(self, call: Call) -> Call | None:
        """The call with only plain data in its transformer_options, or None with the reason on record."""
        try:
            options = plain_options(call.kwargs.get("transformer_options") or {})
            pack_plain(list(call.args), "the forward's arguments")
            return Call(call.args, {**plain_arguments(call.kwargs), "transformer_options": options})
        except NotReproducible as error:
            for reason in error.reasons:
                self.report.add_reason(reason)
        except NotPlainData as error:
            self.report.add_reason(f"the forward is given {owner(error.value)}, which cannot be sent")
        return None

    def _here(self, forward: Forward, call: Call) -> Any:
        """Compute a forward on this machine."""
        self._peers.look()
        return forward(*call.args, **call.kwargs)

    def _settled(self, forward: Forward, call: Call) -> Any:
        """Compute a forward on this machine that `auto` does not split: it may be so short that even looking counts."""
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + limits.POLL_SECONDS
            self._peers.look()
        return forward(*call.args, **call.kwargs)

    def _prove(self, forward: Forward, call: Call, plain: Call, peers: list[Peer], unproven: list[Peer]) -> Any:
        """Compute a forward here while new peers compute its last row; keep those that agree."""
        tickets: list[tuple[Peer, int]] = []
        asked = rows.cut(plain, call.rows - 1, call.rows)
        for peer in unproven:
            with self._peers.released_on_failure(peer):
                tickets.append((peer, peer.start(asked)))
        self._peers.look()
        # The last row by itself here, too: layers that quantise their input round it otherwise in another batch.
        parts = [
            rows.cut(call, *span) for span in ((0, call.rows - 1), (call.rows - 1, call.rows)) if span[1] > span[0]
        ]
        outputs, seconds = zip(*(timed(forward, part) for part in parts), strict=True)
        self._ledger.costs(peers, shapes(call)).record_alone(sum(seconds), first_of_run=True)
        expected = outputs[-1]
        for peer, ticket in tickets:
            with self._peers.released_on_failure(peer):
                share = peer.finish(ticket)
                difference = relative_difference(on_device(share.output, expected), expected)
                if not difference <= tolerance(expected):
                    raise PeerFailed(
                        f"{peer.name} computes something else than this machine "
                        f"(relative difference {difference:.1e}); "
                        "check that both have the same software and kind of GPU, "
                        "and that the model file has not changed since it was loaded here",
                        final=True,
                    )
                self._ledger.prove(peer, "rows")
        return rows.join(list(outputs))

    def _split_rows(self, forward: Forward, call: Call, plain: Call, peers: list[Peer]) -> Any:
        costs = self._ledger.costs(peers, shapes(call))

        def by_rows() -> Any:
            return self._by_rows(forward, call, plain, peers, costs)

        if self._tokens is not None and self._tokens.beat_rows(peers, call, costs):
            return self._tokens.instead_of_rows(forward, call, plain, peers, costs, by_rows)
        if any(peer not in self._peers for peer in peers):
            return self._here(forward, call)
        return by_rows()

    def _by_rows(self, forward: Forward, call: Call, plain: Call, peers: list[Peer], costs: Costs) -> Any:
        if not self._ledger.pays(costs, call.rows, call):
            return self._here(forward, call)
        if self._ledger.wants_measure_alone(costs):
            self._peers.look()
            if self._tokens is not None:
                return self._tokens.alone(forward, call, peers, costs)
            return self._ledger.alone(forward, call, costs)
        began = time.perf_counter()
        given = self._shares(costs, peers, call.rows)
        shares = list(given.values())
        spans = _spans(shares)
        tickets: list[tuple[Peer, int, int, int]] = []
        for peer, (start, stop) in zip(peers, spans[1:], strict=True):
            with self._peers.released_on_failure(peer):
                if start < stop:
                    tickets.append((peer, peer.start(rows.cut(plain, start, stop)), start, stop))
                else:
                    peer.look()
        local, seconds = timed(forward, rows.cut(call, 0, shares[0]))
        self._ledger.record_pace(costs, DRIVER, shares[0], seconds)
        slowest = seconds
        parts = {0: local}
        waited = time.perf_counter()
        for peer, ticket, start, stop in tickets:
            with self._peers.released_on_failure(peer):
                share = peer.finish(ticket)
                if not continues(share.output, stop - start, local):
                    why = f"{peer.name} gave an output of another shape or type than this machine"
                    raise PeerFailed(why, final=True)
                parts[start] = on_device(share.output, local)
                self._ledger.record_pace(costs, peer.worker_id, stop - start, share.seconds)
                slowest = max(slowest, share.seconds)
        self.report.waiting += time.perf_counter() - waited
        split = len(parts) > 1
        if split:
            self.report.forwards_split += 1
            self.report.busy_seconds += slowest
            self.report.split = "rows"
            computed = {peer.name: stop - start for peer, _, start, stop in tickets if start in parts}
            self.report.rows = {DRIVER: shares[0], **computed}
        complete = True
        for start, stop in spans:
            if start < stop and start not in parts:
                complete = False
                part = rows.cut(call, start, stop)
                parts[start] = forward(*part.args, **part.kwargs)
        output = rows.join([parts[start] for start in sorted(parts)])
        if complete:
            self._ledger.record_split(costs, time.perf_counter() - began, given, split=split)
        return output

    def _shares(self, costs: Costs, peers: Sequence[Peer], rows: int) -> dict[str, int]:
        """Rows of each node, this machine first."""
        nodes = [DRIVER, *(peer.worker_id for peer in peers)]
        shares = plan.shares(costs, nodes, rows, everyone=self.report.mode != "auto")
        if any(shares[1:]):
            self._ledger.predict(costs, rows, lambda: plan.predict(costs, nodes, shares))
        return dict(zip(nodes, shares, strict=True))

    # --- conditionings side by side -------------------------------------------------------------------------------

    def conditionings(self, calls: Sequence[Callable[[], Any]], stock: Callable[[], Any], shape: Hashable) -> list[Any]:
        """Results of `calls`, each of which computes one conditioning in forwards of its own, side by side.

        `stock()` computes them all here and gives the same list; `shape` says which forwards cost alike.
        """
        self._begin_time()
        if self.report.mode == "tokens":
            return stock()
        self._conditionings.apart = True
        self._peers.look()
        peers = self._peers.ready()
        if not peers or self._ledger.unproven(peers, "rows"):
            return stock()
        costs = self._ledger.costs(peers, ("conditionings", len(calls), shape))
        if not self._ledger.pays(costs, len(calls)):
            return self._conditionings.all_here(stock)
        if self._ledger.wants_measure_alone(costs):
            began = time.perf_counter()
            results = self._conditionings.all_here(stock)
            synchronize(results)
            costs.record_alone(time.perf_counter() - began, first_of_run=False)
            return results
        return self._side_by_side(calls, peers, costs)

    def _side_by_side(self, calls: Sequence[Callable[[], Any]], peers: list[Peer], costs: Costs) -> list[Any]:
        began, forwards = time.perf_counter(), self.report.forwards
        given = self._shares(costs, peers, len(calls))
        shares = list(given.values())
        spans = _spans(shares)
        nodes = [
            (peer, calls[start:stop]) for peer, (start, stop) in zip(peers, spans[1:], strict=True) if start < stop
        ]
        with self._conditionings.open(nodes) as branches:
            local_began = time.perf_counter()
            results = [call() for call in calls[: shares[0]]]
            synchronize(results)
            self._ledger.record_pace(costs, DRIVER, shares[0], time.perf_counter() - local_began)
            waited = time.perf_counter()
            for branch in branches:
                results += branch.finish()
            self.report.waiting += time.perf_counter() - waited
        seconds = time.perf_counter() - began
        for branch in branches:
            if branch.remote and branch.peer in self._peers:
                self._ledger.record_pace(costs, branch.peer.worker_id, branch.conditionings, branch.seconds)
        split = any(branch.remote for branch in branches)
        if split:
            self.report.forwards_split += self.report.forwards - forwards
            self.report.split = "conditionings"
            self.report.rows = {DRIVER: shares[0], **{b.peer.name: b.conditionings for b in branches if b.remote}}
        if (split or not branches) and all(branch.peer in self._peers for branch in branches):
            self._ledger.record_split(costs, seconds, given, split=split)
        return results

    def _forward_in_branch(self, forward: Forward, call: Call, branch: PeerBranch) -> Any:
        plain = self._plain(call) if branch.peer in self._peers else None
        if plain is not None:
            with self._peers.released_on_failure(branch.peer):
                ticket = branch.peer.start(rows.cut(plain, 0, plain.rows))
                branch.park(ticket)
                share = branch.peer.finish(ticket)
                if rows.row_count(share.output) != call.rows:
                    why = f"{branch.peer.name} gave an output of another shape than was asked for"
                    raise PeerFailed(why, final=True)
                branch.remote += 1
                branch.seconds += share.seconds
                return on_device(share.output, call.args[0])
        return forward(*call.args, **call.kwargs)


def _spans(shares: Sequence[int]) -> list[tuple[int, int]]:
    """[start, stop) of each share when they follow one another."""
    return [(sum(shares[:i]), sum(shares[: i + 1])) for i in range(len(shares))]
