"""Who may talk to whom: this machine's own key pair, and the machines it is paired with. Both lie in private files.

One key pair serves as the worker's server key and as the driver's client key (CURVE, 32 bytes, written as Z85).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import zmq

from .addresses import Address, AddressError, parse_address
from .folders import configuration_folder, write_private

KEY_LENGTH = 40
# Of the sockets that admission answers for.
DOMAIN = b"monarch"
# Who a client is, as a socket tells it once admission has let it in: this user, or somebody with a pairing code (before
# the key that goes with it); else the key of a paired driver, in Z85.
OWN, PAIRING = "own", "pairing "


class AuthError(Exception):
    """Keys or pairings cannot be used; the message says which, why, and what to do."""


@dataclass(frozen=True)
class KeyPair:
    """A CURVE key pair in Z85."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def new(cls) -> KeyPair:
        return cls(*zmq.curve_keypair())

    @classmethod
    def of_secret(cls, secret: bytes) -> KeyPair:
        """The pair of a secret key in Z85. Raises ValueError for anything else."""
        try:
            return cls(zmq.curve_public(secret), secret)
        except zmq.ZMQError:
            raise ValueError("this is no secret key") from None


@dataclass(frozen=True)
class ChannelKeys:
    """What a driver needs to reach a worker: its own pair and the key that the worker has to prove."""

    own: KeyPair
    server: bytes


@dataclass(frozen=True)
class ExchangeKeys:
    """What the ranks of one exchange have and nobody else, made by the driver for it alone.

    encrypted: all they say is, with this pair; else the pair's secret is only what each has to show before it is heard.
    """

    pair: KeyPair
    encrypted: bool

    @classmethod
    def new(cls, *, encrypted: bool) -> ExchangeKeys:
        return cls(KeyPair.new(), encrypted)


@dataclass(frozen=True)
class KnownWorker:
    """How to reach a worker: by which keys (None: in the clear, for measurements), and at which addresses besides."""

    keys: ChannelKeys | None
    others: tuple[Address, ...] = ()


@dataclass(frozen=True)
class Paired:
    """A machine that this one is paired with. addresses: of a worker, the first preferred; a driver has none."""

    name: str
    key: bytes
    addresses: tuple[Address, ...] = ()
    since: float = field(default_factory=time.time)


def own_identity() -> KeyPair:
    """This machine's own key pair; made when it is first needed. Raises AuthError."""
    path = configuration_folder() / "identity.json"
    try:
        if not path.exists():
            pair = KeyPair.new()
            text = json.dumps({"public": pair.public.decode(), "secret": pair.secret.decode()}) + "\n"
            write_private(path, text, replace=False)
        text = private_text(path, secret=True)
        pair = KeyPair.of_secret(json.loads(text)["secret"].encode())
    except OSError as error:
        raise AuthError(f"the key in {path} cannot be read or written ({error.strerror or error})") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise AuthError(f"{path} does not hold a key pair; remove it and pair the machines again") from None
    return pair


def private_text(path: Path, *, secret: bool = False) -> str:
    """A file that says who may do what. Raises AuthError if others can write it, or read what is secret; OSError."""
    with path.open(encoding="utf-8") as file:
        others = os.fstat(file.fileno()).st_mode & (0o077 if secret else 0o022)
        if others and os.name != "nt":
            what = "read the secret key in" if secret else "change"
            raise AuthError(f"others can {what} {path}; make it private with: chmod 600 {path}")
        return file.read()


class Pairings:
    """The machines that this one is paired with: drivers that it serves, and workers that it uses."""

    def __init__(self, drivers: tuple[Paired, ...] = (), workers: tuple[Paired, ...] = ()) -> None:
        self.drivers = drivers
        self.workers = workers

    @staticmethod
    def path() -> Path:
        return configuration_folder() / "pairings.json"

    @classmethod
    def load(cls) -> Pairings:
        """What the file says; a missing file holds none. Raises AuthError if it cannot be used."""
        path = cls.path()
        try:
            data = json.loads(private_text(path))
            return cls(*(tuple(_paired(entry) for entry in data[role]) for role in ("drivers", "workers")))
        except FileNotFoundError:
            return cls()
        except OSError as error:
            raise AuthError(f"{path} cannot be read ({error.strerror or error})") from None
        except (ValueError, KeyError, TypeError):
            raise AuthError(f"{path} does not hold pairings; remove it and pair the machines again") from None

    def worker_at(self, address: Address) -> Paired | None:
        return next((worker for worker in self.workers if address in worker.addresses), None)

    def driver_of(self, key: bytes) -> Paired | None:
        return next((driver for driver in self.drivers if driver.key == key), None)

    @classmethod
    def add_driver(cls, driver: Paired) -> Paired:
        """Serve a driver from now on; its name becomes unique. Raises AuthError."""

        def add(old: Pairings) -> Pairings:
            others = tuple(each for each in old.drivers if each.key != driver.key)
            return cls((*others, _named_apart(driver, others)), old.workers)

        return cls._change(add).drivers[-1]

    @classmethod
    def add_worker(cls, worker: Paired) -> Paired:
        """Use a worker from now on, in place of what was known of its key and addresses; its name becomes unique.

        Raises AuthError.
        """

        def add(old: Pairings) -> Pairings:
            taken = set(worker.addresses)
            others = [
                replace(each, addresses=tuple(address for address in each.addresses if address not in taken))
                for each in old.workers
                if each.key != worker.key
            ]
            others = [each for each in others if each.addresses]
            return cls(old.drivers, (*others, _named_apart(worker, others)))

        return cls._change(add).workers[-1]

    @classmethod
    def remove(cls, name: str) -> list[str]:
        """Forget all machines of this name. Returns what they were ("worker", "driver"). Raises AuthError."""
        roles: list[str] = []

        def without(old: Pairings) -> Pairings:
            for role, each in (*(("driver", each) for each in old.drivers), *(("worker", w) for w in old.workers)):
                roles.extend([role] if each.name == name else [])
            return cls(
                tuple(each for each in old.drivers if each.name != name),
                tuple(each for each in old.workers if each.name != name),
            )

        cls._change(without)
        return roles

    @classmethod
    def _change(cls, change: Callable[[Pairings], Pairings]) -> Pairings:
        path = cls.path()
        with _locked(path):
            new = change(cls.load())
            data = {
                "drivers": [_entry(each) for each in new.drivers],
                "workers": [_entry(each) for each in new.workers],
            }
            try:
                write_private(path, json.dumps(data, indent=2) + "\n")
            except OSError as error:
                raise AuthError(f"{path} cannot be written ({error.strerror or error})") from None
        return new


def _named_apart(machine: Paired, others: Sequence[Paired]) -> Paired:
    names, number = {each.name for each in others}, 2
    named = machine
    while named.name in names:
        named = replace(machine, name=f"{machine.name} ({number})")
        number += 1
    return named


def known_worker(address: Address) -> KnownWorker:
    """What is needed to reach the worker at this address. Raises AuthError if this machine is not paired with it.

    A worker on the loopback that is not paired is taken for this user's own: it has the same configuration folder.
    """
    own, pairings = own_identity(), Pairings.load()
    as_written = [address]
    # A name may stand for an address that the worker gave.
    for known in as_written if pairings.worker_at(address) else as_written + _resolved(address):
        worker = pairings.worker_at(known)
        if worker is not None:
            others = tuple(other for other in worker.addresses if other not in (address, known))
            return KnownWorker(ChannelKeys(own, worker.key), others)
        if known.is_loopback:
            return KnownWorker(ChannelKeys(own, own.public))
    raise AuthError(
        f"this machine is not paired with the worker at {address}; "
        "start the worker there with --pair, and give its code to `monarch pair` here"
    )


def _resolved(address: Address) -> list[Address]:
    """A worker's address with its name looked up. Raises AuthError if nobody knows it."""
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except (OSError, ValueError):  # ValueError: no name at all, such as one with empty or overlong labels
        raise AuthError(f"the name {address.host!r} is not known; check the address in the configuration") from None
    return [Address(str(target[0]), address.port) for *_, target in found]


def _paired(entry: dict[str, Any]) -> Paired:
    key = str(entry["key"]).encode()
    if len(key) != KEY_LENGTH:
        raise ValueError("no key")
    try:
        addresses = tuple(parse_address(text) for text in entry.get("addresses", ()))
    except AddressError as error:
        raise ValueError(str(error)) from None
    return Paired(str(entry["name"]), key, addresses, float(entry["since"]))


def _entry(each: Paired) -> dict[str, Any]:
    return {**vars(each), "key": each.key.decode(), "addresses": [str(address) for address in each.addresses]}


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Only one process changes the file at a time (on Windows, the last one wins)."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(path.with_suffix(".lock"), os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as error:
        raise AuthError(f"{path} cannot be written ({error.strerror or error})") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:  # some network file systems have no locks
            raise AuthError(f"{path} cannot be locked ({error.strerror or error})") from None
        yield
    finally:
        os.close(lock)
