"""Token splits of one run on the driver: joins the workers, starts each forward everywhere, watches over them.

What is computed how is tokens' business; whether a split pays, and what is done after a loss, is session's.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import limits
from .channel import ChannelLost, reach
from .cluster import Cluster
from .codec import pack_plain
from .exchange import Exchange, ExchangeFailed
from .exchange_group import available_backends
from .exchange_link import SECRET_BYTES, probe
from .families import Family
from .invitation import LANES, Invitation, join
from .outputs import device_of, synchronize
from .peer import ExchangeOffer, Peer, PeerFailed
from .rows import Call
from .tokens import TokenSplit, Volume, measure


class PeerLost(Exception):
    """A worker was lost in the middle of a forward by tokens."""

    def __init__(self, peer: Peer, why: str) -> None:
        super().__init__(why)
        self.peer = peer


@dataclass(frozen=True)
class TokenForward:
    """A forward computed by tokens: its output, the part of the tokens that each rank had, and seconds here."""

    output: Any
    parts: tuple[float, ...]
    seconds: float
    busy: float
    waiting: float


@dataclass(frozen=True)
class Link:
    """What an exchange was measured to be: seconds of a tiny operation, bytes per second that come in."""

    engine: str
    trip: float
    rate: float

    def predict(self, volume: Volume, alone: float, ranks: int) -> float:
        """Seconds of a forward by tokens that takes one machine `alone`, if all are alike and nothing overlaps."""
        return alone / ranks + volume.operations * self.trip + volume.bytes * (1 - 1 / ranks) / self.rate


# Parts that differ by less stay as they are.
_STEADY = 0.01
# Part of a rank's computing that exchanges have to take for overlapping the two to be worth it.
_OVERLAP_FROM = 0.05
# The fastest engine between this process and these workers, by their ids.
_fastest: dict[tuple[str, ...], str] = {}


class TokenRun:
    """The token splits of one run. `refused` says why there are no more of them."""

    def __init__(
        self,
        model: torch.nn.Module,
        family: Family | None,
        cluster: Cluster,
        check: Callable[[], None],
        on_event: Callable[[str], None],
    ) -> None:
        """check: raises to stop the run; on_event: told of what a user may want to know."""
        self.refused: str | None = None
        if family is None:
            name = type(model).__name__
            self.refused = (
                f"the tokens of {name} cannot be split, and one row (CFG 1 and batch 1) has no others to share"
            )
        self._model = model
        self._family = family
        self._cluster = cluster
        self._check = check
        self._on_event = on_event
        self._exchange: Exchange | None = None
        self._split: TokenSplit | None = None
        self._joined: list[Peer] = []
        self.link: Link | None = None
        # Of exchanges that are closed.
        self._traffic = (0, 0)
        self._number = 0
        self._failures = 0
        self._parts: tuple[float, ...] = ()
        # Of a forward that this machine computed alone.
        self._seconds_alone = 0.0
        self.volume = Volume()
        # What all ranks agreed upon for forwards of certain parts and shapes.
        self._plans: dict[Hashable, str | None] = {}
        # Forwards whose workers have not said yet how long they took: (peer, ticket, part of the tokens).
        self._unheard: list[tuple[Peer, int, float]] = []

    @property
    def traffic(self) -> tuple[int, int]:
        """(bytes sent, bytes received) between this machine and the others by exchanges."""
        sent, received = self._traffic
        if self._exchange is None:
            return sent, received
        return sent + self._exchange.sent_bytes, received + self._exchange.received_bytes

    def measure(self, forward: Callable[..., Any], call: Call) -> tuple[Any, float]:
        """(output, seconds) of a forward computed here alone; `volume` then says what its ranks would have to swap.

        Raises NotSplittable.
        """
        assert self._family is not None
        began = time.perf_counter()
        output, self.volume = measure(self._family, self._model, forward, call.args, call.kwargs)
        synchronize(output)
        self._seconds_alone = time.perf_counter() - began
        return output, self._seconds_alone

    def _overlaps(self, ranks: int) -> bool:
        """Whether ranks attend to their own tokens while the others' are on their way: exact only up to rounding."""
        if self._cluster.overlap != "auto" or self.link is None or not self._seconds_alone:
            return self._cluster.overlap == "on"
        exchanging = self.volume.bytes * (1 - 1 / ranks) / self.link.rate
        return exchanging > _OVERLAP_FROM * self._seconds_alone / ranks

    def join(self, peers: Sequence[Peer], device: torch.device) -> Link:
        """Join these workers for tensors on `device`, if that is not done yet. Raises PeerLost and ExchangeFailed."""
        if self.link is None or self._joined != list(peers):
            self.close()
            self._joined = list(peers)
            self.link = self._join_best(device)
        return self.link

    def _join_best(self, device: torch.device) -> Link:
        """Join by the engine that was the fastest in an earlier run, or try all that are possible."""
        offers = []
        for peer in self._joined:
            with _of(peer):
                offers.append(peer.open_exchange(store=self._groups_allowed and not offers))
        engines = self._engines(offers, device)
        who = tuple(peer.worker_id for peer in self._joined)
        if len(engines) == 1 or _fastest.get(who) in engines:
            return self._join(_fastest.get(who, engines[0]) if len(engines) > 1 else engines[0], offers, device)
        links: dict[str, Link] = {}
        for engine in engines:
            try:
                links[engine] = self._join(engine, offers, device)
            except ExchangeFailed as error:
                if not links:
                    raise
                self._on_event(f"{engine}: {error}")
        best = max(links, key=lambda engine: links[engine].rate)
        _fastest[who] = best
        return links[best] if best == engines[-1] else self._join(best, offers, device)

    @property
    def _groups_allowed(self) -> bool:
        """Whether tokens may travel in the clear, between ports that ask nobody who they are."""
        return self._cluster.trusted_link or all(address.is_loopback for address in self._cluster.workers)

    def _engines(self, offers: Sequence[ExchangeOffer], device: torch.device) -> list[str]:
        backends = available_backends(device) if self._groups_allowed else ()
        common = [backend for backend in backends if all(backend in offer.backends for offer in offers)]
        wanted = self._cluster.exchange
        if wanted in ("auto", LANES):
            # Gloo has nothing that lanes have not.
            return [LANES, *(backend for backend in common if backend == "nccl" and wanted == "auto")]
        if wanted not in common:
            why = "not possible between these machines" if self._groups_allowed else "only for a trusted_link"
            raise ExchangeFailed(f"the configuration asks for an exchange over {wanted}, which is {why}")
        return [wanted]

    def _join(self, engine: str, offers: Sequence[ExchangeOffer], device: torch.device) -> Link:
        assert self._family is not None
        self._leave()
        addresses = (None, *((offer.host, offer.port) for offer in offers))
        store = None if engine == LANES else (offers[0].host, offers[0].store_port)
        for host, port in {address for address in (*addresses, store) if address is not None}:
            _require_reachable(host, port)
        secret = os.urandom(SECRET_BYTES)
        tickets: list[tuple[Peer, int, float]] = []
        for rank, peer in enumerate(self._joined, start=1):
            with _of(peer):
                ticket = peer.start_joining(Invitation(engine, rank, addresses, secret, store).as_dict())
                tickets.append((peer, ticket, 0.0))
        check = self._watch(tickets)
        self._exchange = join(Invitation(engine, 0, addresses, secret, store), device, check)
        self._exchange.check = check
        trip, rate = probe(self._exchange, device)
        for peer, ticket, _ in tickets:
            with _of(peer):
                peer.joined(ticket)
        self._split = TokenSplit(self._family, self._exchange)
        return Link(engine, trip, rate)

    def forward(
        self, forward: Callable[..., Any], call: Call, plain: Call, peers: Sequence[Peer], parts: Sequence[float]
    ) -> TokenForward:
        """Compute a forward, `parts` of its tokens on this machine and each of the peers.

        `plain` is the call as it travels. Raises NotSplittable, PeerLost, ExchangeFailed and what the forward raises.
        """
        self.join(peers, device_of(call.args[0]))
        assert self._exchange is not None
        assert self._split is not None
        parts = self._steady(parts)
        alike = (tuple(parts), _shapes(plain))
        self._number += 1
        agreed, overlap = self._plans.get(alike), self._overlaps(len(parts))
        began, waited = time.perf_counter(), self._exchange.waiting
        started: list[tuple[Peer, int, float]] = []
        try:
            for peer, part in zip(peers, parts[1:], strict=True):
                with _of(peer):
                    ticket = peer.start(
                        plain, {"shares": list(parts), "number": self._number, "agreed": agreed, "overlap": overlap}
                    )
                    started.append((peer, ticket, part))
            self._exchange.check = self._watch(started)
            output = self._split.run(
                self._model, forward, call.args, call.kwargs, parts, self._number, agreed, overlap=overlap
            )
            synchronize(output)
            self._plans[alike] = self._split.plan
        except BaseException:
            for peer, _, _ in started:
                with contextlib.suppress(PeerFailed):
                    peer.abandon(self._number)
            raise
        seconds, waiting = time.perf_counter() - began, self._exchange.waiting - waited
        self._unheard += started
        return TokenForward(output, tuple(parts), seconds, seconds - waiting, waiting)

    def _steady(self, parts: Sequence[float]) -> Sequence[float]:
        """The parts of the last forward, unless others would be clearly better: new parts have to be agreed upon."""
        same = len(parts) == len(self._parts)
        if not same or max(abs(new - old) for new, old in zip(parts, self._parts, strict=True)) > _STEADY:
            self._parts = tuple(parts)
        return self._parts

    def heard(self) -> list[tuple[Peer, float, float]]:
        """(peer, part of the tokens, seconds) of earlier forwards that workers have reported on since the last call."""
        news, self._unheard, waiting = [], [], self._unheard
        for peer, ticket, part in waiting:
            with contextlib.suppress(PeerFailed):
                seconds = peer.outcome(ticket)
                if seconds is None:
                    self._unheard.append((peer, ticket, part))
                else:
                    news.append((peer, part, seconds))
        return news

    def failed(self, why: str) -> None:
        """An exchange went wrong. It is tried once more, from the start."""
        self.close()
        self._failures += 1
        if self._failures > 1:
            self.refused = why

    def close(self) -> None:
        """Leave the other ranks."""
        self._leave()
        self.link = None
        self._joined, self._unheard = [], []
        self._plans = {}

    def _leave(self) -> None:
        if self._exchange is not None:
            sent, received = self._traffic
            self._traffic = sent + self._exchange.sent_bytes, received + self._exchange.received_bytes
            self._exchange.close()
        self._exchange = self._split = None

    def _watch(self, started: Sequence[tuple[Peer, int, float]]) -> Callable[[], None]:
        """A check for the length of a forward: interrupts, and workers that are gone or give up. Cheap to call."""
        next_look = 0.0

        def check() -> None:
            nonlocal next_look
            self._check()
            if time.monotonic() < next_look:
                return
            next_look = time.monotonic() + limits.POLL_SECONDS
            for peer in self._joined:
                with _of(peer):
                    peer.look()
            for peer, ticket, _ in started:
                with _of(peer):
                    peer.raise_if_failed(ticket)

        return check


def _shapes(call: Call) -> Hashable:
    """What the streams of a forward follow from, as far as it is known before it runs; `call` is plain."""
    _, found = pack_plain([list(call.args), {**call.kwargs, "transformer_options": None}], "forward")
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in found)


def _require_reachable(host: str, port: int) -> None:
    """Raises ExchangeFailed at once where joining would wait until it gives up."""
    try:
        reach(host, port, f"{host}:{port}")
    except ChannelLost as error:
        raise ExchangeFailed(f"the token split needs a port of its own, but {error}") from None


@contextlib.contextmanager
def _of(peer: Peer) -> Any:
    try:
        yield
    except PeerFailed as error:
        raise PeerLost(peer, str(error)) from None
