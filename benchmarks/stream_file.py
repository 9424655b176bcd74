"""A model file sent to a worker on this machine against plain TCP over loopback, and the disk; needs no ComfyUI.

python benchmarks/stream_file.py [--rounds 5]     writes benchmarks/results/stream_file.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import runpy
import socket
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    runpy.run_path(str(Path(__file__).resolve().parent.parent / "__main__.py"))["load_pack"]()
    from monarch_split.benchmarks.stream_file import main

    sys.exit(main())

import torch

from ..demo.reference import TINY
from ..demo.reference_runtime import write_reference_model
from ..demo.worker_process import WorkerProcess
from ..distributed import limits
from ..distributed.addresses import parse_address
from ..distributed.peer import Peer
from ..distributed.recipe import Recipe
from ..distributed.versions import own_versions
from .machine import machine

MODEL = replace(TINY, width=1536, heads=8)
BLOCK = 4 * limits.MIB


def tcp_rate(size: int) -> float:
    """Bytes per second of one TCP connection between this process and another, from memory to memory."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        child = os.fork()
        if child == 0:
            with socket.create_connection(server.getsockname()) as out:
                block = bytes(BLOCK)
                for _ in range(size // BLOCK):
                    out.sendall(block)
            os._exit(0)
        connection, _ = server.accept()
        with connection:
            buffer = bytearray(BLOCK)
            received, began = 0, time.perf_counter()
            while count := connection.recv_into(buffer):
                received += count
            seconds = time.perf_counter() - began
        os.waitpid(child, 0)
    return received / seconds


def disk_rate(size: int, folder: Path) -> float:
    """Bytes per second at which a program writes a file there, without waiting for the disk itself."""
    block = os.urandom(BLOCK)
    path = folder / "written"
    began = time.perf_counter()
    with path.open("wb") as out:
        for _ in range(size // BLOCK):
            out.write(block)
    seconds = time.perf_counter() - began
    path.unlink()
    return size / seconds


def hash_rate(size: int) -> float:
    """Bytes per second at which one thread digests, as both sides must."""
    block, content = os.urandom(BLOCK), hashlib.sha256()
    began = time.perf_counter()
    for _ in range(size // BLOCK):
        content.update(block)
    return size / (time.perf_counter() - began)


def cpu_seconds(pid: int) -> float:
    """That a process has used so far, all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def stream(recipe: Recipe) -> tuple[float, float, float]:
    """A file to a new worker with an empty cache, to the last acknowledgement.

    (bytes per second, CPU seconds of this process, CPU seconds of the worker)
    """
    done_at = [0.0]

    def progress(done: int, total: int) -> None:
        if done == total:
            done_at[0] = time.perf_counter()

    with tempfile.TemporaryDirectory() as folder, WorkerProcess(cache=Path(folder) / "cache") as worker:
        peer = Peer(parse_address(worker.address), lambda: None)
        try:
            peer.connect(own_versions(None), allow_mismatch=False)
            busy = [cpu_seconds(pid) for pid in (os.getpid(), worker.pid)]
            began = time.perf_counter()
            peer.prepare(recipe, progress)
            here, there = (cpu_seconds(pid) - was for pid, was in zip((os.getpid(), worker.pid), busy, strict=True))
        finally:
            peer.close(cancel=True)
    return recipe.file.bytes / (done_at[0] - began), here, there


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "stream_file.json")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        recipe = write_reference_model(MODEL, Path(folder) / "model.safetensors")
        size = recipe.file.bytes
        # The disk first: memory that a virtual machine uses for the first time is several times slower.
        rounds = [
            {
                "disk": disk_rate(size, Path(folder)),
                "tcp": tcp_rate(size),
                "hash": hash_rate(size),
                "all": stream(recipe),
            }
            for _ in range(arguments.rounds)
        ]
    ratios = [each["all"][0] / each["tcp"] for each in rounds]
    result: dict[str, Any] = {
        "rounds": arguments.rounds,
        "file_gb": size / 1e9,
        "stream_gb_per_s": statistics.median(each["all"][0] for each in rounds) / 1e9,
        "tcp_gb_per_s": statistics.median(each["tcp"] for each in rounds) / 1e9,
        "disk_write_gb_per_s": statistics.median(each["disk"] for each in rounds) / 1e9,
        "hash_gb_per_s": statistics.median(each["hash"] for each in rounds) / 1e9,
        "driver_cpu_s_per_gb": statistics.median(each["all"][1] for each in rounds) / size * 1e9,
        "worker_cpu_s_per_gb": statistics.median(each["all"][2] for each in rounds) / size * 1e9,
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }
    record = {
        "what": "a model file to a worker on the same machine: read, digested, encrypted, sent, decrypted, digested, "
        "written, acknowledged",
        "ratio": "median of the ratios of neighbouring runs, stream / tcp (one connection, memory to memory)",
        "cpu_s_per_gb": "of all threads; both sides together, over the number of cores, bound the rate here",
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "load_before": load,
        "torch": torch.__version__,
        "result": result,
    }
    arguments.out.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return 0
