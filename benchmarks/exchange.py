"""The exchange of tokens between two processes of this machine, by both engines, against plain TCP; needs no ComfyUI.

python benchmarks/exchange.py [--rounds 40]     writes benchmarks/results/exchange.json
python benchmarks/exchange.py --gpus            between two GPUs; writes benchmarks/results/gpu_exchange.json
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    os.environ["OMP_NUM_THREADS"] = "1"
    runpy.run_path(str(Path(__file__).resolve().parent.parent / "__main__.py"))["load_pack"]()
    from monarch_split.benchmarks.exchange import main

    sys.exit(main())

import torch
import zmq

from ..distributed import limits
from ..distributed.auth import ExchangeKeys
from ..distributed.exchange import Exchange
from ..distributed.exchange_group import host_store, join_group
from ..distributed.exchange_link import ExchangeListener, join_as_driver
from .machine import machine

HOST = "127.0.0.1"
# Keys of one token of Flux: 24 heads of 128, BF16.
TOKEN_BYTES = 24 * 128 * 2
SIZES = (0.1, 1, 8, 32)
SECRET = bytes(32)

# Sends this rank's tokens and receives as many.
Operation = Callable[[], None]


class PlainTcp:
    """One connection, both directions at once, a thread for each; the least that has to be done."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._go, self._sent = threading.Semaphore(0), threading.Semaphore(0)
        self._out = memoryview(b"")
        threading.Thread(target=self._send, daemon=True).start()

    def _send(self) -> None:
        while True:
            self._go.acquire()
            self._sock.sendall(self._out)
            self._sent.release()

    def swap(self, out: memoryview, into: memoryview) -> None:
        self._out = out
        self._go.release()
        received = 0
        while received < into.nbytes:
            received += self._sock.recv_into(into[received:])
        self._sent.acquire()


def operations(
    rank: int, tokens: int, tcp: PlainTcp, engines: dict[str, Exchange], device: torch.device
) -> dict[str, Operation]:
    """By name: plain TCP from memory of the CPU, engines on `device`. Two buffers take turns, as in a token split."""
    regions = [[(0, tokens)], [(tokens, 2 * tokens)]]

    def in_turn(operate: Callable[[torch.Tensor], None], device: torch.device) -> Operation:
        buffers = [torch.zeros(2 * tokens, TOKEN_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]

        def run() -> None:
            buffers.append(buffers.pop(0))
            operate(buffers[0])
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        return run

    def swap(buffer: torch.Tensor) -> None:
        halves = [part.reshape(-1).numpy().data for part in buffer.split(tokens)]
        tcp.swap(halves[rank], halves[1 - rank])

    def all_gather(exchange: Exchange) -> Operation:
        return in_turn(lambda buffer: exchange.all_gather([buffer], regions), device)

    ways = {name: all_gather(exchange) for name, exchange in engines.items()}
    return {"tcp": in_turn(swap, torch.device("cpu")), **ways}


def seconds(operation: Operation) -> float:
    began = time.perf_counter()
    operation()
    return time.perf_counter() - began


def measure(
    rank: int, tcp: PlainTcp, engines: dict[str, Exchange], device: torch.device, rounds: int
) -> dict[str, Any]:
    """Both ranks do the same. The ways take turns, so that a machine whose speed drifts favours none of them."""
    sizes = []
    for mib in SIZES:
        tokens = max(1, round(mib * limits.MIB / TOKEN_BYTES))
        ways = operations(rank, tokens, tcp, engines, device)
        for operation in ways.values():
            for _ in range(3):
                operation()
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, operation in ways.items():
                times[name].append(seconds(operation))
        plain = times.pop("tcp")
        size: dict[str, Any] = {"bytes": tokens * TOKEN_BYTES, "tcp_gb_per_s": _rate(tokens, plain)}
        for name, taken in times.items():
            ratios = [a / b for a, b in zip(plain, taken, strict=True)]
            size[name] = {"gb_per_s": _rate(tokens, taken), "ratio": statistics.median(ratios)}
        sizes.append(size)
    tiny = operations(rank, 1, tcp, engines, device)
    times = {name: [] for name in tiny}
    for _ in range(10 * rounds):
        for name, operation in tiny.items():
            times[name].append(seconds(operation))
    return {"sizes": sizes, "tiny_us": {name: 1e6 * statistics.median(taken) for name, taken in times.items()}}


def _rate(tokens: int, taken: list[float]) -> float:
    return tokens * TOKEN_BYTES / statistics.median(taken) / 1e9


def run(gpus: bool, rounds: int) -> dict[str, Any]:
    listening = socket.create_server((HOST, 0))
    ours, theirs = socket.socketpair()
    keys = ExchangeKeys.new(encrypted=False)
    child = os.fork()
    rank = 0 if child else 1
    device = torch.device("cuda", rank) if gpus else torch.device("cpu")
    backend = "nccl" if gpus else "gloo"
    if gpus:
        torch.cuda.set_device(device)
    # A process that has loaded a model has freed blocks of this size, after which malloc keeps what it is given back.
    torch.ones(31 * limits.MIB, dtype=torch.uint8)
    if rank == 0:
        sock, _ = listening.accept()
        lanes_port, store_port = json.loads(ours.recv(100))
        lanes = join_as_driver([None, (HOST, lanes_port)], SECRET, keys)
    else:
        sock = socket.create_connection(listening.getsockname())
        listener, store = ExchangeListener([HOST], 0, keys), host_store(HOST)
        store_port = store.port
        theirs.sendall(json.dumps([listener.port, store_port]).encode())
        lanes = listener.join(1, [None, (HOST, listener.port)], SECRET, lambda: None)
    group = join_group(backend, rank, 2, HOST, store_port, SECRET, device, lambda: None)
    engines: dict[str, Exchange] = {"lanes": lanes, backend: group}
    for engine in engines.values():
        engine.begin(1)
    try:
        return measure(rank, PlainTcp(sock), engines, device, rounds)
    finally:
        if rank == 1:
            time.sleep(0.5)  # until rank 0 has received the last of it
            os._exit(0)
        os.waitpid(child, 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40, help="operations of each kind and size")
    parser.add_argument("--gpus", action="store_true", help="exchange between two GPUs, over NCCL in place of Gloo")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = run(arguments.gpus, arguments.rounds)
    record = {
        "what": "all-gather between two processes of one machine, by ZeroMQ lanes and by a process group of torch "
        "(Gloo on CPUs, NCCL on GPUs), against plain TCP over the loopback",
        "gb_per_s": "per rank and direction; both directions at once",
        "ratio": "median of the ratios of neighbouring operations, time of plain TCP / time of the engine",
        "tiny_us": f"median time of an operation of {TOKEN_BYTES} bytes",
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "gpu": torch.cuda.get_device_name() if arguments.gpus else None,
        "torch": torch.__version__,
        "zmq": zmq.zmq_version(),
        "lanes": limits.EXCHANGE_LANES,
        "result": result,
    }
    name = "gpu_exchange.json" if arguments.gpus else "exchange.json"
    out = arguments.out or Path(__file__).parent / "results" / name
    out.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return 0
