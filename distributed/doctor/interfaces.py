"""This machine's network interfaces as Linux shows them: speed, MTU, and which two are halves of one cable.

Elsewhere nothing is known of them, and no check depends on it.
"""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass
from pathlib import Path

from ..addresses import local_addresses

SYS = Path("/sys/class/net")
_ARP = Path("/proc/net/arp")
_IPV6 = Path("/proc/net/if_inet6")


@dataclass(frozen=True)
class Interface:
    """megabits: what it promises per second, mtu: the largest packet in bytes; 0 where the system does not say.

    device, driver: PCI address and driver of a card; "" for one that is none.
    """

    name: str
    megabits: int = 0
    mtu: int = 0
    up: bool = True
    wireless: bool = False
    device: str = ""
    driver: str = ""

    @property
    def speed(self) -> str:
        if not self.megabits:
            return "speed unknown"
        return f"{self.megabits / 1000:g} Gb/s" if self.megabits >= 1000 else f"{self.megabits} Mb/s"


def interface(name: str, sys: Path = SYS) -> Interface:
    """What there is to know of an interface; a name that does not exist has nothing."""
    folder = sys / name
    device = folder / "device"
    return Interface(
        name,
        megabits=max(0, _number(folder / "speed")),
        mtu=_number(folder / "mtu"),
        up=_text(folder / "operstate") in ("up", "unknown"),
        wireless=(folder / "wireless").exists() or (folder / "phy80211").exists(),
        device=device.resolve().name if device.exists() else "",
        driver=(device / "driver").resolve().name if (device / "driver").exists() else "",
    )


def twin_of(one: Interface, sys: Path = SYS) -> Interface | None:
    """The other half of the same port: a ConnectX-7 in a DGX Spark shows each port as two PCI devices.

    They differ in the PCI domain alone: enp1s0f0np0 is 0000:01:00.0 and its twin, enP2p1s0f0np0, 0002:01:00.0.
    """
    if one.driver != "mlx5_core" or not sys.is_dir():
        return None
    for folder in sorted(sys.iterdir()):
        other = interface(folder.name, sys)
        same_place = other.device.partition(":")[2] == one.device.partition(":")[2]
        if other.name != one.name and other.driver == one.driver and same_place and other.device != one.device:
            return other
    return None


def interface_with(address: str) -> str | None:
    """Name of the interface that has this IP address, if that can be told."""
    for name, own in local_addresses():
        if own == address:
            return name
    with contextlib.suppress(OSError, ValueError):
        packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
        for line in _IPV6.read_text().splitlines():
            if line.startswith(packed):
                return line.split()[-1]
    return None


def neighbour_answers(ip: str, table: Path = _ARP) -> bool | None:
    """Whether a machine on the same cable or switch has answered for an IPv4 address; None if that is not known."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        for line in table.read_text().splitlines()[1:]:
            fields = line.split()
            if fields[0] == ip:
                return bool(int(fields[2], 16) & 2)
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # the speed of an interface that is down, among others
        return ""


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if text.lstrip("-").isdigit() else 0
