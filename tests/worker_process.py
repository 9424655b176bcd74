"""Real worker processes for tests: forked by a process that has imported torch once, ended one by one by their pid.

As a script it is that process. Its workers misbehave as their test tells them in a file (see `Worker.behave`).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

PACK = Path(__file__).parent.parent
_BOUND = 20.0


def until(condition: Callable[[], Any], what: str, seconds: float = _BOUND) -> Any:
    """The first true value of `condition`; fails the test if there is none within `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.01)
    return value


class Process:
    """A process that the forge made. `log` is what it printed so far."""

    def __init__(self, forge: Forge, pid: int, log: Path) -> None:
        self._forge = forge
        self._log = log
        self.pid = pid
        self.exit_status: int | None = None

    @property
    def log(self) -> str:
        return self._log.read_text()

    def send(self, number: int) -> None:
        # The forge leaves it unreaped until `end`, so its id cannot have gone to another process.
        if self.exit_status is None:
            os.kill(self.pid, number)

    def freeze(self) -> None:
        self.send(signal.SIGSTOP)

    def thaw(self) -> None:
        self.send(signal.SIGCONT)

    def kill(self) -> int:
        return self.end(signal.SIGKILL)

    def end(self, number: int = signal.SIGTERM) -> int:
        """End it and wait. Returns the exit code, negative for a signal."""
        if self.exit_status is None:
            self.thaw()
            self.send(number)
            self.exit_status = self._forge.reap(self.pid)
        return os.waitstatus_to_exitcode(self.exit_status)

    def resources(self) -> tuple[int, int, int]:
        """(open file descriptors, threads, resident bytes)."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        files = len(os.listdir(f"/proc/{self.pid}/fd"))
        return files, int(fields["Threads"]), int(fields["VmRSS"].split()[0]) * 1024


class Worker(Process):
    """A worker with the reference runtime. `address` is where it listens."""

    def __init__(self, forge: Forge, pid: int, log: Path, name: str, cache: Path) -> None:
        super().__init__(forge, pid, log)
        self.name = name
        self.cache = cache
        self._seen = 0
        self.address = until(self._listening, "the worker to listen")

    def _listening(self) -> str | None:
        lines = [line for line in self.log.splitlines() if line.startswith("Listening on ")]
        return lines[0].removeprefix("Listening on ") if lines else None

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def behave(self, **how: float | str) -> None:
        """From now on: slow=seconds a forward, build=seconds, noise=amplitude, error=message, in_place=1; or well.

        build_error=message: it has no memory for the model.
        at_block=index has slow and error strike at that block rather than before the forward. With slow_token=seconds
        every block takes that much longer for each token of each row.
        """
        _write_behaviour(self.cache, how)

    def mark(self) -> None:
        """Have `reached` count from here."""
        self._seen = len(self.log)

    def reached(self, word: str) -> bool:
        """Whether it printed the line `word` ("build", "forward", "block 0", "done") since the last mark."""
        return word in self.log[self._seen :].splitlines()


class Forge:
    """Makes processes by forking, so that each costs milliseconds. If this process dies, they all end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def _ask(self, **request: Any) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def _fork(self, target: str, **arguments: Any) -> tuple[int, Path]:
        self._count += 1
        log = self._folder / f"{self._count}.log"
        log.touch()
        return self._ask(run=target, log=str(log), arguments=arguments), log

    def worker(
        self,
        name: str = "w",
        *,
        port: int = 0,
        cache: Path | None = None,
        pack: str = "",
        largest_file: int = 0,
        configuration: Path | None = None,
    ) -> Worker:
        """Start a worker. `pack`: version it claims; `largest_file`: bytes after which its disk takes no more.

        `configuration`: folder of its keys, if it is not of the same user as this process.
        """
        cache = cache or self._folder / f"cache-{self._count}"
        cache.mkdir(exist_ok=True)
        _write_behaviour(cache, {})
        keys = str(configuration or os.environ["MONARCH_CONFIG_DIR"])
        how = {"pack": pack, "largest_file": largest_file, "configuration": keys}
        pid, log = self._fork("worker", name=name, port=port, cache=str(cache), **how)
        return Worker(self, pid, log, name, cache)

    def driver(self, address: str, model: Path) -> Process:
        """A driver that splits forwards for ever."""
        pid, log = self._fork("driver", address=address, model=str(model))
        return Process(self, pid, log)

    def reap(self, pid: int) -> int:
        return self._ask(reap=pid)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(_BOUND)
        if self._process.stdout is not None:
            self._process.stdout.close()


@functools.cache
def shared_forge() -> Forge:
    """The forge of this test process; it ends with it."""
    folder = tempfile.TemporaryDirectory()
    forge = Forge(Path(folder.name))
    atexit.register(folder.cleanup)
    atexit.register(forge.close)
    return forge


@contextlib.contextmanager
def ended(*processes: Process) -> Iterator[None]:
    """Kills the processes at the end of the block."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()


def _write_behaviour(cache: Path, how: dict[str, Any]) -> None:
    part = cache / "behaviour.new"
    part.write_text(json.dumps(how))
    part.replace(cache / "behaviour")


# --- the script ---


def _run_worker(name: str, port: int, cache: str, pack: str, largest_file: int, configuration: str) -> int:
    import dataclasses

    import torch

    from monarch_split.demo import reference_runtime
    from monarch_split.demo.reference import slowed
    from monarch_split.distributed.jobs import say
    from monarch_split.distributed.runtime import run_model
    from monarch_split.distributed.serve import serve

    def behaviour() -> dict[str, Any]:
        return json.loads((Path(cache) / "behaviour").read_text())

    class TestRuntime(reference_runtime.ReferenceRuntime):
        def __init__(self) -> None:
            super().__init__()
            if pack:
                self.versions = dataclasses.replace(self.versions, pack=pack)

        def build(self, tree: dict[str, Any], path: Path, key: str) -> Any:
            say("build")
            self._interrupted.wait(behaviour().get("build", 0))
            if "build_error" in behaviour():
                raise MemoryError(behaviour()["build_error"])
            return TestReplica(self, super().build({"loader": tree["loader"]}, path, key))

        def release(self, files: Collection[str]) -> int:
            say(" ".join(["release", *sorted(files)]))
            return super().release(files)

    class TestReplica:
        patched = 0
        device = torch.device("cpu")
        family = reference_runtime.FAMILY

        def __init__(self, runtime: TestRuntime, stock: Any) -> None:
            self._runtime, self._stock = runtime, stock

        def forward(self, args: list[Any], kwargs: dict[str, Any], through: Any = run_model) -> Any:
            say("forward")
            how = behaviour()
            if "at_block" not in how:
                self._strike(how)

            def watched(model: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
                handles = [
                    block.register_forward_pre_hook(lambda *_, index=index: self._enter(how, index))
                    for index, block in enumerate(model.blocks)
                ]
                handles += slowed(model, how.get("slow_token", 0))
                try:
                    return through(model, args, kwargs)
                finally:
                    for handle in handles:
                        handle.remove()

            output = self._stock.forward(args, kwargs, watched)
            if how.get("in_place"):
                kwargs["context"].zero_()
            say("done")
            return None if output is None else output + how.get("noise", 0) * torch.randn(output.shape)

        def _enter(self, how: dict[str, Any], index: int) -> None:
            say(f"block {index}")
            if how.get("at_block") == index:
                self._strike(how)

        def _strike(self, how: dict[str, Any]) -> None:
            if "error" in how:
                raise RuntimeError(how["error"])
            self._runtime._interrupted.wait(how.get("slow", 0))

    os.environ["MONARCH_CONFIG_DIR"] = configuration
    if largest_file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, resource.RLIM_INFINITY))
    return serve(TestRuntime(), ["127.0.0.1"], port, cache=Path(cache), name=name)


def _run_driver(address: str, model: str) -> int:
    from monarch_split.demo.reference import TINY
    from monarch_split.demo.reference_runtime import load_reference_model
    from monarch_split.tests.driving import open_session, recipe_of, sample_once

    loaded = load_reference_model(Path(model))
    with open_session([address], recipe_of(Path(model))) as session:
        while True:
            sample_once(session, loaded, TINY)
            print("driving", flush=True)
            time.sleep(0.05)


def _serve_forks() -> None:
    import safetensors.torch  # noqa: F401
    import torch  # noqa: F401
    import zmq  # noqa: F401

    from monarch_split.demo import reference_runtime  # noqa: F401
    from monarch_split.distributed import serve, session  # noqa: F401

    children: set[int] = set()
    try:
        for line in sys.stdin:
            request = json.loads(line)
            if "reap" in request:
                pid = request["reap"]
                deadline = time.monotonic() + _BOUND
                while (status := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
                    time.sleep(0.005)
                if status[0] == 0:
                    os.kill(pid, signal.SIGKILL)
                    status = os.waitpid(pid, 0)
                children.discard(pid)
                print(status[1], flush=True)
                continue
            pid = os.fork()
            if pid == 0:
                _become(request)
            children.add(pid)
            print(pid, flush=True)
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)


def _become(request: dict[str, Any]) -> None:
    log = os.open(request["log"], os.O_WRONLY | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    code = 1
    try:
        code = {"worker": _run_worker, "driver": _run_driver}[request["run"]](**request["arguments"])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    runpy.run_path(str(PACK / "__main__.py"))["load_pack"]()
    _serve_forks()
