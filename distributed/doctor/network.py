"""Checks of the way to a worker: name, reachability, interface, MTU, and whether both halves of a cable are used."""

from __future__ import annotations

import errno
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import limits
from ..addresses import Address, is_loopback
from .check import Check, failed, passed, warned
from .interfaces import SYS, Interface, interface, interface_with, neighbour_answers, twin_of

# Mb/s from which large packets matter, and the packets that they should be.
_FAST = 10_000
_JUMBO = 9000
# A TCP segment is smaller than the packet by its headers and options.
_HEADERS = 100
_FIREWALL = "let TCP ports {port} to {last} through its firewall (ufw: sudo ufw allow {port}:{last}/tcp)"


@dataclass(frozen=True)
class Way:
    """An address that accepts connections: the local IP address and interface that lead there, and TCP's segment size.

    interface: None for this machine itself, and where the system does not tell. segment: 0 where it does not.
    """

    address: Address
    local: str
    interface: Interface | None
    segment: int


class Unreachable(Exception):
    """An address accepts no connection: the message says how it was noticed, `fix` what to do."""

    def __init__(self, detail: str, fix: str) -> None:
        super().__init__(detail)
        self.fix = fix


def find_way(address: Address, sys_net: Path = SYS) -> Way:
    """Connect to an address for a moment. Raises Unreachable."""
    try:
        with socket.create_connection((address.host, address.port), timeout=limits.CONNECT_TIMEOUT) as sock:
            local = sock.getsockname()[0]
            name = None if is_loopback(local) else interface_with(local)
            segment = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG) if sys.platform == "linux" else 0
    except ConnectionRefusedError:
        how = "" if is_loopback(address.host) else f" --listen {address.host}"
        raise Unreachable(
            f"{address.host} answers, and nothing listens at port {address.port}",
            f"start the worker there (monarch worker{how}); if it runs, compare its port and address",
        ) from None
    except TimeoutError:
        raise _silence(address) from None
    except (socket.gaierror, ValueError):  # ValueError: a name that cannot be one
        raise Unreachable(
            f"the name {address.host!r} is not known here",
            "write the IP address in its place, or add the name to /etc/hosts",
        ) from None
    except OSError as error:
        if error.errno == errno.EHOSTUNREACH and _neighbour(address) is not None:
            raise _silence(address) from None  # some firewalls answer with this, and so does an address without machine
        if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL):
            raise Unreachable(
                f"there is no way to {address.host} ({error.strerror})",
                "give the interface with the cable an address in the same subnet as the worker's, on both machines; "
                "ip address shows what there is",
            ) from None
        raise Unreachable(f"{address} cannot be reached ({error.strerror or error})", "check the address") from None
    return Way(address, local, interface(name, sys_net) if name else None, segment)


def _silence(address: Address) -> Unreachable:
    """What it means that nothing at the address answered within CONNECT_TIMEOUT."""
    detail = f"nothing answers at {address} within {limits.CONNECT_TIMEOUT:g} s"
    firewall = _FIREWALL.format(port=address.port, last=address.port + 2)
    if is_loopback(address.host):
        return Unreachable(detail, "the program that listens there hangs, or a tunnel does: start it again")
    heard = _neighbour(address)
    if heard is True:
        return Unreachable(f"{detail}, though the machine is there: a firewall is in the way", f"there, {firewall}")
    if heard is False:
        return Unreachable(
            f"{detail}, and no machine on this network has that address",
            "check the cable, that the machine is on, and its address (ip address, on that machine)",
        )
    return Unreachable(
        f"{detail}: that is how a firewall behaves, or a wrong address",
        f"check the address and the cable; there, {firewall}",
    )


def _neighbour(address: Address) -> bool | None:
    """Whether the machine with this address has answered on this network; None if it is not on it, or not known."""
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    return neighbour_answers(str(found[0][4][0]))


def reach(addresses: Sequence[Address], ways: list[Way]) -> Iterator[Check]:
    """Connect to all addresses of one worker; those that answer are added to `ways`. One has to."""
    problems: list[tuple[Address, Unreachable]] = []
    for address in addresses:
        began = time.perf_counter()
        try:
            way = find_way(address)
        except Unreachable as problem:
            problems.append((address, problem))
            continue
        ways.append(way)
        by = f"from {way.local} by {way.interface.name}" if way.interface else f"from {way.local}"
        yield passed(f"reach {address}", f"it accepts connections, {by} ({(time.perf_counter() - began) * 1e3:.1f} ms)")
    for address, problem in problems:
        make = warned if ways else failed
        yield make(f"reach {address}", str(problem), problem.fix)


def interfaces(ways: Sequence[Way], sys_net: Path = SYS) -> Iterator[Check]:
    """What the interfaces that lead to one worker promise, and what they leave unused."""
    found = {way.interface.name: way for way in ways if way.interface is not None}
    for name, way in found.items():
        assert way.interface is not None
        yield _interface(f"interface {name}", way.interface, way)
    for name, way in found.items():
        assert way.interface is not None
        twin = twin_of(way.interface, sys_net)
        if twin is None:
            continue
        if twin.name in found:
            if name < twin.name:
                yield passed("cable", f"both halves are used: {name} and {twin.name}")
            continue
        state = "" if twin.up else ", which is down,"
        yield warned(
            "cable",
            f"only half of it is used: {name} leads to the worker, and its other half {twin.name}{state} does not",
            f"give {twin.name} an address in a subnet of its own on both machines, start the worker with a --listen "
            "for each of its two addresses, and pair again",
        )


def _interface(check: str, own: Interface, way: Way) -> Check:
    detail = f"{own.speed}, packets of {own.mtu} bytes" if own.mtu else own.speed
    if own.wireless:
        return warned(check, f"{own.name} is wireless", "join the machines by a cable; Wi-Fi is slow and loses packets")
    if own.megabits >= _FAST and own.mtu < _JUMBO:
        return warned(
            check,
            f"{detail}: small packets cost a fast link much of its rate",
            f"sudo ip link set dev {own.name} mtu {_JUMBO}, and the same on the worker's side",
        )
    if own.mtu and way.segment and own.mtu - way.segment > _HEADERS:
        return warned(
            check,
            f"{detail} on this side, but only {way.segment} bytes get through",
            f"set the worker's interface, and what lies between, to an MTU of {own.mtu} as well",
        )
    if own.megabits and own.megabits < 1000:
        return warned(check, f"{detail}: less than the Gigabit of a usual cable", "try another cable or switch port")
    return passed(check, detail)
