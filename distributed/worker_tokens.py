"""The worker's part in token splits: joins the other ranks and computes its tokens. For the compute thread alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .codec import ProtocolError
from .exchange import Exchange, probe
from .exchange_group import available_backends, host_store
from .exchange_link import ExchangeListener
from .invitation import Invitation, join
from .runtime import Replica
from .tokens import TokenSplit


class TokenRank:
    """This worker as a rank of one driver's token splits, and the port that its exchanges come in by."""

    def __init__(self, host: str, port: int) -> None:
        """Nothing listens before a driver asks for it; `port` is taken if it is free."""
        self._host = host
        self._port = port
        self._listener: ExchangeListener | None = None
        # Dropped once nobody needs it to join any more.
        self._store: Any = None
        self._exchange: Exchange | None = None
        self._split: TokenSplit | None = None

    def open(self, replica: Replica | None, *, store: bool) -> dict[str, Any]:
        """Where the other ranks can meet this one, and by what; with a `store` where process groups come together."""
        # The others may greet before their invitation is read here: what closes an exchange later would drop that.
        self.leave()
        if replica is None:
            raise ProtocolError("a token split was asked for before a model was ready")
        if self._listener is None:
            self._listener = ExchangeListener(self._host, self._port)
        self._store = host_store(self._host) if store else None
        port = self._store.port if self._store is not None else 0
        backends = list(available_backends(replica.device))
        return {"port": self._listener.port, "store_port": port, "backends": backends}

    def join(self, body: Mapping[str, Any], replica: Replica | None, check: Callable[[], None]) -> dict[str, Any]:
        """Become the rank that an EXCHANGE_JOIN says. Raises ExchangeFailed, and ProtocolError for nonsense."""
        self.leave()
        if self._listener is None or replica is None or replica.family is None:
            raise ProtocolError("a token split was asked for that is not possible here")
        invitation = Invitation.from_message(body)
        if not 0 < invitation.rank < len(invitation.addresses):
            raise ProtocolError("a token split is described wrongly")
        self._exchange = join(invitation, replica.device, check, self._listener)
        self._exchange.check = check
        probe(self._exchange, replica.device)
        self._split = TokenSplit(replica.family, self._exchange)
        return {}

    def forward(self, model: Any, args: Any, kwargs: Any, plan: Mapping[str, Any], check: Callable[[], None]) -> float:
        """Compute this rank's tokens of a forward. Returns the seconds spent waiting for the others."""
        if self._split is None or self._exchange is None:
            raise ProtocolError("a forward by tokens came before the machines were joined")
        self._exchange.check = check
        waited = self._exchange.waiting
        shares, number, agreed = [float(share) for share in plan["shares"]], int(plan["number"]), plan["agreed"]
        agreed, overlap = None if agreed is None else str(agreed), bool(plan["overlap"])
        self._split.run(model, model, args, kwargs, shares, number, agreed, overlap=overlap)
        return self._exchange.waiting - waited

    def leave(self) -> None:
        """Close the exchange, and give back its memory."""
        if self._exchange is not None:
            self._exchange.close()
        self._exchange = self._split = None

    def forget(self) -> None:
        """The driver is gone."""
        self.leave()
        self._store = None

    def close(self) -> None:
        self.forget()
        if self._listener is not None:
            self._listener.close()
