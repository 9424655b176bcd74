"""Row split between two processes of this machine, one thread each, with the reference model; needs no ComfyUI.

python benchmarks/row_split.py [--steps 30]     writes benchmarks/results/row_split.json
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import runpy
import socket
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    os.environ["OMP_NUM_THREADS"] = "1"
    runpy.run_path(str(Path(__file__).resolve().parent.parent / "__main__.py"))["load_pack"]()
    from monarch_split.benchmarks.row_split import main

    sys.exit(main())

import torch

from ..demo.reference import DEMO, ReferenceConfig, ReferenceDiT
from ..demo.reference_runtime import load_reference_model, write_reference_model
from ..demo.worker_process import WorkerProcess
from ..distributed import peers
from ..distributed.addresses import parse_address
from ..distributed.auth import KnownWorker
from ..distributed.cluster import Cluster
from ..distributed.ledger import DRIVER
from ..distributed.peer import Peer
from ..distributed.report import Report
from ..distributed.session import Session
from ..distributed.versions import own_versions
from .machine import machine

# cond + uncond of one image of 512 x 512 pixels, as CFG asks for them in every step.
ROWS, SIDE, TOKENS = 2, 64, 77
LATENT_BYTES = DEMO.channels * SIDE * SIDE * 4


def inputs(rows: int, config: ReferenceConfig = DEMO, side: int = SIDE) -> tuple[tuple[Any, ...], dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, config.channels, side, side, generator=generator)
    context = torch.randn(rows, TOKENS, config.context_width, generator=generator)
    options = {"cond_or_uncond": list(range(rows)), "sigmas": torch.tensor([0.7])}
    return (x, torch.full((rows,), 0.7)), {"context": context, "transformer_options": options}


def seconds(call: Any) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def plain_tcp_rate() -> float:
    """Bytes per second that a plain TCP connection of the loopback carries at best, from one thread to another."""
    count, rates = 64, []
    data, buffer = bytes(1 << 20), memoryview(bytearray(1 << 20))
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        with receiver:
            for _ in range(10):
                thread = threading.Thread(target=lambda: [sender.sendall(data) for _ in range(count)])
                began, received = time.perf_counter(), 0
                thread.start()
                while received < count * len(data):
                    received += receiver.recv_into(buffer)
                rates.append(received / (time.perf_counter() - began))
                thread.join()
    return max(rates)


def measure(model: ReferenceDiT, session: Session, steps: int) -> dict[str, Any]:
    """Whole forwards and split ones in turn, so that a machine whose speed drifts does not favour either."""
    args, kwargs = inputs(ROWS)
    report = session.report
    one_args, one_kwargs = inputs(1)
    alone, one_row, split, slower, overhead = [], [], [], [], []
    with torch.inference_mode():
        whole = model(*args, **kwargs)
        for _ in range(2):
            session.forward(model, args, kwargs)
        output = session.forward(model, args, kwargs)
        for _ in range(steps):
            alone.append(seconds(lambda: model(*args, **kwargs)))
            one_row.append(seconds(lambda: model(*one_args, **one_kwargs)))
            busy = report.busy_seconds
            split.append(seconds(lambda: session.forward(model, args, kwargs)))
            slower.append(report.busy_seconds - busy)
            overhead.append(split[-1] - slower[-1])
    ratios = [a / s for a, s in zip(alone, split, strict=True)]
    elsewhere = sum(count for node, count in report.rows.items() if node != DRIVER)
    bytes_per_step, rate = 2 * elsewhere * LATENT_BYTES, plain_tcp_rate()
    overhead_ms = 1000 * statistics.median(overhead)
    return {
        "steps": steps,
        "alone_s": statistics.median(alone),
        "one_row_s": statistics.median(one_row),
        "split_s": statistics.median(split),
        "slower_node_s": statistics.median(slower),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "overhead_ms": overhead_ms,
        "overhead_beyond_bytes_ms": overhead_ms - 1000 * bytes_per_step / rate,
        "overhead_ms_max": 1000 * max(overhead),
        "bytes_per_step": bytes_per_step,
        "tcp_gb_per_s": rate / 1e9,
        "max_abs_diff": (output - whole).abs().max().item(),
        "forwards": report.forwards,
        "forwards_split": report.forwards_split,
        "rows": report.rows,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "row_split.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MONARCH_CONFIG_DIR"] = folder
        recipe = write_reference_model(DEMO, Path(folder) / "reference.safetensors")
        model = load_reference_model(recipe.path)
        results = {}
        for name, launcher in (("encrypted", []), ("clear", [str(Path(__file__).with_name("clear_worker.py"))])):
            if name == "clear":
                peers.Peer = functools.partial(Peer, worker_at=lambda address: KnownWorker(None))
            report = Report("rows")
            with WorkerProcess(cache=Path(folder) / "cache", launcher=launcher) as worker:
                cluster = Cluster("benchmark", (parse_address(worker.address),))
                with Session(cluster, own_versions(None), report, lambda: recipe, check=lambda: None) as session:
                    results[name] = measure(model, session, arguments.steps)
    record = {
        "what": "one forward of two rows: on one process, and split by rows between two (one thread each, loopback); "
        "in_the_clear: the same without encryption",
        "ratio": "median of the ratios of neighbouring runs, alone / split",
        "one_row_s, slower_node_s": "one row on an otherwise idle machine, and while both processes compute one",
        "overhead_ms": "split forward minus the slower node's computing: sending, waking, receiving, joining",
        "overhead_beyond_bytes_ms": "without what the latents take at the rate of plain TCP over this loopback",
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "torch": torch.__version__,
        "latent_bytes_per_row": LATENT_BYTES,
        "result": results["encrypted"],
        "in_the_clear": results["clear"],
    }
    arguments.out.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(results, indent=2))
    return 0
