"""`monarch worker`: serves this machine to a driver, in ComfyUI's own Python.

Reads and checks the arguments and chooses the Python; the serving is `distributed.serve`.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from ..distributed.addresses import address_facing, is_loopback, local_addresses
from ..distributed.limits import DEFAULT_PORT
from . import service
from .environment import ComfyUI, CommandError, ensure_environment, find_comfyui, missing_imports, run_in

if TYPE_CHECKING:
    from ..distributed.runtime import Runtime


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--listen",
        metavar="ADDRESS",
        action="append",
        help="IP address of this machine to listen on, or `all`; may be given several times (127.0.0.1)",
    )
    parser.add_argument("--facing", metavar="HOST", help="listen on the address from which this machine reaches HOST")
    parser.add_argument("--pair", action="store_true", help="print a pairing code, though there are paired drivers")
    parser.add_argument(
        "--port", metavar="N", type=_port, default=DEFAULT_PORT, help="port; 0 takes a free one (%(default)s)"
    )
    parser.add_argument("--comfyui", metavar="PATH", type=Path, help="ComfyUI's folder, if it is not found by itself")
    parser.add_argument(
        "--runtime",
        choices=["comfyui", "reference"],
        default="comfyui",
        help="what computes: ComfyUI, or the small model of the demo (%(default)s)",
    )
    parser.add_argument("--cache", metavar="DIR", type=Path, help="where files that a driver sends are kept")
    parser.add_argument("--name", metavar="NAME", help="what drivers call this worker (the host's name)")
    service.add_arguments(parser)


def prepare(args: argparse.Namespace, argv: list[str]) -> None:
    """Start again in the Python that can compute: ComfyUI's, or `.venv` for the reference runtime."""
    _hosts(args)
    if args.runtime == "reference":
        ensure_environment("worker", argv)
    comfyui = _comfyui(args.comfyui)
    if comfyui.python is None:
        raise CommandError(
            f"No Python that can run the ComfyUI in {comfyui.path} was found: there is no venv in or beside it. "
            f"Start the worker with the Python that runs ComfyUI: PYTHON {Path(__file__).parent.parent} worker"
        )
    if missing_imports(comfyui.python, ["zmq"]):
        raise CommandError(
            f"{comfyui.python} cannot import zmq, Monarch's one requirement. "
            f"Install it with: {comfyui.python} -m pip install pyzmq"
        )
    run_in(comfyui.python, argv)


def run(args: argparse.Namespace) -> int:
    hosts = _hosts(args)
    comfyui = _comfyui(args.comfyui).path if args.runtime == "comfyui" else None

    if all(is_loopback(host) for host in hosts):
        print(f"Only this machine can reach this worker. For another one, start it with --listen {_own_addresses()}.")
    if args.install_service:
        return service.install(args, comfyui)
    for host in hosts:
        _check_free(host, args.port)
    set_before_torch(args.passed_on)
    from ..distributed.serve import serve

    cache = args.cache.expanduser() if args.cache else None
    return serve(_runtime(comfyui, args.passed_on), hosts, args.port, cache=cache, name=args.name, pair=args.pair)


def _check_free(listen: str, port: int) -> None:
    """Say that the port is taken now, rather than after ComfyUI has been imported."""
    with socket.socket(socket.AF_INET6 if ":" in listen else socket.AF_INET) as probe:
        if os.name != "nt":
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((listen, port))
        except OSError as error:
            raise CommandError(
                f"Port {port} of {listen} cannot be used ({error.strerror}). If a worker already runs there, stop it; "
                "or choose another port with --port."
            ) from None


def set_before_torch(comfyui_args: list[str]) -> None:
    """What ComfyUI's main.py sets in the environment for these flags; torch reads it when it is imported."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--cuda-device")
    parser.add_argument("--deterministic", action="store_true")
    flags, _ = parser.parse_known_args(comfyui_args)
    if flags.cuda_device not in (None, "all"):
        for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
            os.environ[name] = str(flags.cuda_device)
    if flags.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def _runtime(comfyui: Path | None, comfyui_args: list[str]) -> Runtime:
    if comfyui is None:
        from ..demo.reference_runtime import ReferenceRuntime

        return ReferenceRuntime()
    from ..distributed.model_store import ComfyRuntime

    return ComfyRuntime(comfyui, comfyui_args)


def _hosts(args: argparse.Namespace) -> list[str]:
    """IP addresses to listen on. Raises CommandError for what is none of this machine's."""
    if args.facing is not None:
        try:
            return [address_facing(args.facing)]
        except OSError as error:
            raise CommandError(f"This machine has no way to {args.facing} ({error.strerror or error}).", 2) from None
    hosts: list[str] = []
    for text in args.listen or ["127.0.0.1"]:
        hosts += _every_address() if text == "all" else [_own_address("127.0.0.1" if text == "localhost" else text)]
    return list(dict.fromkeys(hosts))


def _own_address(text: str) -> str:
    try:
        if ipaddress.ip_address(text).is_unspecified:
            raise CommandError(
                f"{text} stands for every address of this machine; if you mean that, say --listen all.", 2
            )
        with socket.socket(socket.AF_INET6 if ":" in text else socket.AF_INET) as probe:
            probe.bind((text, 0))
    except ValueError:
        own = _own_addresses()
        raise CommandError(f"{text} is not an IP address; --listen takes one of this machine's: {own}.", 2) from None
    except OSError:
        raise CommandError(f"{text} is not an address of this machine; it has {_own_addresses()}.", 2) from None
    return text


def _every_address() -> list[str]:
    found = [address for _, address in local_addresses()]
    if not found:
        raise CommandError("The addresses of this machine are not known; name one with --listen ADDRESS.", 2)
    return [*found, "127.0.0.1"]


def _own_addresses() -> str:
    return ", ".join(f"{address} ({name})" for name, address in local_addresses()) or "ADDRESS"


def _comfyui(explicit: Path | None) -> ComfyUI:
    found = find_comfyui(explicit)
    if found is None:
        raise CommandError(
            "No ComfyUI was found above custom_nodes, in ~/ComfyUI or in ~/comfy/ComfyUI. "
            "Name its folder with --comfyui PATH or COMFYUI_PATH."
        )
    return found


def _port(text: str) -> int:
    port = int(text) if text.isascii() and text.isdigit() else -1
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port: give a number from 0 to 65535")
    return port
