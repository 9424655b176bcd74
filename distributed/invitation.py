"""What the driver tells every rank of a token split, and how a rank then joins the others by the engine it names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .cluster import ENGINES, LANES
from .codec import ProtocolError
from .exchange import Exchange
from .exchange_group import join_group
from .exchange_link import SECRET_BYTES, ExchangeListener, join_as_driver


@dataclass(frozen=True)
class Invitation:
    """Who is who in a token split.

    engine: one of ENGINES; addresses: (host, port) of every rank's lanes, None for the driver, who is rank 0;
    store: where process groups come together, None for lanes.
    """

    engine: str
    rank: int
    addresses: tuple[tuple[str, int] | None, ...]
    secret: bytes
    store: tuple[str, int] | None = None

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "addresses": list(self.addresses), "secret": self.secret.hex()}

    @classmethod
    def from_message(cls, body: Mapping[str, Any]) -> Invitation:
        """The invitation of a message. Raises ProtocolError if it is none."""
        try:
            secret = bytes.fromhex(body["secret"])
            addresses = tuple(None if entry is None else (str(entry[0]), int(entry[1])) for entry in body["addresses"])
            store = None if body["store"] is None else (str(body["store"][0]), int(body["store"][1]))
            invitation = cls(str(body["engine"]), int(body["rank"]), addresses, secret, store)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ProtocolError("a token split is described wrongly") from error
        if len(secret) != SECRET_BYTES or invitation.engine not in ENGINES:
            raise ProtocolError("a token split is described wrongly")
        return invitation


def join(
    invitation: Invitation,
    device: torch.device,
    check: Callable[[], None],
    listener: ExchangeListener | None = None,
) -> Exchange:
    """Join the other ranks; `listener` is a worker's own. Raises ExchangeFailed if they do not come together."""
    if invitation.engine != LANES:
        if invitation.store is None:
            raise ProtocolError("a process group was asked for without a place to meet")
        size = len(invitation.addresses)
        return join_group(invitation.engine, invitation.rank, size, *invitation.store, invitation.secret, device, check)
    if listener is None:
        return join_as_driver(invitation.addresses, invitation.secret)
    return listener.join(invitation.rank, invitation.addresses, invitation.secret, check)
