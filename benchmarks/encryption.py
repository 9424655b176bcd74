"""What keys cost: a row split, the channel, and the lanes of a token split, with and without them; needs no ComfyUI.

python benchmarks/encryption.py [--steps 30]     writes benchmarks/results/encryption.json
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import runpy
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    os.environ["OMP_NUM_THREADS"] = "1"
    runpy.run_path(str(Path(__file__).resolve().parent.parent / "__main__.py"))["load_pack"]()
    from monarch_split.benchmarks.encryption import main

    sys.exit(main())

import torch
import zmq

from ..demo.reference import DEMO, TINY, ReferenceConfig
from ..demo.reference_runtime import load_reference_model, write_reference_model
from ..demo.worker_process import WorkerProcess
from ..distributed import limits, peers
from ..distributed.addresses import Address, parse_address
from ..distributed.auth import ExchangeKeys, KnownWorker, known_worker
from ..distributed.cluster import Cluster
from ..distributed.exchange import Exchange
from ..distributed.exchange_link import ExchangeListener, join_as_driver
from ..distributed.link_rate import measure_link
from ..distributed.peer import Peer
from ..distributed.report import Report
from ..distributed.session import Session
from ..distributed.versions import own_versions
from .exchange import HOST, SECRET, PlainTcp, measure
from .machine import machine
from .row_split import LATENT_BYTES, ROWS, inputs, seconds

ENCRYPTED, CLEAR = "encrypted", "clear"


def lanes(rounds: int) -> dict[str, Any]:
    """The exchange between two processes, over lanes with keys, lanes without, and plain TCP, in turn."""
    listening = socket.create_server((HOST, 0))
    ours, theirs = socket.socketpair()
    all_keys = {name: ExchangeKeys.new(encrypted=name == ENCRYPTED) for name in (ENCRYPTED, CLEAR)}
    child = os.fork()
    # See exchange.run.
    torch.ones(31 * limits.MIB, dtype=torch.uint8)
    engines: dict[str, Exchange] = {}
    if child:
        sock, _ = listening.accept()
        ports = json.loads(ours.recv(100))
        for name, keys in all_keys.items():
            engines[name] = join_as_driver([None, (HOST, ports[name])], SECRET, keys)
    else:
        sock = socket.create_connection(listening.getsockname())
        listeners = {name: ExchangeListener([HOST], 0, keys) for name, keys in all_keys.items()}
        theirs.sendall(json.dumps({name: listener.port for name, listener in listeners.items()}).encode())
        for name, listener in listeners.items():
            engines[name] = listener.join(1, [None, (HOST, listener.port)], SECRET, lambda: None)
    for engine in engines.values():
        engine.begin(1)
    try:
        return measure(0 if child else 1, PlainTcp(sock), engines, torch.device("cpu"), rounds)
    finally:
        if not child:
            time.sleep(0.5)  # until rank 0 has received the last of it
            os._exit(0)
        os.waitpid(child, 0)


def channel(workers: dict[str, WorkerProcess]) -> dict[str, Any]:
    """Round trip and rate of a channel, in turn."""
    found: dict[str, list[Any]] = {name: [] for name in workers}
    for _ in range(3):
        for name, worker in workers.items():
            peer = peers.Peer(parse_address(worker.address), lambda: None)
            with contextlib.closing(_Closing(peer)):
                peer.connect(own_versions(None), allow_mismatch=False)
                found[name].append(measure_link(peer))
    return {
        name: {
            "rtt_ms": 1000 * statistics.median(link.rtt for link in links),
            "gb_per_s": statistics.median(link.rate for link in links) / 1e9,
        }
        for name, links in found.items()
    }


class _Closing:
    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def close(self) -> None:
        self._peer.close(cancel=False)


def row_split(workers: dict[str, WorkerProcess], folder: Path, config: ReferenceConfig, steps: int) -> dict[str, Any]:
    """Forwards of two rows on one process, split with keys and split without, in turn."""
    recipe = write_reference_model(config, folder / f"{config.width}.safetensors")
    model = load_reference_model(recipe.path)
    args, kwargs = inputs(ROWS)
    kwargs["context"] = kwargs["context"][..., : config.context_width]
    times: dict[str, list[float]] = {"alone": [], ENCRYPTED: [], CLEAR: []}
    with contextlib.ExitStack() as stack:
        sessions: dict[str, Session] = {}
        for name, worker in workers.items():
            cluster = Cluster(name, (parse_address(worker.address),))
            session = Session(cluster, own_versions(None), Report("rows"), lambda: recipe, check=lambda: None)
            sessions[name] = stack.enter_context(session)
        stack.enter_context(torch.inference_mode())
        for session in sessions.values():
            for _ in range(3):
                session.forward(model, args, kwargs)
        for _ in range(steps):
            times["alone"].append(seconds(lambda: model(*args, **kwargs)))
            for name, session in sessions.items():
                times[name].append(seconds(lambda session=session: session.forward(model, args, kwargs)))
    price = [a - b for a, b in zip(times[ENCRYPTED], times[CLEAR], strict=True)]
    split = {
        name: {
            "split_s": statistics.median(times[name]),
            "ratio": statistics.median(a / s for a, s in zip(times["alone"], times[name], strict=True)),
            "forwards_split": session.report.forwards_split,
        }
        for name, session in sessions.items()
    }
    return {
        "steps": steps,
        "bytes_per_step": 2 * LATENT_BYTES,
        "alone_s": statistics.median(times["alone"]),
        **split,
        "price_ms": 1000 * statistics.median(price),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "encryption.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    exchange = lanes(arguments.rounds)
    launcher = [str(Path(__file__).with_name("clear_worker.py"))]
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        workers = {
            ENCRYPTED: stack.enter_context(WorkerProcess(cache=folder / "one", name=ENCRYPTED)),
            CLEAR: stack.enter_context(WorkerProcess(cache=folder / "two", name=CLEAR, launcher=launcher)),
        }
        in_the_clear = parse_address(workers[CLEAR].address)

        def worker_at(address: Address) -> KnownWorker:
            return KnownWorker(None) if address == in_the_clear else known_worker(address)

        peers.Peer = functools.partial(Peer, worker_at=worker_at)
        link = channel(workers)
        rows = row_split(workers, folder, DEMO, arguments.steps)
        # Other work on the machine hides milliseconds in a long step.
        short = row_split(workers, folder, TINY, 10 * arguments.steps)
    record = {
        "what": "the same with CURVE keys and in the clear, between two processes of one machine over the loopback",
        "row_split": "one forward of two rows, alone and split between two processes of one thread each; price_ms: "
        "median of the differences of neighbouring forwards with and without keys",
        "short_row_split": "the same latents with a model that computes little",
        "channel": "two data lanes, one message after the other, in the slower direction",
        "exchange": "all-gather of a token split over lanes, both directions at once; ratio: time of plain TCP / time",
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "torch": torch.__version__,
        "zmq": zmq.zmq_version(),
        "exchange_lanes": limits.EXCHANGE_LANES,
        "result": {"row_split": rows, "short_row_split": short, "channel": link, "exchange": exchange},
    }
    arguments.out.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record["result"], indent=2))
    return 0
