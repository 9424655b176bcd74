"""The worker's end of a channel for tests, in this process or, as a script, in one of its own.

It echoes the body of every FORWARD as a RESULT. A body with `hold` keeps the GIL and answers nothing else that long.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zmq

if __name__ == "__main__":
    import runpy

    runpy.run_path(str(Path(__file__).parent.parent / "__main__.py"))["load_pack"]()

from monarch_split.distributed.admission import Doorkeeper
from monarch_split.distributed.auth import ChannelKeys, own_identity
from monarch_split.distributed.channel import ChannelLost
from monarch_split.distributed.driver_channel import DriverChannel
from monarch_split.distributed.messages import Kind, Message
from monarch_split.distributed.worker_channel import WorkerChannel

BOUND = 20.0


def own_keys() -> ChannelKeys:
    """Keys for a worker of the same user."""
    own = own_identity()
    return ChannelKeys(own, own.public)


class Echo:
    """A WorkerChannel that is served by `serve`, for any number of drivers. Errors end up in `error`."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=2)
        own = own_identity()
        self._doorkeeper = Doorkeeper(self._context, own)
        self.channel = WorkerChannel(self._context, [host], 0, own=own)
        self.port = self.channel.port
        self.received: list[Message] = []
        self.error: BaseException | None = None
        self.paused = threading.Event()
        self._waiting: dict[bytes, Message] = {}
        self._stopping = threading.Event()

    def serve(self) -> None:
        try:
            while not self._stopping.is_set():
                if self.paused.is_set():
                    time.sleep(0.01)
                    continue
                self.channel.wait(0.02)
                for session, message in self.channel.receive():
                    self._take(session, message)
                for session, hello in list(self._waiting.items()):
                    if self.channel.lane_count(session) == hello.body["lanes"]:
                        del self._waiting[session]
                        self.channel.admit(session)
                        self._answer(session, Kind.WELCOME, {"for": hello.number})
        except BaseException as error:
            self.error = error
        finally:
            self.channel.close()
            self._doorkeeper.close()
            self._context.term()

    def _take(self, session: bytes, message: Message) -> None:
        if message.kind is Kind.HELLO:
            self._waiting[session] = message
            return
        self.received.append(message)
        if message.kind is Kind.FORWARD:
            if hold := message.body.get("hold"):
                ctypes.PyDLL(None).usleep(int(hold * 1e6))
            self._answer(session, Kind.RESULT, {"for": message.number, **message.body})

    def _answer(self, session: bytes, kind: Kind, body: dict[str, Any]) -> None:
        # A driver that is gone is the driver's business.
        with contextlib.suppress(ChannelLost):
            self.channel.send(session, kind, body)

    def stop(self) -> None:
        self._stopping.set()


@contextlib.contextmanager
def echo_thread() -> Iterator[Echo]:
    """An Echo in a thread of this process."""
    echo = Echo()
    thread = threading.Thread(target=echo.serve)
    thread.start()
    try:
        yield echo
    finally:
        echo.stop()
        thread.join(BOUND)
        assert not thread.is_alive()
        if echo.error is not None:
            raise echo.error


class Nursery:
    """Makes processes with an Echo in each, by forking one that has imported torch. They end with it."""

    def __init__(self) -> None:
        command = [sys.executable, __file__]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)

    def echo(self) -> tuple[int, int]:
        """(process id, port) of a new one. Its id is not reused while the nursery lives."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        pid, port = self._process.stdout.readline().split()
        return int(pid), int(port)

    def close(self) -> None:
        self._process.communicate(timeout=BOUND)


@contextlib.contextmanager
def greeted(port: int, host: str = "127.0.0.1", lanes: int = 2) -> Iterator[DriverChannel]:
    """A driver's channel that was welcomed."""
    channel = DriverChannel(host, port, lanes, keys=own_keys())
    try:
        number = channel.send(Kind.HELLO, {"lanes": lanes})
        answer = next_messages(channel)[0]
        assert (answer.kind, answer.body["for"]) == (Kind.WELCOME, number)
        yield channel
    finally:
        channel.close()


def next_messages(channel: DriverChannel, seconds: float = BOUND) -> list[Message]:
    """The next messages. Raises ChannelLost; fails if there are none within `seconds`."""
    deadline = time.monotonic() + seconds
    while not (messages := channel.receive(0.05)):
        assert time.monotonic() < deadline, f"nothing came within {seconds} s"
    return messages


def ask(channel: DriverChannel, **body: object) -> dict[str, object]:
    """The echo of `body`."""
    number = channel.send(Kind.FORWARD, body)
    (answer,) = next_messages(channel)
    assert answer.body.pop("for") == number
    return answer.body


def _fork_on_request() -> None:
    children: list[int] = []
    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            echo = Echo()
            print(os.getpid(), echo.port, flush=True)
            echo.serve()
            os._exit(1)
        children.append(pid)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    _fork_on_request()
