"""Starts worker processes for the demo, the tests and the benchmarks, and always ends them again, by their id."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from .signals import undisturbed

PACK = Path(__file__).resolve().parent.parent
_LISTENING = "Listening on "


class WorkerProcess:
    """`monarch worker` in a process of its own on the loopback. Use as a context manager.

    address: "127.0.0.1:port"; pid: process id; output: what it printed so far.
    """

    def __init__(
        self,
        *,
        python: Path | str = sys.executable,
        runtime: str = "reference",
        cache: Path,
        name: str = "worker",
        port: int = 0,
        arguments: Sequence[str] = (),
        launcher: Sequence[str] = (),
        pack: Path = PACK,
        environment: dict[str, str] | None = None,
        timeout: float = 120.0,
        wait: bool = True,
    ) -> None:
        """Start it and wait until it listens. Raises RuntimeError with its output if it does not within `timeout` s.

        `arguments` follow the worker's own, `launcher` stands between Python and the pack (a script that runs it).
        Without `wait` it returns at once, and there is no address before wait_until_listening.
        """
        command = [
            str(python),
            *launcher,
            str(pack / "__main__.py"),
            "worker",
            "--port",
            str(port),
            "--runtime",
            runtime,
        ]
        command += ["--cache", str(cache), "--name", name, *arguments]
        # One thread each: a driver and its workers share the cores of one machine here.
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **(environment or {})}
        self.address = ""
        self._lines: list[str] = []
        self._listening = threading.Event()
        with contextlib.ExitStack() as on_failure:  # Ctrl-C is one: nobody has this object yet who could close it
            with undisturbed():
                self._process = subprocess.Popen(
                    command,
                    env=env,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    text=True,
                )
                self.pid = self._process.pid
                self._reader = threading.Thread(target=self._read, daemon=True)
                self._reader.start()
                on_failure.callback(self.close)
            if wait:
                self.wait_until_listening(timeout)
            on_failure.pop_all()

    def wait_until_listening(self, timeout: float = 120.0) -> None:
        """Raises RuntimeError with its output if it ends before, or takes more than `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not self._listening.wait(0.05):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._reader.join(1)
                raise RuntimeError(f"the worker did not start:\n{self.output}")

    @property
    def output(self) -> str:
        return "".join(self._lines)

    @property
    def running(self) -> bool:
        return self.exit_code is None

    @property
    def exit_code(self) -> int | None:
        """None as long as it runs."""
        return self._process.poll()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)
            if line.startswith(_LISTENING):
                self.address = line.removeprefix(_LISTENING).strip()
                self._listening.set()

    def kill(self) -> None:
        """End it at once, as a crash or a power failure does."""
        self._process.kill()
        self._process.wait(10)

    def freeze(self) -> None:
        """Stop it from running, as a hang of the whole machine does (not on Windows)."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """End it in good order, or by force if that takes more than a few seconds."""
        if self._process.poll() is None:
            if hasattr(signal, "SIGCONT"):
                with contextlib.suppress(ProcessLookupError):
                    self.thaw()
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()
        self._reader.join(5)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
