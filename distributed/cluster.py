"""Configuration: which workers there are, and what is allowed. One TOML file in the user's configuration folder.

Without a file, or where it lists no workers, those that this machine is paired with are used. A broken file is an error
that names it and the line.
"""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .addresses import Address, AddressError, parse_address
from .auth import AuthError, Pairings
from .folders import configuration_folder


class ConfigurationError(ValueError):
    """The configuration cannot be used; the message names the file, the cause and the next step."""


# lanes: ZeroMQ. nccl and gloo: torch.distributed, between GPUs and between CPUs. auto: the fastest that is possible.
LANES = "lanes"
ENGINES = (LANES, "nccl", "gloo")
EXCHANGES = ("auto", *ENGINES)
# off: the order of the stock forward, bit for bit. auto: off as long as the link is fast enough for that not to matter.
OVERLAPS = ("auto", "on", "off")
# fp8: the others' values in 8 bits and their keys in 16, which makes the output an approximation.
COMPRESSIONS = ("off", "fp8")


@dataclass(frozen=True)
class Cluster:
    """A named set of workers and the policy towards them. No workers: everything runs on the driver."""

    name: str
    workers: tuple[Address, ...] = ()
    allow_version_mismatch: bool = False
    # Where machines differ in what they can compute natively: "exact" has all compute alike, "speed" each its fastest.
    prefer: str = "exact"
    # Whether the cable to a worker is private, so that tokens may cross it in the clear: of those that `links` does not
    # say it of.
    trusted_link: bool = False
    links: tuple[tuple[Address, bool], ...] = ()
    # What tokens are exchanged over: one of EXCHANGES.
    exchange: str = "auto"
    # Whether attention begins before the others' tokens are here: one of OVERLAPS.
    overlap: str = "auto"
    # Whether tokens are exchanged in fewer bytes than they have: one of COMPRESSIONS.
    compress: str = "off"

    def trusts(self, worker: Address) -> bool:
        """Whether tokens may cross the link to this worker in the clear."""
        return dict(self.links).get(worker, self.trusted_link)


@dataclass(frozen=True)
class Configuration:
    """All clusters of the configuration file, and the one used by default."""

    path: Path
    exists: bool = False
    default: str = "default"
    clusters: dict[str, Cluster] = field(default_factory=dict)

    def cluster(self) -> Cluster:
        """The cluster to use. Raises ConfigurationError if the file names one that it does not hold."""
        if self.default in self.clusters:
            return self.clusters[self.default]
        if not self.clusters:
            return Cluster(self.default, _paired_workers(self.path))
        known = ", ".join(self.clusters)
        raise ConfigurationError(
            f"{self.path} has no cluster {self.default!r} (it has: {known}); name one of them in a line such as "
            f'default = "{next(iter(self.clusters))}".'
        )


def configuration_file() -> Path:
    return configuration_folder() / "monarch.toml"


def load_configuration(path: Path | None = None) -> Configuration:
    """Read the configuration. Raises ConfigurationError for a file that cannot be used."""
    file = path or configuration_file()
    try:
        text = file.read_text(encoding="utf-8-sig")  # Notepad writes the signature
    except FileNotFoundError:
        return Configuration(file)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file} cannot be read ({error}); correct it or remove it.") from None
    toml = _parser(file)
    try:
        data = toml.loads(text)
    except toml.TOMLDecodeError as error:
        raise ConfigurationError(f"{file} is not valid TOML: {error}. Correct it or remove it.") from None
    default = data.get("default", "default")
    tables = data.get("clusters", {})
    if not isinstance(default, str) or not isinstance(tables, dict):
        raise ConfigurationError(f'{file}: "default" is a name and "clusters" a table; see the README for an example.')
    _refuse_unknown(data, {"default", "clusters"}, f"{file} has", "; a cluster is a table [clusters.<name>]")
    clusters = {name: _cluster(file, name, table) for name, table in tables.items()}
    return Configuration(file, True, default, clusters)


def _parser(file: Path) -> Any:
    """Python's own since 3.11; before that, the package it came from, which pip carries too."""
    for name in ("tomllib", "tomli", "pip._vendor.tomli"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    raise ConfigurationError(f"{file} cannot be read by this Python without tomli; pip install tomli, or remove it.")


def _cluster(file: Path, name: str, table: Any) -> Cluster:
    known = {"workers", "allow_version_mismatch", "prefer", "trusted_link", "exchange", "overlap", "compress"}
    if not isinstance(table, dict) or not isinstance(table.get("workers", []), list):
        raise ConfigurationError(f'{file}: cluster {name!r} needs a list, such as workers = ["127.0.0.1:7690"].')
    _refuse_unknown(table, known, f"{file}: cluster {name!r} has")
    flags = {key: table.get(key, False) for key in ("allow_version_mismatch", "trusted_link")}
    for key, value in flags.items():
        if not isinstance(value, bool):
            raise ConfigurationError(f"{file}: {key} of cluster {name!r} is true or false.")
    choices = {"exchange": EXCHANGES, "overlap": OVERLAPS, "compress": COMPRESSIONS, "prefer": ("exact", "speed")}
    chosen = {key: table.get(key, values[0]) for key, values in choices.items()}
    for key, value in chosen.items():
        if value not in choices[key]:
            listed = ", ".join(f'"{choice}"' for choice in choices[key])
            raise ConfigurationError(f"{file}: {key} of cluster {name!r} is one of {listed}.")
    if "workers" not in table:
        return Cluster(name, _paired_workers(file), **chosen, **flags)
    listed = [_worker(file, name, entry) for entry in table["workers"]]
    links = tuple((address, trusted) for address, trusted in listed if trusted is not None)
    return Cluster(name, tuple(address for address, _ in listed), links=links, **chosen, **flags)


def _worker(file: Path, name: str, entry: Any) -> tuple[Address, bool | None]:
    """A worker's address, and whether its link is trusted; None if that is not said of it alone."""
    table = entry if isinstance(entry, dict) else {"address": entry}
    _refuse_unknown(table, {"address", "trusted_link"}, f"{file}: a worker of cluster {name!r} has")
    if "address" not in table:
        raise ConfigurationError(f'{file}: a worker of cluster {name!r} needs an address = "host:port".')
    try:
        address = parse_address(table["address"])
    except AddressError as error:
        raise ConfigurationError(f"{file}: {error}") from None
    trusted = table.get("trusted_link")
    if not isinstance(trusted, bool | None):
        raise ConfigurationError(f"{file}: trusted_link of the worker {address} is true or false.")
    return address, trusted


def _refuse_unknown(table: dict[str, Any], known: set[str], who: str, more: str = "") -> None:
    unknown = sorted(set(table) - known)
    if unknown:
        raise ConfigurationError(
            f"{who} unknown settings: {', '.join(unknown)} (it may have: {', '.join(sorted(known))}{more})."
        )


def _paired_workers(file: Path) -> tuple[Address, ...]:
    try:
        return tuple(worker.addresses[0] for worker in Pairings.load().workers if worker.addresses)
    except AuthError as error:
        raise ConfigurationError(f"{file} lists no workers, and {error}") from None
