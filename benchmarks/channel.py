"""The channel between two processes of this machine against plain TCP over as many connections; needs no ComfyUI.

python benchmarks/channel.py [--rounds 15]     writes benchmarks/results/channel.json
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    os.environ["OMP_NUM_THREADS"] = "1"
    runpy.run_path(str(Path(__file__).resolve().parent.parent / "__main__.py"))["load_pack"]()
    from monarch_split.benchmarks.channel import main

    sys.exit(main())

import torch
import zmq

from ..distributed import limits
from ..distributed.admission import Doorkeeper
from ..distributed.auth import ChannelKeys, KeyPair, own_identity
from ..distributed.driver_channel import DriverChannel
from ..distributed.messages import Kind
from ..distributed.worker_channel import WorkerChannel
from .machine import machine

HOST = "127.0.0.1"
SIZES = (28, 128)
TINY_BYTES = 1024
# Kinds of message as the driver has them: (bytes there, bytes back) of one message.
WAYS: dict[str, tuple[int, int]] = {"there": (1, 0), "back": (0, 1), "both": (1, 1)}
ENCRYPTED, CLEAR = "encrypted", "clear"
_AMOUNTS = (0, TINY_BYTES, *(mib * limits.MIB for mib in SIZES))
_WAIT_SECONDS = 1.0


class Streams:
    """Plain TCP connections that share the bytes of one message between them, a thread for each and direction."""

    def __init__(self, sockets: list[socket.socket], most: int) -> None:
        self._sockets = sockets
        self._data, self._into = bytearray(most), bytearray(most)
        for sock in sockets:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def move(self, out: int, into: int) -> None:
        """Send so many bytes while so many come in."""
        jobs: list[Callable[[], None]] = []
        for index, sock in enumerate(self._sockets):
            for memory, nbytes, job in ((self._data, out, _send), (self._into, into, _receive)):
                part = slice(nbytes * index // len(self._sockets), nbytes * (index + 1) // len(self._sockets))
                if part.start < part.stop:
                    view = memoryview(memory)[part]
                    jobs.append(lambda sock=sock, view=view, job=job: job(sock, view))
        threads = [threading.Thread(target=job) for job in jobs[1:]]
        for thread in threads:
            thread.start()
        jobs[0]()
        for thread in threads:
            thread.join()


def _send(sock: socket.socket, data: memoryview) -> None:
    sock.sendall(data)


def _receive(sock: socket.socket, into: memoryview) -> None:
    received = 0
    while received < into.nbytes:
        received += sock.recv_into(into[received:])


def serve(report: Callable[[dict[str, int]], None], keys: KeyPair, accepted: socket.socket) -> None:
    """The other process: takes what comes over the channels and over TCP, and answers as much as it is asked for."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=limits.DATA_LANES)
    doorkeeper = Doorkeeper(context, keys)
    channels = {
        ENCRYPTED: WorkerChannel(context, [HOST], 0, own=keys),
        CLEAR: WorkerChannel(context, [HOST], 0, own=None),
    }
    report({name: channel.port for name, channel in channels.items()})
    for channel in channels.values():
        threading.Thread(target=_serve_channel, args=(channel,), daemon=True).start()
    _serve_tcp(accepted)
    doorkeeper.close()


def _serve_channel(channel: WorkerChannel) -> None:
    answers = {size: torch.ones(size, dtype=torch.uint8) for size in _AMOUNTS}
    while True:
        channel.wait(_WAIT_SECONDS)
        for session, message in channel.receive():
            if message.kind is Kind.HELLO:
                channel.admit(session)
                channel.send(session, Kind.WELCOME, {"for": message.number})
                continue
            body: dict[str, Any] = {"for": message.number, "data": answers[message.body["bytes"]]}
            channel.send(session, Kind.ECHO, body)


def _serve_tcp(listening: socket.socket) -> None:
    sockets = [listening.accept()[0] for _ in range(limits.DATA_LANES)]
    control, _ = listening.accept()
    control.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    streams = Streams(sockets, max(SIZES) * limits.MIB)
    while command := control.recv(TINY_BYTES, socket.MSG_WAITALL):
        there, back = json.loads(command)
        if there or back:
            streams.move(back, there)
        control.sendall(command)


class Driver:
    """The measuring side: one operation of either kind is a message there, and its answer."""

    def __init__(self, ports: dict[str, int], keys: KeyPair, tcp: tuple[str, int]) -> None:
        channel_keys = {ENCRYPTED: ChannelKeys(keys, keys.public), CLEAR: None}
        self.channels = {name: DriverChannel(HOST, port, keys=channel_keys[name]) for name, port in ports.items()}
        for channel in self.channels.values():
            channel.send(Kind.HELLO, {"lanes": channel.lanes})
            while not channel.receive(_WAIT_SECONDS):
                pass
        self._streams = Streams(
            [socket.create_connection(tcp) for _ in range(limits.DATA_LANES)], max(SIZES) * limits.MIB
        )
        self._control = socket.create_connection(tcp)
        self._control.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._data = {size: torch.ones(size, dtype=torch.uint8) for size in _AMOUNTS}

    def close(self) -> None:
        self._control.close()
        for channel in self.channels.values():
            channel.close()

    def over_tcp(self, there: int, back: int) -> None:
        """The message itself in TCP streams; around it a round trip of TINY_BYTES, which is all of an empty one."""
        self._control.sendall(json.dumps([there, back]).encode().ljust(TINY_BYTES))
        if there or back:
            self._streams.move(there, back)
        self._control.recv(TINY_BYTES, socket.MSG_WAITALL)

    def over_channel(self, name: str, there: int, back: int) -> None:
        channel = self.channels[name]
        channel.send(Kind.ECHO, {"data": self._data[there], "bytes": back})
        while not channel.receive(_WAIT_SECONDS):
            pass


def seconds(operation: Callable[[], None]) -> float:
    began = time.perf_counter()
    operation()
    return time.perf_counter() - began


def compare(driver: Driver, rounds: int) -> dict[str, Any]:
    """TCP and the channels take turns, so that a machine whose speed drifts favours none of them."""
    sizes = []
    for mib in SIZES:
        size: dict[str, Any] = {"bytes": mib * limits.MIB}
        for way, (there, back) in WAYS.items():
            amounts = there * mib * limits.MIB, back * mib * limits.MIB
            times = _in_turn(driver, amounts, rounds)
            plain = times.pop("tcp")
            size[way] = {"tcp_gb_per_s": mib * limits.MIB / statistics.median(plain) / 1e9}
            for name, taken in times.items():
                rate = mib * limits.MIB / statistics.median(taken) / 1e9
                # Of the medians: the machine may hold up one operation and not its neighbour.
                ratio = statistics.median(plain) / statistics.median(taken)
                size[way][name] = {"gb_per_s": rate, "ratio": ratio}
        sizes.append(size)
    tiny = _in_turn(driver, (TINY_BYTES, TINY_BYTES), 20 * rounds, tcp=(0, 0))
    return {"sizes": sizes, "tiny_us": {name: 1e6 * statistics.median(taken) for name, taken in tiny.items()}}


def _in_turn(
    driver: Driver, amounts: tuple[int, int], rounds: int, tcp: tuple[int, int] | None = None
) -> dict[str, list[float]]:
    operations: dict[str, Callable[[], None]] = {"tcp": lambda: driver.over_tcp(*(tcp or amounts))}
    for name in driver.channels:
        operations[name] = lambda name=name: driver.over_channel(name, *amounts)
    times: dict[str, list[float]] = {name: [] for name in operations}
    for number in range(rounds + 2):
        for name, operation in operations.items():
            taken = seconds(operation)
            if number >= 2:
                times[name].append(taken)
    return times


def run(rounds: int) -> dict[str, Any]:
    listening = socket.create_server((HOST, 0))
    ours, theirs = socket.socketpair()
    keys = own_identity()
    child = os.fork()
    # A process that has loaded a model has freed blocks of this size, after which malloc keeps what it is given back.
    torch.ones(31 * limits.MIB, dtype=torch.uint8)
    if not child:
        try:
            serve(lambda ports: theirs.sendall(json.dumps(ports).encode()), keys, listening)
        finally:
            os._exit(0)
    driver = Driver(json.loads(ours.recv(200)), keys, listening.getsockname())
    try:
        return compare(driver, rounds)
    finally:
        driver.close()
        os.waitpid(child, 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="operations of each kind and size")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "channel.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MONARCH_CONFIG_DIR"] = folder
        result = run(arguments.rounds)
    record = {
        "what": "one message over a channel between two processes of one machine, against plain TCP over as many "
        "connections as the channel has data lanes, into memory that is there already",
        "ways": "there: from driver to worker; back: from worker to driver; both: at once, gb_per_s of one direction",
        "ratio": "median time of plain TCP / median time of the channel",
        "tiny_us": f"median round trip of {TINY_BYTES} bytes",
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "torch": torch.__version__,
        "zmq": zmq.zmq_version(),
        "lanes": limits.DATA_LANES,
        "result": result,
    }
    arguments.out.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return 0
