"""The worker's part in token splits: joins the other ranks and computes its tokens. For the compute thread alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .auth import ExchangeKeys
from .codec import ProtocolError
from .exchange import Exchange, probe
from .exchange_group import available_backends, host_store
from .exchange_link import ExchangeListener
from .invitation import Invitation, join
from .runtime import Replica
from .tokens import TokenSplit


class TokenRank:
    """This worker as a rank of one driver's token splits, and the port that its exchanges come in by."""

    def __init__(self, hosts: Sequence[str], port: int) -> None:
        """Nothing listens before a driver asks for it; `port` is taken if it is free."""
        self._hosts = hosts
        self._port = port
        self._listener: ExchangeListener | None = None
        # Dropped once nobody needs it to join any more.
        self._store: Any = None
        self._exchange: Exchange | None = None
        self._split: TokenSplit | None = None

    def open(self, replica: Replica | None, *, store: bool, keys: ExchangeKeys) -> dict[str, Any]:
        """Where ranks with these keys can meet this one, and by what; with a `store` where process groups meet."""
        # The others may greet before their invitation is read here: what closes an exchange later would drop that.
        self.leave()
        if replica is None:
            raise ProtocolError("a token split was asked for before a model was ready")
        if self._listener is None or self._listener.keys != keys:
            self._close_listener()
            self._listener = ExchangeListener(self._hosts, self._port, keys)
        self._store = host_store(self._hosts[0]) if store else None
        port = self._store.port if self._store is not None else 0
        backends = list(available_backends(replica.device))
        return {"port": self._listener.port, "store_port": port, "backends": backends}

    def join(
        self, body: Mapping[str, Any], replica: Replica | None, check: Callable[[], None], *, local: bool
    ) -> dict[str, Any]:
        """Become the rank that an EXCHANGE_JOIN says. Raises ExchangeFailed, and ProtocolError for nonsense.

        local: the driver is on this machine, too, and may name ranks on its loopback.
        """
        self.leave()
        if self._listener is None or replica is None or replica.family is None:
            raise ProtocolError("a token split was asked for that is not possible here")
        invitation = Invitation.from_message(body)
        if invitation.names_loopback and not local:
            raise ProtocolError("a token split would have this machine connect to itself")
        self._exchange = join(invitation, replica.device, check, listener=self._listener)
        self._exchange.check = check
        probe(self._exchange, replica.device)
        self._split = TokenSplit(replica.family, self._exchange)
        return {}

    def forward(self, model: Any, args: Any, kwargs: Any, plan: Mapping[str, Any], check: Callable[[], None]) -> float:
        """Compute this rank's tokens of a forward. Returns the seconds spent waiting for the others."""
        if self._split is None or self._exchange is None:
            raise ProtocolError("a forward by tokens came before the machines were joined")
        self._store = None  # all have met
        self._exchange.check = check
        waited = self._exchange.waiting
        shares = checked_shares(plan["shares"], self._exchange.size)
        number, agreed = int(plan["number"]), plan["agreed"]
        agreed = None if agreed is None else str(agreed)
        how = {"overlap": bool(plan["overlap"]), "compress": bool(plan["compress"])}
        self._split.run(model, model, args, kwargs, shares, number, agreed, **how)
        return self._exchange.waiting - waited

    def leave(self) -> None:
        """Close the exchange, and give back its memory."""
        if self._exchange is not None:
            self._exchange.close()
        self._exchange = self._split = None

    def forget(self) -> None:
        """The driver is gone. Nothing listens until another one asks for it."""
        self.leave()
        self._store = None
        self._close_listener()

    def close(self) -> None:
        self.forget()

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
        self._listener = None


def checked_shares(told: Sequence[Any], ranks: int) -> list[float]:
    """The shares of a token split among so many ranks. Raises ProtocolError, and ValueError for what is no number."""
    shares = [float(share) for share in told]
    if len(shares) != ranks or not all(0 <= share < math.inf for share in shares) or not sum(shares):
        raise ProtocolError("the shares of a token split are described wrongly")
    return shares
