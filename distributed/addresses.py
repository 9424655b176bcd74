"""Addresses: how a user writes one, and which ones this machine has."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
import struct
import sys
from dataclasses import dataclass
from typing import Any

from . import limits

_SIOCGIFADDR = 0x8915


class AddressError(ValueError):
    """A text is not an address; the message says how to write one."""


@dataclass(frozen=True)
class Address:
    """Where a worker listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether what goes there never leaves this machine (unless a tunnel begins there)."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether `host` is an IP address of the loopback interface."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parse_address(text: Any) -> Address:
    """`host`, `host:port`, `[v6]:port` or `[v6]`. Raises AddressError."""
    if isinstance(text, str) and text.strip():
        host, port = text.strip(), str(limits.DEFAULT_PORT)
        if host.startswith("["):
            host, _, rest = host[1:].partition("]")
            port = rest.removeprefix(":") or port
        elif host.count(":") == 1:
            host, _, port = host.partition(":")
        if _is_host(host) and port.isascii() and port.isdigit() and len(port) < 6 and 0 < int(port) < 65536:
            return Address(host, int(port))
    raise AddressError(f"{text!r} is not an address; write it as host:port, such as 127.0.0.1:7690.")


def _is_host(text: str) -> bool:
    if ":" not in text:
        return re.fullmatch(r"[\w.-]+", text) is not None
    with contextlib.suppress(ValueError):
        return bool(ipaddress.IPv6Address(text))
    return False


def local_addresses() -> list[tuple[str, str]]:
    """(interface, IPv4 address) of this machine's network interfaces but the loopback; empty where unknown."""
    if sys.platform != "linux":
        return []
    import fcntl

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            # An interface without an IPv4 address is an OSError.
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                address = socket.inet_ntoa(answer[20:24])
                if not is_loopback(address):
                    found.append((name, address))
    return found


def address_facing(host: str) -> str:
    """The IP address of this machine from which packets to `host` leave. Raises OSError if there is no way there."""
    family, kind, _, _, target = socket.getaddrinfo(host, limits.DEFAULT_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as sock:
        sock.connect(target)  # of a datagram socket: chooses the way, sends nothing
        return sock.getsockname()[0]
