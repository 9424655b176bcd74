"""What the driver tells every rank of a token split, and how a rank then joins the others by the engine it names."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from . import limits
from .addresses import is_loopback
from .auth import ExchangeKeys
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

    @property
    def names_loopback(self) -> bool:
        """Whether another rank, or their meeting place, is on the loopback of whoever joins."""
        others = [place for rank, place in enumerate(self.addresses) if rank != self.rank]
        return any(place is not None and is_loopback(place[0]) for place in (*others, self.store))

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "addresses": list(self.addresses), "secret": self.secret.hex()}

    @classmethod
    def from_message(cls, body: Mapping[str, Any]) -> Invitation:
        """The invitation of a message. Raises ProtocolError if it is none."""
        try:
            secret = bytes.fromhex(body["secret"])
            addresses = tuple(None if entry is None else _place(*entry) for entry in body["addresses"])
            store = None if body.get("store") is None else _place(*body["store"])
            invitation = cls(str(body["engine"]), body["rank"], addresses, secret, store)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ProtocolError("a token split is described wrongly") from error
        known = len(secret) == SECRET_BYTES and invitation.engine in ENGINES and type(invitation.rank) is int
        if not known or not 0 < invitation.rank < len(addresses) <= limits.MAX_RANKS:
            raise ProtocolError("a token split is described wrongly")
        return invitation


def _place(host: Any, port: Any) -> tuple[str, int]:
    """One machine's IP address and a port. Raises ValueError for what would be looked up or read as something else."""
    if not isinstance(host, str) or type(port) is not int or not 0 < port < 65536:
        raise ValueError("no address")
    ip = ipaddress.ip_address(host.partition("%")[0])
    # Each of these may be the loopback under another name.
    if ip.is_unspecified or getattr(ip, "ipv4_mapped", None) is not None:
        raise ValueError("no address of one machine")
    if re.fullmatch(r"[0-9a-fA-F:.]+(%[\w.-]+)?", host) is None:
        raise ValueError("no address")
    return host, port


def join(
    invitation: Invitation,
    device: torch.device,
    check: Callable[[], None],
    *,
    listener: ExchangeListener | None = None,
    keys: ExchangeKeys | None = None,
) -> Exchange:
    """Join the other ranks. Raises ExchangeFailed if they do not come together.

    listener: a worker's own; keys: of the workers' listeners, for the driver, who has none.
    """
    if invitation.engine != LANES:
        if invitation.store is None:
            raise ProtocolError("a process group was asked for without a place to meet")
        size = len(invitation.addresses)
        return join_group(invitation.engine, invitation.rank, size, *invitation.store, invitation.secret, device, check)
    if listener is None:
        if keys is None:
            raise ProtocolError("an exchange was asked for without its keys")
        return join_as_driver(invitation.addresses, invitation.secret, keys)
    return listener.join(invitation.rank, invitation.addresses, invitation.secret, check)
