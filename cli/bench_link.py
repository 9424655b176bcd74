"""`monarch bench link`: round trip and rate of the link to each worker, as Monarch's channel and as plain TCP see it.

Prints; the measuring is `distributed.link_rate`.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from .environment import CommandError

if TYPE_CHECKING:
    from ..distributed.addresses import Address

# What measuring takes even if the link is a slow one.
_SECONDS = 60.0


def run(args: argparse.Namespace) -> int:
    """Measure the link to the workers named, or to those of the configuration."""
    addresses = _addresses(args.workers)
    results = []
    for address in addresses:
        results.append(_measure(address))
        if not args.json:
            _print(results[-1], first=len(results) == 1)
    if args.json:
        print(json.dumps(results[0] if len(results) == 1 else {"workers": results}))
    return 1 if any("error" in result for result in results) else 0


def _addresses(named: list[str]) -> list[Address]:
    from ..distributed.addresses import AddressError, parse_address
    from ..distributed.cluster import ConfigurationError, load_configuration

    try:
        addresses = [parse_address(text) for text in named] or list(load_configuration().cluster().workers)
    except AddressError as error:
        raise CommandError(str(error), code=2) from None
    except ConfigurationError as error:
        raise CommandError(str(error)) from None
    if not addresses:
        raise CommandError("No worker is configured. Name one: monarch bench link ADDRESS, or pair this machine first.")
    return list(dict.fromkeys(addresses))


def _measure(address: Address) -> dict[str, Any]:
    """What was measured, or the `error`."""
    from ..distributed.doctor.patience import Impatient, within
    from ..distributed.link_rate import measure_link
    from ..distributed.peer import Peer, PeerFailed
    from ..distributed.versions import own_versions

    peer = Peer(address, within(_SECONDS))
    try:
        # Nothing is computed, so ComfyUI's version does not matter.
        peer.connect(own_versions(None), allow_mismatch=True)
        link = measure_link(peer)
    except (PeerFailed, Impatient) as error:
        return {"worker": peer.name, "address": str(address), "error": str(error)}
    finally:
        peer.close(cancel=True)
    result: dict[str, Any] = {
        "worker": peer.name,
        "address": str(address),
        "rtt_ms": round(link.rtt * 1e3, 3),
        "lanes": link.lanes,
        "gb_per_s": round(link.rate / 1e9, 4),
        "tcp_gb_per_s": None if link.tcp_rate is None else round(link.tcp_rate / 1e9, 4),
    }
    if link.tcp_rate is None:
        result["tcp_problem"] = link.tcp_problem
    return result


def _print(result: dict[str, Any], *, first: bool) -> None:
    if first:
        print(f"{'worker':<24}{'round trip':>12}{'lanes':>8}{'channel':>14}{'plain TCP':>14}")
    name = f"{result['worker']} ({result['address']})" if result["worker"] != result["address"] else result["worker"]
    if "error" in result:
        print(f"{name:<24}  {result['error']}")
        return
    tcp = result["tcp_gb_per_s"]
    print(
        f"{name:<24}{result['rtt_ms']:>9.2f} ms{result['lanes']:>8}{result['gb_per_s']:>9.2f} GB/s"
        + (f"{tcp:>9.2f} GB/s" if tcp is not None else f"{'-':>14}  {result['tcp_problem']}")
    )
