"""A network of its own that loses and delays packets, and a run over it. For a process in its own network namespace.

A TUN device sends every packet back with its two addresses exchanged (which leaves checksums right): who connects to
FAR reaches what listens at NEAR, through real TCP on both sides of a real loss.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import runpy
import select
import signal
import socket
import struct
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NEAR, FAR = "10.99.0.1", "10.99.0.2"
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCSIFMTU, _IFF_UP = 0x8914, 0x8916, 0x891C, 0x8922, 0x1
_MTU = 9000
_DEVICE = b"lossy0"


def make_device() -> int:
    """Bring up the loopback and the device. Returns its file descriptor; raises OSError where that is not allowed."""
    tun = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", _DEVICE, _IFF_TUN | _IFF_NO_PI))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:

        def address(text: str) -> bytes:
            return struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(text))

        fcntl.ioctl(control, _SIOCSIFADDR, struct.pack("16s16s8x", _DEVICE, address(NEAR)))
        fcntl.ioctl(control, _SIOCSIFNETMASK, struct.pack("16s16s8x", _DEVICE, address("255.255.255.0")))
        fcntl.ioctl(control, _SIOCSIFMTU, struct.pack("16si20x", _DEVICE, _MTU))
        for name in (b"lo", _DEVICE):
            fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH22x", name, _IFF_UP))
    return tun


@contextlib.contextmanager
def losing(tun: int, part: float, delay: float) -> Iterator[None]:
    """Send packets back from a process of its own: it loses that part of them and holds the others for so long."""
    pid = os.fork()
    if pid == 0:
        _send_back(tun, part, delay)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _send_back(tun: int, part: float, delay: float) -> None:
    dice = random.Random(1)
    waiting: deque[tuple[float, bytes]] = deque()
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        if select.select([tun], [], [], timeout)[0]:
            packet = os.read(tun, _MTU)
            if packet[0] >> 4 == 4 and dice.random() >= part:
                back = packet[:12] + packet[16:20] + packet[12:16] + packet[20:]
                waiting.append((time.monotonic() + delay, back))
        while waiting and waiting[0][0] <= time.monotonic():
            os.write(tun, waiting.popleft()[1])


def _runs(tun: int) -> dict[str, Any]:
    """{fault and split: what came of a run}."""
    runpy.run_path(str(Path(__file__).parent.parent / "__main__.py"))["load_pack"]()
    from monarch_split.demo.reference import TINY
    from monarch_split.demo.reference_runtime import write_reference_model
    from monarch_split.distributed.addresses import Address
    from monarch_split.distributed.auth import Paired, Pairings, own_identity
    from monarch_split.tests.driving import make_model, render
    from monarch_split.tests.network_proxy import network_to, port_with_a_neighbour
    from monarch_split.tests.worker_process import ended, shared_forge

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        recipe = write_reference_model(TINY, Path(folder) / "tiny.safetensors")
        worker = shared_forge().worker(port=port_with_a_neighbour())
        Pairings.add_worker(Paired("w", own_identity().public, (Address(FAR, worker.port),)))
        with ended(worker), network_to(worker.port, NEAR):
            for name, part, delay, mode, steps in (
                ("1 % loss, rows", 0.01, 0.0, "rows", 6),
                ("1 % loss, tokens", 0.01, 0.0, "tokens", 4),
                ("500 ms, rows", 0.0, 0.25, "rows", 3),
            ):
                with losing(tun, part, delay):
                    cfg = 4.0 if mode == "rows" else 1.0
                    worst, report = render(
                        [f"{FAR}:{worker.port}"], recipe, make_model(), mode=mode, steps=steps, cfg=cfg
                    )
                found[name] = {"worst": worst, "steps": steps, **report.as_dict()}
    return found


if __name__ == "__main__":
    try:
        device = make_device()
    except OSError as problem:
        print(json.dumps({"not allowed": str(problem)}))
        sys.exit(0)
    print(json.dumps(_runs(device)))
