"""A network of its own that loses and delays packets, and a run over it. For a process in its own network namespace.

A TUN device sends every packet back with its two addresses exchanged (which leaves checksums right): who connects to
FAR reaches what listens at NEAR, through real TCP on both sides of a real loss.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import mmap
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
from collections.abc import Callable, Iterator
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


class Lossy:
    """How the network is: a process of its own sends packets back as it is told."""

    _SETTING = struct.Struct("ddI")
    _LOST = struct.Struct("I")

    def __init__(self, tun: int) -> None:
        self._shared = mmap.mmap(-1, self._SETTING.size + self._LOST.size)
        self._times = 0
        self._pid = os.fork()
        if self._pid == 0:
            self._send_back(tun)

    def be(self, part: float = 0.0, delay: float = 0.0) -> None:
        """From now on lose that part of the packets, the next one among them, and hold the others for so long."""
        self._times += 1
        self._SETTING.pack_into(self._shared, 0, part, delay, self._times)

    @property
    def lost(self) -> int:
        """Packets so far."""
        return self._LOST.unpack_from(self._shared, self._SETTING.size)[0]

    def __enter__(self) -> Lossy:
        return self

    def __exit__(self, *_: object) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def _send_back(self, tun: int) -> None:
        dice = random.Random(1)
        waiting: deque[tuple[float, bytes]] = deque()
        lost, last = 0, 0
        while True:
            timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
            if select.select([tun], [], [], timeout)[0]:
                packet = os.read(tun, _MTU)
                part, delay, times = self._SETTING.unpack_from(self._shared, 0)
                if packet[0] >> 4 != 4:
                    continue
                if part and (times != last or dice.random() < part):
                    lost += 1
                    self._LOST.pack_into(self._shared, self._SETTING.size, lost)
                else:
                    back = packet[:12] + packet[16:20] + packet[12:16] + packet[20:]
                    waiting.append((time.monotonic() + delay, back))
                last = times
            while waiting and waiting[0][0] <= time.monotonic():
                os.write(tun, waiting.popleft()[1])


def _runs(tun: int) -> dict[str, Any]:
    """{fault and split: what came of a run}."""
    runpy.run_path(str(Path(__file__).parent.parent / "__main__.py"))["load_pack"]()
    from monarch_split.demo.reference import TINY
    from monarch_split.demo.reference_runtime import write_reference_model
    from monarch_split.distributed.addresses import Address
    from monarch_split.distributed.auth import Paired, Pairings, own_identity
    from monarch_split.distributed.report import Report
    from monarch_split.tests.driving import make_model, render
    from monarch_split.tests.faults import POINTS, STEPS, Point
    from monarch_split.tests.network_proxy import network_to, port_with_a_neighbour
    from monarch_split.tests.worker_process import Worker, ended, shared_forge

    found: dict[str, Any] = {}

    @contextlib.contextmanager
    def worker_beyond() -> Iterator[tuple[Worker, str]]:
        """A worker without the file, and its address beyond the lossy network."""
        worker = shared_forge().worker(port=port_with_a_neighbour())
        address = Address(FAR, worker.port)
        Pairings.add_worker(Paired("w", own_identity().public, (address,)))
        with ended(worker), network_to(worker.port, NEAR):
            yield worker, str(address)

    def note(name: str, run: Callable[[], tuple[float, Report]], steps: int) -> None:
        before = network.lost
        worst, report = run()
        network.be()
        found[name] = {**report.as_dict(), "worst": worst, "forwards": steps, "lost": network.lost - before}

    with tempfile.TemporaryDirectory() as folder, Lossy(tun) as network:
        recipe, model = write_reference_model(TINY, Path(folder) / "tiny.safetensors"), make_model()
        with worker_beyond() as (_, address):
            for name, part, delay, mode, steps in (
                ("1 % loss, rows", 0.01, 0.0, "rows", 6),
                ("1 % loss, tokens", 0.01, 0.0, "tokens", 4),
                ("500 ms, rows", 0.0, 0.25, "rows", 3),
                ("between runs", 0.01, 0.0, "rows", STEPS),
            ):
                network.be(part, delay)
                how: dict[str, Any] = {"mode": mode, "steps": steps, "cfg": 4.0 if mode == "rows" else 1.0}
                note(name, functools.partial(render, [address], recipe, model, **how), steps)
        for at in POINTS:
            with worker_beyond() as (worker, address):
                point = Point(at, worker, lambda: network.be(0.01))
                note(at, functools.partial(point.run, recipe, model, address=address, busy=0.3), STEPS)
    return found


if __name__ == "__main__":
    try:
        device = make_device()
    except OSError as problem:
        print(json.dumps({"not allowed": str(problem)}))
        sys.exit(0)
    print(json.dumps(_runs(device)))
