"""A driver that means harm: damaged frames and messages for the codec and for a real worker, which has to live on.

python benchmarks/fuzz.py [--frames 1000000] [--seed 0]     writes benchmarks/results/fuzz.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import runpy
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    os.environ["OMP_NUM_THREADS"] = "1"
    runpy.run_path(str(Path(__file__).resolve().parent.parent / "__main__.py"))["load_pack"]()
    from monarch_split.benchmarks.fuzz import main

    sys.exit(main())

import torch
import zmq

from ..demo.reference import TINY, ReferenceDiT
from ..demo.reference_runtime import load_reference_model, write_reference_model
from ..demo.worker_process import PACK, WorkerProcess
from ..distributed import limits
from ..distributed.addresses import parse_address
from ..distributed.channel import Assembler, ChannelLost
from ..distributed.codec import ProtocolError, replace_kept
from ..distributed.driver_channel import DriverChannel
from ..distributed.fields import check_fields
from ..distributed.files import FileRef
from ..distributed.invitation import Invitation
from ..distributed.messages import FROM_DRIVER, Kind, Message
from ..distributed.peer import Peer, known_worker
from ..distributed.recipe import Recipe
from ..distributed.rows import Call
from ..distributed.versions import own_versions
from .hostile import Damage
from .machine import machine

# What a driver may say between PREPARE and READY, and with a model.
_PREPARING = frozenset({Kind.PREPARE, Kind.TENSORS, Kind.FILE_BEGIN, Kind.FILE_CHUNK, Kind.FILE_END})
_COMPUTING = FROM_DRIVER - _PREPARING - {Kind.CANCEL, Kind.END}
_PATIENCE = 30.0
_CHECK_EVERY = 25
# What a worker may have more of at the end than once it has served a while, and at most in between.
_KEPT_BYTES, _PEAK_BYTES = 128 * limits.MIB, 1 * limits.GIB


@dataclass
class Findings:
    """What was thrown and what went wrong. Nothing of the latter may be left."""

    frames: int = 0
    refused: int = 0
    taken: int = 0
    sessions: int = 0
    right_forwards: int = 0
    problems: list[str] = field(default_factory=list)
    resident: dict[str, int] = field(default_factory=dict)


# --- the codec and what reads its messages ---------------------------------------------------------------------------


def attack_codec(damage: Damage, frames: int, findings: Findings) -> None:
    """Throw frames at assemblers, each until it refuses one, and their messages at whatever takes them apart."""
    while findings.frames < frames:
        state = damage.chance.getstate()
        try:
            _one_assembler(damage, findings)
        except ProtocolError:
            findings.refused += 1
        except Exception:
            findings.problems.append(f"{traceback.format_exc()}\nstate {hash(state)}")
            return


def _one_assembler(damage: Damage, findings: Findings) -> None:
    assembler = Assembler(FROM_DRIVER)
    for number in range(1, 30):
        control, chunks = damage.frames(number)
        late = damage.chance.random() < 0.5
        for chunk in chunks if not late else ():
            findings.frames += len(chunk)
            assembler.data([memoryview(part) for part in chunk])
        findings.frames += len(control)
        assembler.control([memoryview(frame) for frame in control])
        for chunk in chunks if late else ():
            findings.frames += len(chunk)
            assembler.data([memoryview(part) for part in chunk])
        for message in assembler.take():
            findings.taken += 1
            take_apart(message)


def take_apart(message: Message) -> None:
    """What a worker does first with a message. Raises ProtocolError."""
    check_fields(message)
    if "file" in message.body:
        FileRef.from_message(message.body["file"])
    if message.kind is Kind.EXCHANGE_JOIN:
        Invitation.from_message(message.body)
    replace_kept(message.body, {1: torch.zeros(1)}, copy=True)


# --- a worker --------------------------------------------------------------------------------------------------------


class Attack:
    """Sessions of a paired driver that misbehaves, against one worker."""

    def __init__(self, damage: Damage, worker: WorkerProcess, recipe: Recipe, model: ReferenceDiT, out: Findings):
        self._damage = damage
        self._worker = worker
        self._recipe = recipe
        self._address = parse_address(worker.address)
        self._findings = out
        self._kinds: Counter[str] = Counter()
        x, context = torch.linspace(-1, 1, 1024).view(1, 16, 8, 8), torch.linspace(-1, 1, 512).view(1, 16, 32)
        options = {"cond_or_uncond": [0], "sigmas": torch.tensor([0.7])}
        self._call = Call((x, torch.tensor([0.7])), {"context": context, "transformer_options": options})
        with torch.inference_mode():
            self._expected = model(*self._call.args, **self._call.kwargs)

    def run(self, frames: int, seconds: float) -> None:
        """Attack until so many frames were sent, or so many seconds are over; stops at the first problem."""
        until, target = time.monotonic() + seconds, self._findings.frames + frames
        self._serves()
        baseline = resident(self._worker.pid)
        self._findings.resident = {"begin": baseline, "peak": baseline, "end": baseline}
        while self._findings.frames < target and time.monotonic() < until and not self._findings.problems:
            with contextlib.suppress(ChannelLost):
                self._session()
            self._findings.sessions += 1
            self._watch_memory()
            if self._findings.sessions % _CHECK_EVERY == 0:
                self._serves()
                if self._findings.sessions == 4 * _CHECK_EVERY:
                    self._findings.resident["begin"] = max(baseline, resident(self._worker.pid))
        self._serves()
        self._findings.resident["end"] = resident(self._worker.pid)
        grown = self._findings.resident["end"] - self._findings.resident["begin"]
        if grown > _KEPT_BYTES:
            self._findings.problems.append(f"the worker has kept {grown} bytes")

    def _watch_memory(self) -> None:
        if not self._worker.running:
            self._findings.problems.append(f"the worker ended:\n{self._worker.output[-5000:]}")
            return
        seen = self._findings.resident
        seen["peak"] = max(seen["peak"], resident(self._worker.pid))
        if seen["peak"] - seen["begin"] > _PEAK_BYTES:
            self._findings.problems.append(f"the worker took {seen['peak'] - seen['begin']} bytes more")

    def _session(self) -> None:
        """One session: greet, perhaps have the model built, then misbehave, and end or just go."""
        keys = known_worker(self._address).keys
        with contextlib.closing(DriverChannel(self._address.host, self._address.port, keys=keys)) as channel:
            number = channel.send(Kind.HELLO, {"lanes": channel.lanes, **own_versions(None).as_dict()})
            if not self._answer(channel, number):
                return
            kinds = _PREPARING
            if self._damage.chance.random() < 0.3:
                number = channel.send(*self._damage.recipe())
                self._answer(channel, number)
            elif self._damage.chance.random() < 0.8:
                file = self._recipe.file.as_dict()
                number = channel.send(Kind.PREPARE, {"recipe": self._recipe.tree, "file": file})
                if not self._answer(channel, number, Kind.READY):
                    return
                kinds = _COMPUTING
            if self._damage.chance.random() < 0.2:
                self._throw_frames(channel, kinds)
            else:
                self._throw_bodies(channel, kinds)
            if self._damage.chance.random() < 0.4:
                channel.receive(0.1)
            if self._damage.chance.random() < 0.8:
                channel.send(self._damage.chance.choice([Kind.END, Kind.CANCEL]), {})

    def _throw_bodies(self, channel: DriverChannel, kinds: frozenset[Kind]) -> None:
        for _ in range(self._damage.chance.choice([1, 2, 3, 5, 5, 300])):
            kind, body = self._damage.body(kinds)
            channel.send(kind, body)
            self._findings.frames += 1
            self._kinds[kind.name] += 1
            if self._damage.chance.random() < 0.05:
                channel.receive(0.001)

    def _throw_frames(self, channel: DriverChannel, kinds: frozenset[Kind]) -> None:
        control, *data = channel._sockets
        for number in range(10, 10 + self._damage.chance.choice([1, 5, 30])):
            frames, chunks = self._damage.frames(number, kinds)
            control.send_multipart(frames)
            for chunk in chunks:
                self._damage.chance.choice(data).send_multipart(chunk)
            self._findings.frames += len(frames) + sum(map(len, chunks))
        channel.receive(0.001)

    def _answer(self, channel: DriverChannel, number: int, kind: Kind | None = None) -> Message | None:
        """The answer to a message; None, which is a finding, if there is none."""
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            for message in channel.receive(limits.POLL_SECONDS):
                if message.body.get("for") == number and kind in (None, message.kind):
                    return message
        self._findings.problems.append(f"no answer within {_PATIENCE:.0f} s:\n{self._worker.output[-3000:]}")
        return None

    def _serves(self) -> None:
        """The worker still computes what it should."""
        deadline = time.monotonic() + _PATIENCE

        def check() -> None:
            if time.monotonic() > deadline:
                raise TimeoutError("a right forward took too long")

        peer = Peer(self._address, check)
        try:
            peer.connect(own_versions(None), allow_mismatch=False)
            peer.prepare(self._recipe, lambda done, total: None)
            peer.wait_ready(self._recipe)
            share = peer.finish(peer.start(self._call))
            if (share.output - self._expected).abs().max().item() > 1e-5:
                self._findings.problems.append("the worker computes something else")
            self._findings.right_forwards += 1
        except Exception as error:
            self._findings.problems.append(f"the worker does not serve: {error!r}\n{self._worker.output[-5000:]}")
        finally:
            peer.close(cancel=False)


def resident(pid: int) -> int:
    """Bytes of memory that a process has."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


@contextlib.contextmanager
def watched_worker(folder: Path, findings: Findings) -> Iterator[WorkerProcess]:
    """A worker whose own folder is `folder`. What it touches outside of that, and of its programs, is a finding."""
    (folder / "cache").mkdir()
    log = folder / "touched"
    own = os.environ.get("MONARCH_CONFIG_DIR", str(folder / "config"))
    inside = [str(folder / "cache"), own, str(PACK), sys.prefix, sys.base_prefix, "/proc", "/sys"]
    watcher = Path(__file__).with_name("audited.py")
    launcher = [str(watcher), str(log), os.pathsep.join(inside)]
    # What a worker does when it starts is not what is looked at.
    with WorkerProcess(cache=folder / "cache", launcher=launcher, environment={"HOME": str(folder)}) as worker:
        started = len(log.read_text())
        before = _listing(folder)
        yield worker
        touched = log.read_text()[started:].splitlines()
        findings.problems += [f"the worker touched {line}" for line in dict.fromkeys(touched)]
        findings.problems += [f"there is a new file {path}" for path in _listing(folder) - before]


def _listing(folder: Path) -> set[Path]:
    """All files but those of the cache."""
    return {path for path in folder.rglob("*") if (folder / "cache") not in path.parents}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=1_000_000, help="for the codec")
    parser.add_argument("--worker-frames", type=int, default=250_000, help="for the worker")
    parser.add_argument("--worker-seconds", type=float, default=420, help="at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "fuzz.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    codec, served = Findings(), Findings()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ.setdefault("MONARCH_CONFIG_DIR", str(folder / "config"))
        recipe = write_reference_model(TINY, folder / "tiny.safetensors")
        damage = Damage(arguments.seed, recipe)
        began = time.monotonic()
        before = resident(os.getpid())
        attack_codec(damage, arguments.frames, codec)
        codec.resident = {"begin": before, "end": resident(os.getpid())}
        codec_seconds = time.monotonic() - began
        (folder / "worker").mkdir()
        began = time.monotonic()
        with watched_worker(folder / "worker", served) as worker:
            attack = Attack(damage, worker, recipe, load_reference_model(recipe.path), served)
            attack.run(arguments.worker_frames, arguments.worker_seconds)
    problems = codec.problems + served.problems
    for problem in problems:
        print(problem, file=sys.stderr)
    record: dict[str, Any] = {
        "what": "damaged frames for the codec (in this process), and for a worker by a driver with its keys; a finding "
        "is a crash, a hang, a wrong forward afterwards, memory that stays, or a file touched outside of the cache",
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "zmq": zmq.zmq_version(),
        "seed": arguments.seed,
        "frames": codec.frames + served.frames,
        "findings": len(problems),
        "codec": {
            "frames": codec.frames,
            "seconds": round(codec_seconds),
            "refused": codec.refused,
            "messages_taken": codec.taken,
            "resident_bytes": codec.resident,
        },
        "worker": {
            "frames": served.frames,
            "seconds": round(time.monotonic() - began),
            "sessions": served.sessions,
            "right_forwards": served.right_forwards,
            "resident_bytes": served.resident,
        },
    }
    arguments.out.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))
    return 1 if problems else 0
