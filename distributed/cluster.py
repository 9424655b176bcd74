"""Configuration: which workers there are, and what is allowed. One TOML file in the user's configuration folder.

A missing file means that there is no worker; a broken one is an error that names the file and the line.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import limits

if sys.version_info >= (3, 11):
    import tomllib
else:
    try:
        import tomli as tomllib
    except ImportError:  # pip always carries the same parser
        from pip._vendor import tomli as tomllib


class ConfigurationError(ValueError):
    """The configuration cannot be used; the message names the file, the cause and the next step."""


@dataclass(frozen=True)
class Address:
    """Where a worker listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether what goes there never leaves this machine."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


# lanes: ZeroMQ. nccl and gloo: torch.distributed, between GPUs and between CPUs. auto: the fastest that is possible.
LANES = "lanes"
ENGINES = (LANES, "nccl", "gloo")
EXCHANGES = ("auto", *ENGINES)
# off: the order of the stock forward, bit for bit. auto: off as long as the link is fast enough for that not to matter.
OVERLAPS = ("auto", "on", "off")


@dataclass(frozen=True)
class Cluster:
    """A named set of workers and the policy towards them. No workers: everything runs on the driver."""

    name: str
    workers: tuple[Address, ...] = ()
    allow_version_mismatch: bool = False
    # Where machines differ in what they can compute natively: "exact" has all compute alike, "speed" each its fastest.
    prefer: str = "exact"
    # Whether the cable between the machines is private, so that tokens may cross it in the clear.
    trusted_link: bool = False
    # What tokens are exchanged over: one of EXCHANGES.
    exchange: str = "auto"
    # Whether attention begins before the others' tokens are here: one of OVERLAPS.
    overlap: str = "auto"


@dataclass(frozen=True)
class Configuration:
    """All clusters of the configuration file, and the one used by default."""

    path: Path
    exists: bool = False
    default: str = "default"
    clusters: dict[str, Cluster] = field(default_factory=dict)

    def cluster(self) -> Cluster:
        """The cluster to use. Raises ConfigurationError if the file names one that it does not hold."""
        if self.default in self.clusters or not self.clusters:
            return self.clusters.get(self.default, Cluster(self.default))
        known = ", ".join(self.clusters)
        raise ConfigurationError(
            f"{self.path} has no cluster {self.default!r} (it has: {known}); name one of them in a line such as "
            f'default = "{next(iter(self.clusters))}".'
        )


def configuration_folder() -> Path:
    """The user's configuration folder for Monarch (MONARCH_CONFIG_DIR overrides it)."""
    override = os.environ.get("MONARCH_CONFIG_DIR")
    if override:
        return Path(override)
    if sys.platform == "win32":
        base = os.environ.get("APPDATA") or str(Path.home() / "AppData" / "Roaming")
    elif sys.platform == "darwin":
        base = str(Path.home() / "Library" / "Application Support")
    else:
        base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "monarch"


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
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{file} is not valid TOML: {error}. Correct it or remove it.") from None
    default = data.get("default", "default")
    tables = data.get("clusters", {})
    if not isinstance(default, str) or not isinstance(tables, dict):
        raise ConfigurationError(f'{file}: "default" is a name and "clusters" a table; see the README for an example.')
    unknown = sorted(set(data) - {"default", "clusters"})
    if unknown:
        raise ConfigurationError(f"{file}: unknown settings: {', '.join(unknown)}; a cluster is [clusters.<name>].")
    clusters = {name: _cluster(file, name, table) for name, table in tables.items()}
    return Configuration(file, True, default, clusters)


def _cluster(file: Path, name: str, table: Any) -> Cluster:
    known = {"workers", "allow_version_mismatch", "prefer", "trusted_link", "exchange", "overlap"}
    if not isinstance(table, dict) or not isinstance(table.get("workers"), list):
        raise ConfigurationError(f'{file}: cluster {name!r} needs a list, such as workers = ["127.0.0.1:7690"].')
    unknown = sorted(set(table) - known)
    if unknown:
        raise ConfigurationError(f"{file}: cluster {name!r} has unknown settings: {', '.join(unknown)}.")
    flags = {key: table.get(key, False) for key in ("allow_version_mismatch", "trusted_link")}
    for key, value in flags.items():
        if not isinstance(value, bool):
            raise ConfigurationError(f"{file}: {key} of cluster {name!r} is true or false.")
    choices = {"exchange": EXCHANGES, "overlap": OVERLAPS, "prefer": ("exact", "speed")}
    chosen = {key: table.get(key, values[0]) for key, values in choices.items()}
    for key, value in chosen.items():
        if value not in choices[key]:
            listed = ", ".join(f'"{choice}"' for choice in choices[key])
            raise ConfigurationError(f"{file}: {key} of cluster {name!r} is one of {listed}.")
    workers = tuple(parse_address(file, item) for item in table["workers"])
    return Cluster(name, workers, **chosen, **flags)


def parse_address(file: Path | str, text: Any) -> Address:
    """`host`, `host:port`, `[v6]:port` or `[v6]`. Raises ConfigurationError that names `file`."""
    if isinstance(text, str) and text.strip():
        host, port = text.strip(), str(limits.DEFAULT_PORT)
        if host.startswith("["):
            host, _, rest = host[1:].partition("]")
            port = rest.removeprefix(":") or port
        elif host.count(":") == 1:
            host, _, port = host.partition(":")
        if _is_host(host) and port.isascii() and port.isdigit() and len(port) < 6 and 0 < int(port) < 65536:
            return Address(host, int(port))
    raise ConfigurationError(f"{file}: {text!r} is not an address; write it as host:port, such as 127.0.0.1:7690.")


def _is_host(text: str) -> bool:
    if ":" not in text:
        return re.fullmatch(r"[\w.-]+", text) is not None
    with contextlib.suppress(ValueError):
        return bool(ipaddress.IPv6Address(text))
    return False
