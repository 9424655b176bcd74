"""One run on the driver: its peers, which of them compute what of each forward, and what happens when one is lost.

Knows forwards only as callables with arguments, so that any model can be split; ComfyUI's side is in nodes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Any

import torch

from . import limits, plan, rows
from .cluster import Cluster
from .codec import NotPlainData, pack_plain
from .compute_path import common_paths
from .exchange import ExchangeFailed
from .families import Family
from .layout import NotSplittable
from .options import NotReproducible, owner, plain_arguments, plain_options
from .outputs import continues, device_of, on_device, relative_difference, synchronize, tensors, tolerance
from .peer import Peer, PeerFailed
from .plan import Costs, History
from .recipe import Recipe
from .report import Report
from .rows import Call
from .side_by_side import Conditionings, PeerBranch
from .split_tokens import Link, PeerLost, TokenRun
from .tokens import Volume
from .versions import Versions

DRIVER = "this machine"

Forward = Callable[..., Any]

_history = History()
# (model, worker process) pairs that were seen to compute the same, and those that did so by tokens.
_agreed: set[tuple[str, ...]] = set()


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
        self._cluster = cluster
        self._versions = versions
        self._describe = describe
        self._check = check
        self._progress = progress
        self._dequantised = dequantised
        self._model_changes = contextlib.ExitStack()
        self._tokens = TokenRun(model, family, cluster, check, report.add_event) if model is not None else None
        self._started = False
        self._recipe: Recipe | None = None
        self._peers: list[Peer] = []
        self._conditionings = Conditionings()
        self._first_forward_at: float | None = None
        self._load_seconds = 0.0
        self._warm: set[tuple[str, int]] = set()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._model_changes.close()
        self._conditionings.abandon()
        if self._tokens is not None:
            self._count(*self._tokens.traffic)
            self._tokens.close()
        for peer in list(self._peers):
            self._release(peer, cancel=kind is not None)
        if self._first_forward_at is not None:
            self.report.seconds = time.perf_counter() - self._first_forward_at - self._load_seconds

    @property
    def link(self) -> Link | None:
        """What the exchange of tokens was measured to be; None while there is none."""
        return self._tokens.link if self._tokens is not None else None

    @property
    def splits_tokens(self) -> bool:
        """Whether a forward of a single row can be shared out, too."""
        return self.report.mode != "rows" and self._tokens is not None and self._tokens.refused is None

    # --- peers ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Describe the model, connect to the workers and have them load; returns while they still load."""
        if self._started:
            return
        self._started = True
        if not self._cluster.workers:
            self.report.add_reason(f"no worker is configured in cluster {self._cluster.name!r}")
            return
        try:
            self._recipe = self._describe()
        except NotReproducible as error:
            for reason in error.reasons:
                self.report.add_reason(reason)
            return
        except (OSError, LookupError, TypeError, ValueError) as error:
            # A ComfyUI or a loader that keeps its models in a way not known here must not end the render.
            self.report.add_reason(f"the model cannot be described ({type(error).__name__}: {error})")
            return
        for address in self._cluster.workers:
            peer = Peer(address, self._check)
            self._peers.append(peer)
            with self._released_on_failure(peer):
                for warning in peer.connect(self._versions, allow_mismatch=self._cluster.allow_version_mismatch):
                    self.report.add_event(warning)
                if any(other.name == peer.name for other in self._peers if other is not peer):
                    peer.name = f"{peer.name} ({peer.address})"
        self._recipe = recipe = self._same_paths(self._recipe)
        for peer in list(self._peers):
            with self._released_on_failure(peer):
                peer.prepare(recipe, self._progress)

    def _same_paths(self, recipe: Recipe) -> Recipe:
        """Have all nodes multiply quantised layers the same way, or each in its own if the cluster prefers speed."""
        for note in recipe.notes:
            self.report.add_event(note)
        if self._dequantised is None or not recipe.tree.get("paths"):
            return recipe
        paths, forced, notes = common_paths(
            recipe.tree["paths"],
            {peer.name: peer.emulated for peer in self._peers},
            speed=self._cluster.prefer == "speed",
        )
        for note in notes:
            self.report.add_event(note)
        self._model_changes.enter_context(self._dequantised(forced))
        return dataclasses.replace(recipe, tree={**recipe.tree, "paths": paths})

    @contextlib.contextmanager
    def _released_on_failure(self, peer: Peer) -> Iterator[None]:
        try:
            yield
        except PeerFailed as error:
            self.report.add_event(str(error))
            self._release(peer, cancel=True)

    def _release(self, peer: Peer, *, cancel: bool) -> None:
        if peer not in self._peers:
            return
        self._peers.remove(peer)
        self._count(*peer.traffic)
        peer.close(cancel=cancel)

    def _count(self, sent: int, received: int) -> None:
        self.report.bytes_sent += sent
        self.report.bytes_received += received

    def _ready_peers(self) -> list[Peer]:
        """Peers that hold a replica. Those that still load are waited for, unless `auto` can go on without them."""
        began = time.perf_counter()
        self.start()
        recipe = self._recipe
        if recipe is None:
            return []
        for peer in list(self._peers):
            with self._released_on_failure(peer):
                if self.report.mode != "auto" or peer.loaded():
                    peer.wait_ready(recipe)
        self._load_seconds += time.perf_counter() - began
        ready = [peer for peer in self._peers if peer.ready]
        if len(ready) < len(self._peers):
            self.report.add_event("the first steps ran while a worker was still loading")
        return ready

    @property
    def _model(self) -> str:
        return self._recipe.digest if self._recipe else ""

    def _unproven(self, peers: Sequence[Peer]) -> list[Peer]:
        return [peer for peer in peers if (self._model, peer.worker_id) not in _agreed]

    def _costs(self, peers: Sequence[Peer], what: Hashable) -> Costs:
        return _history.costs((self._model, tuple(peer.worker_id for peer in peers), what))

    # --- forwards -------------------------------------------------------------------------------------------------

    def forward(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute `forward(*args, **kwargs)`, over the nodes as far as that is possible and pays.

        Same result as calling it. Raises what it raises, and what `check` raises.
        """
        self._begin_time()
        call = Call(args, kwargs)
        self.report.forwards += 1
        if self._conditionings.branch is not None:
            return self._forward_in_branch(forward, call, self._conditionings.branch)
        if self._conditionings.underway:
            output = forward(*args, **kwargs)
            self._conditionings.advance_arrived()
            return output
        if self.report.mode == "tokens" or (call.rows < 2 and not self._conditionings.apart):
            self._look_at_peers()
            if self.report.mode != "rows" and self._tokens is not None:
                return self._by_tokens(forward, call, self._tokens)
            self.report.add_reason("one row (CFG 1 and batch 1) has nothing to split by rows")
            return forward(*args, **kwargs)
        plain = self._plain(call)
        peers = self._ready_peers() if plain else []
        if plain is None or not peers:
            return self._here(forward, call)
        unproven = self._unproven(peers)
        if unproven:
            return self._prove(forward, call, plain, peers, unproven)
        if call.rows < 2:
            return self._here(forward, call)
        return self._split_rows(forward, call, plain, peers)

    def _begin_time(self) -> None:
        if self._first_forward_at is None:
            self._first_forward_at = time.perf_counter()

    def _look_at_peers(self) -> None:
        """Notice peers that are gone; what the others say is read even while nothing is asked of them."""
        for peer in list(self._peers):
            with self._released_on_failure(peer):
                peer.look()

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
        self._look_at_peers()
        return forward(*call.args, **call.kwargs)

    def _alone(self, forward: Forward, call: Call, costs: Costs) -> Any:
        """Compute a forward here, and record what it costs this machine alone."""
        self._look_at_peers()
        cold = self.report.forwards == 1
        output, seconds = _timed(forward, call)
        costs.record_alone(seconds, first_of_run=cold)
        return output

    def _prove(self, forward: Forward, call: Call, plain: Call, peers: list[Peer], unproven: list[Peer]) -> Any:
        """Compute a forward here while new peers compute its last row; keep those that agree."""
        tickets: list[tuple[Peer, int]] = []
        asked = rows.cut(plain, call.rows - 1, call.rows)
        for peer in unproven:
            with self._released_on_failure(peer):
                tickets.append((peer, peer.start(asked)))
        self._look_at_peers()
        # The last row by itself here, too: layers that quantise their input round it otherwise in another batch.
        parts = [
            rows.cut(call, *span) for span in ((0, call.rows - 1), (call.rows - 1, call.rows)) if span[1] > span[0]
        ]
        outputs, seconds = zip(*(_timed(forward, part) for part in parts), strict=True)
        self._costs(peers, _shapes(call)).record_alone(sum(seconds), first_of_run=True)
        expected = outputs[-1]
        for peer, ticket in tickets:
            with self._released_on_failure(peer):
                share = peer.finish(ticket)
                difference = relative_difference(on_device(share.output, expected), expected)
                if not difference <= tolerance(expected):
                    raise PeerFailed(
                        f"{peer.name} computes something else than this machine "
                        f"(relative difference {difference:.1e}); "
                        "check that both have the same software and kind of GPU, "
                        "and that the model file has not changed since it was loaded here"
                    )
                _agreed.add((self._model, peer.worker_id))
        return rows.join(list(outputs))

    def _split_rows(self, forward: Forward, call: Call, plain: Call, peers: list[Peer]) -> Any:
        costs = self._costs(peers, _shapes(call))
        if self.report.mode == "auto":
            if not plan.pays(costs, call.rows, DRIVER):
                self.report.add_reason("splitting is not faster here")
                return self._here(forward, call)
            if plan.wants_measure_alone(costs):
                return self._alone(forward, call, costs)
        began = time.perf_counter()
        shares = self._shares(costs, peers, call.rows)
        spans = _spans(shares)
        tickets: list[tuple[Peer, int, int, int]] = []
        for peer, (start, stop) in zip(peers, spans[1:], strict=True):
            if start < stop:
                with self._released_on_failure(peer):
                    tickets.append((peer, peer.start(rows.cut(plain, start, stop)), start, stop))
        # Not before: it would keep the workers waiting.
        self._look_at_peers()
        tickets = [ticket for ticket in tickets if ticket[0] in self._peers]
        local, seconds = _timed(forward, rows.cut(call, 0, shares[0]))
        self._record_pace(costs, DRIVER, shares[0], seconds)
        slowest = seconds
        parts = {0: local}
        waited = time.perf_counter()
        for peer, ticket, start, stop in tickets:
            with self._released_on_failure(peer):
                share = peer.finish(ticket)
                if not continues(share.output, stop - start, local):
                    raise PeerFailed(f"{peer.name} gave an output of another shape or type than this machine")
                parts[start] = on_device(share.output, local)
                self._record_pace(costs, peer.worker_id, stop - start, share.seconds)
                slowest = max(slowest, share.seconds)
        self.report.waiting += time.perf_counter() - waited
        split = len(parts) > 1
        if split:
            self.report.forwards_split += 1
            self.report.busy_seconds += slowest
            self.report.split = "rows"
            given = {peer.name: stop - start for peer, _, start, stop in tickets if start in parts}
            self.report.rows = {DRIVER: shares[0], **given}
        complete = True
        for start, stop in spans:
            if start < stop and start not in parts:
                complete = False
                part = rows.cut(call, start, stop)
                parts[start] = forward(*part.args, **part.kwargs)
        output = rows.join([parts[start] for start in sorted(parts)])
        if complete:
            self._record_split(costs, time.perf_counter() - began, call.rows, split)
        return output

    def _shares(self, costs: Costs, peers: Sequence[Peer], rows: int) -> list[int]:
        nodes = [DRIVER, *(peer.worker_id for peer in peers)]
        return plan.shares(costs, nodes, rows, everyone=self.report.mode != "auto")

    def _record_pace(self, costs: Costs, node: str, size: float, seconds: float) -> None:
        """A node's first share of a kind in a run also pays for warming up, which says nothing of its pace."""
        if (node, id(costs)) in self._warm:
            costs.record_pace(node, size, seconds)
        self._warm.add((node, id(costs)))

    def _record_split(self, costs: Costs, seconds: float, size: int, split: bool) -> None:
        """A forward of `size` rows (or conditionings) was shared out; `split` says whether any went to a worker."""
        costs.record_split(seconds)
        alone = costs.alone_estimate(size, DRIVER)
        if not split:
            self.report.add_reason("the workers are too slow to get a share")
        elif alone is not None:
            self.report.split_seconds += seconds
            self.report.alone_seconds += alone

    # --- tokens ---------------------------------------------------------------------------------------------------

    def _by_tokens(self, forward: Forward, call: Call, tokens: TokenRun) -> Any:
        if tokens.refused:
            self.report.add_reason(tokens.refused)
            return forward(*call.args, **call.kwargs)
        plain = self._plain(call)
        peers = self._ready_peers() if plain else []
        if plain is None or not peers:
            return forward(*call.args, **call.kwargs)
        costs = self._costs(peers, ("tokens", _shapes(call)))
        if not all((self._model, peer.worker_id, "tokens") in _agreed for peer in peers):
            return self._prove_tokens(forward, call, plain, peers, costs, tokens)
        if self.report.mode == "auto":
            if not plan.pays(costs, 1, DRIVER):
                self.report.add_reason("splitting is not faster here")
                return forward(*call.args, **call.kwargs)
            if plan.wants_measure_alone(costs):
                return self._alone(forward, call, costs)
        output = self._split_tokens(forward, call, plain, peers, costs, tokens)
        if output is None:
            return forward(*call.args, **call.kwargs)
        self.report.forwards_split += 1
        return output

    def _prove_tokens(
        self, forward: Forward, call: Call, plain: Call, peers: list[Peer], costs: Costs, tokens: TokenRun
    ) -> Any:
        """Compute a forward here, and then again by tokens: only a split that was seen to be right is used."""
        try:
            began = time.perf_counter()
            expected, volume = tokens.measure(forward, call)
            synchronize(expected)
            alone = time.perf_counter() - began
            costs.record_alone(alone, first_of_run=self.report.forwards == 1)
        except NotSplittable as error:
            tokens.refused = str(error)
            return self._by_tokens(forward, call, tokens)
        if self.report.mode == "auto" and not self._link_pays(tokens, volume, alone, peers, device_of(call.args[0])):
            return expected
        output = self._split_tokens(forward, call, plain, peers, costs, tokens)
        if output is not None:
            difference = relative_difference(output, expected)
            if difference <= tolerance(expected):
                _agreed.update((self._model, peer.worker_id, "tokens") for peer in peers)
            else:
                tokens.refused = (
                    f"the machines together compute something else than this one (relative difference "
                    f"{difference:.1e}); check that all have the same software and model file"
                )
                self.report.add_event(tokens.refused)
        return expected

    def _link_pays(
        self, tokens: TokenRun, volume: Volume, alone: float, peers: list[Peer], device: torch.device
    ) -> bool:
        with self._exchange_failures(tokens):
            link = tokens.join(peers, device)
            if link.predict(volume, alone, len(peers) + 1) <= limits.WORTHWHILE_RATIO * alone:
                return True
            tokens.refused = (
                f"a token split would not be faster over this link: {link.rate / 1e9:.2g} GB/s for "
                f"{volume.bytes / 1e9:.2g} GB per forward, which takes {alone:.2g} s here"
            )
            self.report.add_reason(tokens.refused)
        return False

    def _split_tokens(
        self, forward: Forward, call: Call, plain: Call, peers: list[Peer], costs: Costs, tokens: TokenRun
    ) -> Any:
        """The output of a forward computed by tokens, or None if that did not work out."""
        for peer, part, seconds in tokens.heard():
            self._record_pace(costs, peer.worker_id, part, seconds)
        parts = plan.fractions(costs, [DRIVER, *(peer.worker_id for peer in peers)])
        with self._exchange_failures(tokens):
            done = tokens.forward(forward, call, plain, peers, parts)
            self._record_pace(costs, DRIVER, done.parts[0], done.busy)
            self.report.split, self.report.rows = "tokens", {}
            self.report.tokens = dict(zip([DRIVER, *(peer.name for peer in peers)], done.parts, strict=True))
            self.report.waiting += done.waiting
            self._record_split(costs, done.seconds, 1, True)
            return done.output
        return None

    @contextlib.contextmanager
    def _exchange_failures(self, tokens: TokenRun) -> Iterator[None]:
        """What can go wrong between the machines ends a split, not the render."""
        try:
            yield
        except PeerLost as lost:
            self.report.add_event(str(lost))
            tokens.close()
            self._release(lost.peer, cancel=True)
        except ExchangeFailed as error:
            self.report.add_event(str(error))
            tokens.failed(str(error))
        except NotSplittable as error:
            self.report.add_reason(str(error))
            tokens.refused = str(error)

    # --- conditionings side by side -------------------------------------------------------------------------------

    def conditionings(self, calls: Sequence[Callable[[], Any]], stock: Callable[[], Any], shape: Hashable) -> list[Any]:
        """Results of `calls`, each of which computes one conditioning in forwards of its own, side by side.

        `stock()` computes them all here and gives the same list; `shape` says which forwards cost alike.
        """
        self._begin_time()
        self._conditionings.apart = True
        self._look_at_peers()
        peers = self._ready_peers()
        if not peers or self._unproven(peers):
            return stock()
        costs = self._costs(peers, ("conditionings", len(calls), shape))
        if self.report.mode == "auto":
            if not plan.pays(costs, len(calls), DRIVER):
                self.report.add_reason("splitting is not faster here")
                return self._conditionings.all_here(stock)
            if plan.wants_measure_alone(costs):
                began = time.perf_counter()
                results = self._conditionings.all_here(stock)
                synchronize(results)
                costs.record_alone(time.perf_counter() - began, first_of_run=False)
                return results
        return self._side_by_side(calls, peers, costs)

    def _side_by_side(self, calls: Sequence[Callable[[], Any]], peers: list[Peer], costs: Costs) -> list[Any]:
        began, forwards = time.perf_counter(), self.report.forwards
        shares = self._shares(costs, peers, len(calls))
        spans = _spans(shares)
        nodes = [
            (peer, calls[start:stop]) for peer, (start, stop) in zip(peers, spans[1:], strict=True) if start < stop
        ]
        with self._conditionings.open(nodes) as branches:
            local_began = time.perf_counter()
            results = [call() for call in calls[: shares[0]]]
            synchronize(results)
            self._record_pace(costs, DRIVER, shares[0], time.perf_counter() - local_began)
            waited = time.perf_counter()
            for branch in branches:
                results += branch.finish()
            self.report.waiting += time.perf_counter() - waited
        seconds = time.perf_counter() - began
        for branch in branches:
            if branch.remote and branch.peer in self._peers:
                self._record_pace(costs, branch.peer.worker_id, branch.conditionings, branch.seconds)
        split = any(branch.remote for branch in branches)
        if split:
            self.report.forwards_split += self.report.forwards - forwards
            self.report.split = "conditionings"
            self.report.rows = {DRIVER: shares[0], **{b.peer.name: b.conditionings for b in branches if b.remote}}
        if (split or not branches) and all(branch.peer in self._peers for branch in branches):
            self._record_split(costs, seconds, len(calls), split)
        return results

    def _forward_in_branch(self, forward: Forward, call: Call, branch: PeerBranch) -> Any:
        plain = self._plain(call) if branch.peer in self._peers else None
        if plain is not None:
            with self._released_on_failure(branch.peer):
                ticket = branch.peer.start(rows.cut(plain, 0, plain.rows))
                branch.park(ticket)
                share = branch.peer.finish(ticket)
                if rows.row_count(share.output) != call.rows:
                    raise PeerFailed(f"{branch.peer.name} gave an output of another shape than was asked for")
                branch.remote += 1
                branch.seconds += share.seconds
                return on_device(share.output, call.args[0])
        return forward(*call.args, **call.kwargs)


def _spans(shares: Sequence[int]) -> list[tuple[int, int]]:
    """[start, stop) of each share when they follow one another."""
    return [(sum(shares[:i]), sum(shares[: i + 1])) for i in range(len(shares))]


def _timed(forward: Forward, call: Call) -> tuple[Any, float]:
    began = time.perf_counter()
    output = forward(*call.args, **call.kwargs)
    synchronize(output)
    return output, time.perf_counter() - began


def _shapes(call: Call) -> Hashable:
    context = call.kwargs.get("context")
    return (
        tuple(tuple(tensor.shape) for tensor in tensors(call.args[0])),
        tuple(context.shape) if isinstance(context, torch.Tensor) else None,
    )
