"""Token splits of one run on the driver: joins the workers, starts each forward everywhere, watches over them.

What is computed how is tokens' business; whether a split pays, and what is done after a loss, is session's.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import limits
from .auth import ExchangeKeys
from .channel import ChannelLost, reach
from .cluster import LANES, Cluster
from .codec import pack_plain
from .exchange import Exchange, ExchangeFailed, probe
from .exchange_group import available_backends
from .exchange_link import SECRET_BYTES
from .families import Family
from .invitation import Invitation, join
from .outputs import device_of, synchronize
from .peer import ExchangeOffer, Peer, PeerFailed
from .rows import Call
from .tokens import TokenSplit
from .volume import Volume, measure


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
class _Started:
    """What a worker was asked for, by the number of the message, and its part of the tokens of a forward of a kind."""

    peer: Peer
    number: int
    part: float
    kind: Any


@dataclass(frozen=True)
class Link:
    """What an exchange was measured to be: seconds of a tiny operation, bytes per second that come in."""

    engine: str
    trip: float
    rate: float

    def predict(self, computing: float, swapped_bytes: int, exchanges: int, ranks: int) -> float:
        """Seconds of a forward by tokens of which each rank computes `computing`, if nothing overlaps.

        swapped_bytes: keys, values and hidden states of all tokens, of which each rank lacks those of the others.
        """
        return computing + exchanges * self.trip + swapped_bytes * (1 - 1 / ranks) / self.rate


# Parts that differ by less stay as they are.
_STEADY = 0.01
# Part of a rank's computing that exchanges have to take for overlapping the two to be worth it.
_OVERLAP_FROM = 0.05
# What an engine needs of each machine.
_NEEDS = {"nccl": "an NVIDIA GPU and a PyTorch with NCCL", "gloo": "computing on the CPU and a PyTorch with Gloo"}
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
        # What its lanes are encrypted with.
        self._keys: ExchangeKeys | None = None
        self.compress = cluster.compress != "off"
        self.link: Link | None = None
        # Of exchanges that are closed.
        self._traffic = (0, 0)
        self._number = 0
        self._failures = 0
        self._parts: tuple[float, ...] = ()
        # What all ranks agreed upon for forwards of certain parts and shapes.
        self._plans: dict[Hashable, str | None] = {}
        # Forwards whose workers have not said yet how long they took.
        self._unheard: list[_Started] = []

    @property
    def traffic(self) -> tuple[int, int]:
        """(bytes sent, bytes received) between this machine and the others by exchanges."""
        sent, received = self._traffic
        if self._exchange is None:
            return sent, received
        return sent + self._exchange.sent_bytes, received + self._exchange.received_bytes

    def measure(self, forward: Callable[..., Any], call: Call) -> tuple[Any, Volume]:
        """The output of a forward computed here alone, and what its ranks would have to swap. Raises NotSplittable."""
        assert self._family is not None
        return measure(self._family, self._model, forward, call.args, call.kwargs, compress=self.compress)

    def overlaps(self, swapped_bytes: int, alone: float | None, ranks: int) -> bool:
        """Whether ranks attend to their own tokens while the others' are on their way: exact only up to rounding.

        swapped_bytes, alone: of a forward, all its ranks' bytes and the seconds it takes one machine, where known.
        """
        if self._cluster.overlap != "auto" or self.link is None or not alone:
            return self._cluster.overlap == "on"
        exchanging = swapped_bytes * (1 - 1 / ranks) / self.link.rate
        return exchanging > _OVERLAP_FROM * alone / ranks

    def join(self, peers: Sequence[Peer], device: torch.device) -> Link:
        """Join these workers for tensors on `device`, if that is not done yet. Raises PeerLost and ExchangeFailed."""
        if self.link is None or self._joined != list(peers):
            self.close()
            self._joined = list(peers)
            self.link = self._join_best(device)
        return self.link

    def _join_best(self, device: torch.device) -> Link:
        """Join by the engine that was the fastest in an earlier run, or try all that are possible."""
        backends = self._backends(device)
        self._keys = ExchangeKeys.new(encrypted=not self._private)
        offers = []
        for peer in self._joined:
            with _of(peer):
                offers.append(peer.open_exchange(store=bool(backends) and not offers, keys=self._keys))
        engines = self._engines(offers, backends)
        who = tuple(peer.worker_id for peer in self._joined)
        if _fastest.get(who) in engines:
            return self._join(_fastest[who], offers, device)
        links: dict[str, Link] = {}
        problems = []
        for engine in engines:
            try:
                links[engine] = self._join(engine, offers, device)
            except ExchangeFailed as error:
                problems.append(f"{engine}: {error}")
        if not links:
            raise ExchangeFailed("; ".join(problems))
        for problem in problems:
            self._on_event(problem)
        best = max(links, key=lambda engine: links[engine].rate)
        _fastest[who] = best
        return links[best] if best == engines[-1] else self._join(best, offers, device)

    @property
    def _private(self) -> bool:
        """Whether tokens may cross the links between all these machines in the clear."""
        # The loopback may be the end of a tunnel; a worker with this user's own key is on this machine.
        return all(
            self._cluster.trusts(peer.addresses[0]) or (peer.is_own and peer.addresses[0].is_loopback)
            for peer in self._joined
        )

    def _backends(self, device: torch.device) -> tuple[str, ...]:
        """Process groups that may be used: tokens cross them in the clear, between ports that ask nobody's name."""
        wanted, private = self._cluster.exchange, self._private
        if wanted == LANES:
            return ()
        if wanted != "auto" and not private:
            raise ExchangeFailed(f"an exchange over {wanted} is only for a trusted_link; see the configuration")
        # Gloo has nothing that lanes have not.
        able = [name for name in available_backends(device) if name == (wanted if wanted != "auto" else "nccl")]
        return tuple(able) if private else ()

    def _engines(self, offers: Sequence[ExchangeOffer], backends: Sequence[str]) -> list[str]:
        common = [backend for backend in backends if all(backend in offer.backends for offer in offers)]
        wanted = self._cluster.exchange
        if wanted in ("auto", LANES):
            return [LANES, *common]
        if not common:
            lacking = [
                peer.name for peer, offer in zip(self._joined, offers, strict=True) if wanted not in offer.backends
            ]
            who = " and ".join(lacking if wanted in backends else ["this machine", *lacking])
            raise ExchangeFailed(
                f"an exchange over {wanted} takes {_NEEDS[wanted]} on every machine, which is not so on {who}; "
                'write exchange = "auto" into the configuration'
            )
        return common

    def _join(self, engine: str, offers: Sequence[ExchangeOffer], device: torch.device) -> Link:
        assert self._family is not None
        self._leave()
        hosts = [_reachable(offer.host, offer.port if engine == LANES else offer.store_port) for offer in offers[:1]]
        hosts += [_reachable(offer.host, offer.port) for offer in offers[1:]]
        if len({ipaddress.ip_address(host.partition("%")[0]).is_loopback for host in hosts}) > 1:
            raise ExchangeFailed("workers on this machine or behind a tunnel cannot be reached by those elsewhere")
        addresses = (None, *((host, offer.port) for host, offer in zip(hosts, offers, strict=True)))
        store = None if engine == LANES else (hosts[0], offers[0].store_port)
        secret = os.urandom(SECRET_BYTES)
        self._number += 1
        tickets: list[_Started] = []
        try:
            for rank, peer in enumerate(self._joined, start=1):
                body = {**Invitation(engine, rank, addresses, secret, store).as_dict(), "number": self._number}
                with _of(peer):
                    tickets.append(_Started(peer, peer.start_joining(body), 0.0, None))
            check = self._watch(tickets, joining=True)
            invitation = Invitation(engine, 0, addresses, secret, store)
            self._exchange = join(invitation, device, check, keys=self._keys)
            self._exchange.check = check
            trip, rate = probe(self._exchange, device)
            for ticket in tickets:
                with _of(ticket.peer):
                    problem = ticket.peer.joined(ticket.number)
                if problem is not None:
                    raise ExchangeFailed(problem)
        except BaseException:
            self._abandon(tickets)
            raise
        self._split = TokenSplit(self._family, self._exchange)
        return Link(engine, trip, rate)

    def _abandon(self, started: Sequence[_Started]) -> None:
        """Have workers give up what they were last asked for."""
        for each in started:
            with contextlib.suppress(PeerFailed):
                each.peer.abandon(self._number)

    def forward(
        self,
        forward: Callable[..., Any],
        call: Call,
        plain: Call,
        peers: Sequence[Peer],
        parts: Sequence[float],
        *,
        kind: Any,
        overlap: bool,
    ) -> TokenForward:
        """Compute a forward, `parts` of its tokens on this machine and each of the peers.

        `plain` is the call as it travels; `kind` comes back with what `heard` tells of it; `overlap`: see TokenSplit.
        Raises NotSplittable, PeerLost, ExchangeFailed and what the forward raises.
        """
        self.join(peers, device_of(call.args[0]))
        assert self._exchange is not None
        assert self._split is not None
        parts = self._steady(parts)
        alike = (tuple(parts), overlap, _shapes(plain))
        self._number += 1
        agreed = self._plans.get(alike)
        how = {"overlap": overlap, "compress": self.compress}
        plan = {"shares": list(parts), "number": self._number, "agreed": agreed, **how}
        began, waited = time.perf_counter(), self._exchange.waiting
        started: list[_Started] = []
        try:
            for peer, part in zip(peers, parts[1:], strict=True):
                with _of(peer):
                    started.append(_Started(peer, peer.start(plain, plan), part, kind))
            self._exchange.check = self._watch(started)
            # What sending took is no sign of a slow machine.
            computing = time.perf_counter()
            output = self._split.run(self._model, forward, call.args, call.kwargs, parts, self._number, agreed, **how)
            synchronize(output)
            self._plans[alike] = self._split.plan
        except BaseException:
            self._abandon(started)
            raise
        ended, waiting = time.perf_counter(), self._exchange.waiting - waited
        self._unheard += started
        return TokenForward(output, tuple(parts), ended - began, ended - computing - waiting, waiting)

    def _steady(self, parts: Sequence[float]) -> Sequence[float]:
        """The parts of the last forward, unless others would be clearly better: new parts have to be agreed upon."""
        same = len(parts) == len(self._parts)
        if not same or max(abs(new - old) for new, old in zip(parts, self._parts, strict=True)) > _STEADY:
            self._parts = tuple(parts)
        return self._parts

    def heard(self) -> list[tuple[Any, Peer, float, float]]:
        """(kind, peer, part of the tokens, seconds) of earlier forwards that workers have reported on since."""
        news, self._unheard, waiting = [], [], self._unheard
        for each in waiting:
            with contextlib.suppress(PeerFailed):
                seconds = each.peer.outcome(each.number)
                if seconds is None:
                    self._unheard.append(each)
                else:
                    news.append((each.kind, each.peer, each.part, seconds))
        return news

    def failed(self, why: str) -> None:
        """An exchange went wrong. It is tried once more, from the start."""
        _fastest.pop(tuple(peer.worker_id for peer in self._joined), None)
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

    def _watch(self, started: Sequence[_Started], *, joining: bool = False) -> Callable[[], None]:
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
            for each in started:
                problem = each.peer.failure(each.number)
                if problem is not None and joining:
                    raise ExchangeFailed(problem)
                if problem is not None:
                    raise PeerLost(each.peer, problem)

        return check


def _shapes(call: Call) -> Hashable:
    """What the streams of a forward follow from, as far as it is known before it runs; `call` is plain."""
    _, found = pack_plain([list(call.args), {**call.kwargs, "transformer_options": None}], "forward")
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in found)


def _reachable(host: str, port: int) -> str:
    """The IP address of `host` that answers. Raises ExchangeFailed at once where joining would wait for its limit."""
    try:
        return reach(host, port, f"{host}:{port}")
    except ChannelLost as error:
        raise ExchangeFailed(f"the token split needs a port of its own, but {error}") from None


@contextlib.contextmanager
def _of(peer: Peer) -> Any:
    try:
        yield
    except PeerFailed as error:
        raise PeerLost(peer, str(error)) from None
