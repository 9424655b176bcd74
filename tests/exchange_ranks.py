"""Ranks of an exchange for tests, each a process of its own that does what the test tells it, one command at a time.

As a script it is the process that forks them, so that torch is imported once. They end with it.
"""

from __future__ import annotations

import atexit
import functools
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).parent.parent / "__main__.py"))["load_pack"]()
    from monarch_split.tests.exchange_ranks import fork_on_request

    sys.exit(fork_on_request(sys.argv[1]))

import torch

from monarch_split.distributed.auth import ExchangeKeys, KeyPair
from monarch_split.distributed.exchange import Exchange
from monarch_split.distributed.exchange_group import host_store, join_group
from monarch_split.distributed.exchange_link import ExchangeListener, join_as_driver
from monarch_split.distributed.layout import Span

BOUND = 30.0
HOST = "127.0.0.1"
# Of all exchanges of these tests.
PAIR = KeyPair.of_secret(b"JTKVSB%%)wK0E.X)V>+}o?pNmC{O&4W4b!Ni{Lh6")
KEYS, CLEAR = ExchangeKeys(PAIR, encrypted=True), ExchangeKeys(PAIR, encrypted=False)
_UNTOUCHED = 0x55


@dataclass(frozen=True)
class Operation:
    """What one exchange moves: the shape and dtype of each buffer, and every rank's regions."""

    buffers: Sequence[tuple[tuple[int, ...], torch.dtype]]
    regions: Sequence[Sequence[Span]]

    def tensors(self, seed: int, device: str) -> list[torch.Tensor]:
        """What is to be in the buffers; the same on every rank."""
        generator = torch.Generator().manual_seed(seed)
        made = []
        for shape, dtype in self.buffers:
            count = torch.empty(shape, dtype=dtype).nbytes
            values = torch.randint(
                0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8, generator=generator
            )
            made.append(values.view(dtype).view(shape).to(device))
        return made

    def filled(self, full: Sequence[torch.Tensor], ranks: Sequence[int]) -> list[torch.Tensor]:
        """Buffers in which only the regions of `ranks` are what they are to be."""
        buffers = []
        for tensor in full:
            buffer = torch.full_like(tensor.view(torch.uint8), _UNTOUCHED).view(tensor.dtype)
            for rank in ranks:
                for start, stop in self.regions[rank]:
                    buffer[start:stop] = tensor[start:stop]
            buffers.append(buffer)
        return buffers


TWO_STREAMS = [[(0, 2), (5, 9)], [(2, 5), (9, 13)]]
SMALL = Operation([((13, 3, 5), torch.float32)], TWO_STREAMS)
LARGE = Operation([((1001, 1153), torch.float32), ((1001, 7), torch.bfloat16)], [[(0, 377)], [(377, 1001)]])


class Outcome(NamedTuple):
    value: Any
    error: str | None
    seconds: float


class Gone(Exception):
    """What `check` raises once a command has lasted longer than it may."""


class Rank:
    """A rank in a process of its own."""

    def __init__(self, pid: int, connection: Any) -> None:
        self.pid = pid
        self._connection = connection

    def start(self, command: str, *arguments: Any, patience: float = BOUND) -> None:
        """Let it do this. `patience`: seconds until its `check` raises Gone."""
        self._connection.send((command, arguments, patience))

    def outcome(self) -> Outcome:
        assert self._connection.poll(BOUND), "the rank did not answer"
        return self._connection.recv()

    def answered(self) -> bool:
        return self._connection.poll(0)

    def ask(self, command: str, *arguments: Any) -> Any:
        self.start(command, *arguments)
        outcome = self.outcome()
        assert outcome.error is None, outcome.error
        return outcome.value

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def kill(self) -> None:
        # Its parent leaves it unreaped, so its id cannot have gone to another process.
        os.kill(self.pid, signal.SIGKILL)


class Nursery:
    """Makes ranks by forking a process that has imported torch."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._listener = Listener(str(Path(self._folder.name) / "ranks"))
        command = [sys.executable, __file__, str(self._listener.address)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, env=env)

    def rank(self) -> Rank:
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)
        connection = self._listener.accept()
        return Rank(connection.recv(), connection)

    def close(self) -> None:
        self._process.communicate(timeout=BOUND)
        self._listener.close()
        self._folder.cleanup()


@functools.cache
def nursery() -> Nursery:
    """The one of this test process; it ends with it."""
    made = Nursery()
    atexit.register(made.close)
    return made


def connect(engine: str, ranks: Sequence[Rank]) -> None:
    """Join these ranks by `engine`: "lanes", "lanes in the clear", "lanes cuda" (tensors on GPUs), "gloo" or "nccl"."""
    ports = meet(engine, ranks)
    secret = os.urandom(32)
    for number, rank in enumerate(ranks):
        rank.start("join", engine, number, len(ranks), ports, secret)
    for rank in ranks:
        outcome = rank.outcome()
        assert outcome.error is None, outcome.error


def both(ranks: list[Rank], command: str, *arguments: object) -> list[object]:
    """What the ranks answer to a command that they do together."""
    for rank in ranks:
        rank.start(command, *arguments)
    outcomes = [rank.outcome() for rank in ranks]
    assert [outcome.error for outcome in outcomes] == [None] * len(ranks)
    return [outcome.value for outcome in outcomes]


def meet(engine: str, ranks: Sequence[Rank]) -> list[int | None]:
    """Let the workers listen. Returns the port of every rank."""
    hosts = ranks[1:] if engine.startswith("lanes") else ranks[1:2]
    return [None, *(rank.ask("listen", engine) for rank in hosts)]


def _keys(engine: str) -> ExchangeKeys:
    return CLEAR if engine == "lanes in the clear" else KEYS


class _Served:
    """In the rank's process: what the commands do."""

    def __init__(self) -> None:
        self._listeners: dict[str, Any] = {}
        self._exchange: Exchange | None = None
        self._device = "cpu"
        self._environment = dict(os.environ)
        self._until = 0.0

    def _check(self) -> None:
        if time.monotonic() > self._until:
            raise Gone

    def run(self, command: str, arguments: Sequence[Any], patience: float) -> Outcome:
        began = time.monotonic()
        self._until = began + patience
        try:
            value, error = getattr(self, command)(*arguments), None
        except Exception as raised:
            value, error = None, f"{type(raised).__name__}: {raised}"
        return Outcome(value, error, time.monotonic() - began)

    def listen(self, engine: str) -> int:
        former = self._listeners.pop(engine, None)
        if isinstance(former, ExchangeListener):
            former.close()
        listener = ExchangeListener([HOST], 0, _keys(engine)) if engine.startswith("lanes") else host_store(HOST)
        self._listeners[engine] = listener
        return listener.port

    def join(self, engine: str, rank: int, size: int, ports: Sequence[int | None], secret: bytes) -> None:
        self._device = f"cuda:{rank % torch.cuda.device_count()}" if engine in ("nccl", "lanes cuda") else "cpu"
        if not engine.startswith("lanes"):
            assert ports[1] is not None
            device = torch.device(self._device)
            self._exchange = join_group(engine, rank, size, HOST, ports[1], secret, device, self._check)
        else:
            addresses = [None if port is None else (HOST, port) for port in ports]
            if rank == 0:
                self._exchange = join_as_driver(addresses, secret, _keys(engine))
            else:
                self._exchange = self._listeners[engine].join(rank, addresses, secret, self._check)
        self.exchange.check = self._check

    @property
    def exchange(self) -> Exchange:
        assert self._exchange is not None
        return self._exchange

    def begin(self, forward: int) -> None:
        self.exchange.begin(forward)

    def agree(self, plan: str) -> None:
        self.exchange.agree(plan)

    def all_gather(self, operation: Operation, seed: int) -> bool:
        """Whether this rank then has everyone's regions and nothing else."""
        everyone = range(self.exchange.size)
        return self._exchanged(self.exchange.all_gather, operation, seed, everyone)

    def gather(self, operation: Operation, seed: int) -> bool:
        """Whether rank 0 then has everyone's regions and the others only their own."""
        seen = range(self.exchange.size) if self.exchange.rank == 0 else [self.exchange.rank]
        return self._exchanged(self.exchange.gather, operation, seed, seen)

    def _exchanged(self, exchange: Callable[..., None], operation: Operation, seed: int, ranks: Sequence[int]) -> bool:
        full = operation.tensors(seed, self._device)
        buffers = operation.filled(full, [self.exchange.rank])
        exchange(buffers, operation.regions)
        self._until_there()
        wanted = operation.filled(full, ranks)
        return all(
            torch.equal(buffer.view(torch.uint8), right.view(torch.uint8))
            for buffer, right in zip(buffers, wanted, strict=True)
        )

    def _until_there(self) -> None:
        """NCCL only enqueues; looking at the result would then wait without end for a rank that is gone."""
        if self._device != "cpu":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
            while not event.query():
                self._check()
                time.sleep(0.001)

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def close(self) -> None:
        self.exchange.close()

    def counts(self) -> dict[str, float]:
        return {name: getattr(self.exchange, name) for name in ("sent_bytes", "received_bytes", "waiting")}

    def resident(self) -> int:
        """Bytes of this process in memory."""
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def resources(self) -> tuple[int, int]:
        """(open file descriptors, threads)."""
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def globals_changed(self) -> bool:
        return torch.distributed.is_initialized() or self._environment != dict(os.environ)


def _become_rank(address: str) -> None:
    with Client(address) as connection:
        connection.send(os.getpid())
        served = _Served()
        while True:
            command, arguments, patience = connection.recv()
            connection.send(served.run(command, arguments, patience))


def fork_on_request(address: str) -> None:
    torch.set_num_threads(1)
    children: list[int] = []
    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                _become_rank(address)
            finally:
                os._exit(0)
        children.append(pid)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
