"""`monarch bench link`: round trip and rate of the link to each worker, as Monarch's channel and as plain TCP see it.

Prints; the measuring is `bench.workers`.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from .environment import CommandError

if TYPE_CHECKING:
    from ..distributed.addresses import Address


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
    from ..bench.workers import examined
    from ..distributed.doctor.patience import Impatient
    from ..distributed.peer import PeerFailed

    try:
        found = examined(address)
    except (PeerFailed, Impatient) as error:
        return {"worker": str(address), "address": str(address), "error": str(error)}
    return {"worker": found["name"], "address": found["address"], **found["link"]}


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
