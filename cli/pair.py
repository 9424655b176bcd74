"""`monarch pair`: joins this machine to a worker by the code that the worker printed; lists and removes pairings."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING

from ..distributed.addresses import Address, AddressError, parse_address
from .environment import CommandError, prefer_comfyui

if TYPE_CHECKING:
    from ..distributed.auth import Pairings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("code", metavar="CODE", nargs="?", help="the line that the worker printed; - reads it from stdin")
    what.add_argument("--new-code", action="store_true", help="on the worker's machine: print a new code for it")
    what.add_argument("--list", action="store_true", help="show the machines that this one is paired with")
    what.add_argument("--remove", metavar="NAME", help="forget the machines of this name")
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        action="append",
        default=[],
        help="where to reach the worker, if not at the addresses in its code (a tunnel, a name); may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def prepare(args: argparse.Namespace, argv: list[str]) -> None:
    """Start again in ComfyUI's Python, which has all that is needed, or else in `.venv`."""
    prefer_comfyui("pair", argv, ["zmq", "torch"])


def run(args: argparse.Namespace) -> int:
    from ..distributed.auth import AuthError, Pairings
    from ..distributed.pairing import PairingError, issue_code, pair, running_worker

    try:
        if args.list:
            _show(Pairings.load(), as_json=args.json)
        elif args.remove is not None:
            _remove(args.remove, Pairings.remove(args.remove), Pairings.load(), as_json=args.json)
        elif args.new_code:
            code = issue_code(running_worker())
            text = f"Valid once, for ten minutes. On the machine that renders:\n  monarch pair {code}"
            print(json.dumps({"ok": True, "code": code}) if args.json else text)
        else:
            code = sys.stdin.readline() if args.code == "-" else args.code
            worker = pair(code, addresses=_addresses(args.address))
            where = ", ".join(map(str, worker.addresses))
            text = f"Paired with {worker.name} at {where}. It is used from the next render on."
            if args.json:
                text = json.dumps({"ok": True, "name": worker.name, "addresses": list(map(str, worker.addresses))})
            print(text)
    except (AuthError, PairingError) as error:
        text = str(error)
        raise CommandError(f"{text[0].upper()}{text[1:]}.") from None
    return 0


def _addresses(texts: list[str]) -> list[Address]:
    try:
        return [parse_address(text) for text in texts]
    except AddressError as error:
        raise CommandError(str(error), 2) from None


def _show(pairings: Pairings, *, as_json: bool) -> None:
    if as_json:
        roles = {"workers": pairings.workers, "drivers": pairings.drivers}
        described = {
            role: [
                {"name": each.name, "addresses": list(map(str, each.addresses)), "since": round(each.since)}
                for each in machines
            ]
            for role, machines in roles.items()
        }
        print(json.dumps({"ok": True, **described}))
        return
    for title, machines in (("Workers that this machine uses", pairings.workers), ("Drivers", pairings.drivers)):
        print(f"{title}:" if machines else f"{title}: none")
        for each in machines:
            since = time.strftime("%Y-%m-%d", time.localtime(each.since))
            key = f"key {each.key.decode()[:8]}…"
            print("  " + "  ".join([each.name, *map(str, each.addresses), f"since {since}", key]))


def _remove(name: str, roles: list[str], left: Pairings, *, as_json: bool) -> None:
    if not roles:
        known = ", ".join(each.name for each in (*left.workers, *left.drivers)) or "none"
        raise CommandError(f"No paired machine is called {name!r}; there are: {known}.")
    print(json.dumps({"ok": True, "removed": roles}) if as_json else f"Removed {name} ({', '.join(roles)}).")
