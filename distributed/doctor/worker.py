"""Checks of one worker, each step only if those before it let it be tried: way, greeting, software, link, split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..addresses import Address
from ..auth import AuthError, known_worker
from ..cluster import Cluster
from ..link_rate import LinkRate, measure_link
from ..peer import Peer, PeerFailed
from ..versions import Versions, mismatch
from . import network
from .check import Check, failed, failed_with, passed, warned
from .machine import Here, Largest, described, enough_memory
from .patience import Impatient, within
from .trial import try_split

# What measuring a link takes even if that is a slow one.
_LINK_SECONDS = 60.0
# A link that carries a smaller part of what its interfaces promise has something wrong with it.
_EXPECTED_PART = 0.25
_LONG_TRIP = 0.02


def examine_worker(address: Address, cluster: Cluster, here: Here, largest: list[Largest]) -> Iterator[Check]:
    """All checks of the worker at `address`."""
    others: tuple[Address, ...] = ()
    unpaired: AuthError | None = None
    try:
        others = known_worker(address).others
    except AuthError as error:
        unpaired = error
    ways: list[network.Way] = []
    yield from network.reach([address, *others], ways)
    yield from network.interfaces(ways)
    if unpaired is not None:
        yield failed_with(f"pairing {address}", unpaired)
        return
    if not ways:
        return
    peer = Peer(address, within(_LINK_SECONDS))
    try:
        peer.connect(here.runtime.versions, allow_mismatch=True)
    except PeerFailed as error:
        yield failed_with(f"worker {address}", error)
        peer.close(cancel=True)
        return
    try:
        yield passed(f"worker {address}", f"{peer.name} answers, knows this machine, and is not busy")
        software = _software(f"software {address}", peer, cluster, here)
        yield from software
        yield enough_memory(f"memory {address}", peer.free_bytes.get("memory", 0), peer.device, largest, peer.name)
        yield from _disk(f"disk {address}", peer, largest)
        try:
            yield _link(f"link {address}", measure_link(peer), ways)
        except (PeerFailed, Impatient) as error:
            yield failed_with(f"link {address}", error)
            return
    finally:
        peer.close(cancel=True)
    if all(check.ok for check in software):
        yield from _splits(address, peer, replace(cluster, workers=(address,)), here)


def _software(name: str, peer: Peer, cluster: Cluster, here: Here) -> list[Check]:
    """Whether both sides run the same, as far as this side has something to compare."""
    ours, theirs = here.runtime.versions, peer.versions or Versions("", "", "", "", "")
    said = f"{peer.name}: {described(theirs, peer.device)}"
    if ours.comfyui_code and not theirs.comfyui_code:
        return [failed(name, f"{said}: it computes the built-in model only", "start it without --runtime reference")]
    compared = ours if ours.comfyui_code else replace(ours, comfyui=theirs.comfyui, comfyui_code=theirs.comfyui_code)
    refusal, differences = mismatch(compared, theirs, peer.name)
    if refusal is not None:
        refused = failed_with(name, refusal)
        if not cluster.allow_version_mismatch:
            return [refused]
        return [warned(name, f"{refused.detail} (allow_version_mismatch lets it pass)", refused.fix)]
    emulated = set(peer.emulated) ^ set(here.runtime.describe().get("emulates", "").split())
    if ours.comfyui_code and emulated:
        differences.append(
            f"{', '.join(sorted(emulated))} is computed natively on one of the machines only, so both dequantise it"
        )
    if not ours.comfyui_code:
        # torch and comfy-kitchen of another Python say nothing about the driver's.
        differences = ["without ComfyUI here, nothing but Monarch itself was compared"] if theirs.comfyui_code else []
        fix = "run the doctor with ComfyUI's Python"
    else:
        fix = "install the same versions on both machines; what is left is a matter of speed or of the last digits"
    return [warned(name, f"{said}. {'; '.join(differences)}", fix) if differences else passed(name, said)]


def _disk(name: str, peer: Peer, largest: list[Largest]) -> Iterator[Check]:
    free = peer.free_bytes.get("disk", 0)
    if largest and free < largest[0].bytes:
        yield warned(
            name,
            f"{peer.name} has {free / 1e9:.1f} GB of disk for models that it is sent: {largest[0].name} "
            f"({largest[0].bytes / 1e9:.1f} GB) does not fit",
            f"free some on {peer.name}, or start it with --cache on another disk; models that it has need none",
        )


def _link(name: str, link: LinkRate, ways: Sequence[network.Way]) -> Check:
    said = f"round trip {link.rtt * 1e3:.2f} ms, {link.rate / 1e9:.2g} GB/s over {link.lanes} lanes"
    said += f", {link.tcp_rate / 1e9:.2g} GB/s over plain TCP" if link.tcp_rate else f"; {link.tcp_problem}"
    # Megabits per second in GB/s, of all interfaces whose speed is known.
    used = {way.interface.name: way.interface.megabits for way in ways if way.interface is not None}
    promised = sum(used.values()) / 8e3
    best = max(link.rate, link.tcp_rate or 0.0) / 1e9
    if promised and best < _EXPECTED_PART * promised:
        return warned(
            name,
            f"{said}: the interfaces promise {promised:.3g} GB/s",
            "see what else uses the network, which way it takes (ip route get), and the cable's and switch's own speed",
        )
    if link.rtt > _LONG_TRIP:
        return warned(name, f"{said}: each step waits for a round trip", "join the machines by a cable of their own")
    if link.tcp_rate is None:
        return warned(name, said, "the third port is for this measurement alone; open it there to have it measured")
    return passed(name, said + (f"; promised {promised:.3g} GB/s" if promised else ""))


def _splits(address: Address, peer: Peer, cluster: Cluster, here: Here) -> Iterator[Check]:
    ours, theirs = here.runtime.versions, peer.versions
    if theirs is not None and bool(ours.comfyui_code) != bool(theirs.comfyui_code):
        yield warned(
            f"split {address}",
            "no model was split: without ComfyUI here there is none that both machines can compute",
            "run the doctor with ComfyUI's Python",
        )
        return
    yield from try_split(address, cluster, here)
