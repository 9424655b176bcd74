"""The worker's part in measuring what plain TCP carries: takes a few connections for a few seconds, and keeps nothing.

A connection has to begin with a secret, which the driver sent over its own channel; what follows is thrown away.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Sequence

from . import limits

SECRET_BYTES = 32
_BUFFER_BYTES = 1 * limits.MIB


class Sink:
    """Listens from the start; `drain` takes what comes, once, and closes everything."""

    def __init__(self, hosts: Sequence[str], port: int, secret: bytes) -> None:
        """Listen on `port` of all hosts, or on any free one if it is taken. Raises OSError if a host has no port."""
        self._secret = secret
        try:
            self._listeners = _listen(hosts, port)
        except (OSError, OverflowError):
            self._listeners = _listen(hosts, 0)
        self.port: int = self._listeners[0].getsockname()[1]

    def drain(self, check: Callable[[], None]) -> None:
        """Take connections until those that proved the secret have ended, for SINK_SECONDS at most."""
        deadline = time.monotonic() + limits.SINK_SECONDS
        buffer = bytearray(_BUFFER_BYTES)
        # What each connection has said of the secret so far; None once that was right.
        said: dict[socket.socket, bytes | None] = {}
        proven = 0
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as on_exit:
            for listener in self._listeners:
                on_exit.enter_context(listener)
                selector.register(listener, selectors.EVENT_READ)
            on_exit.callback(lambda: [connection.close() for connection in said])
            while time.monotonic() < deadline and not (proven and None not in said.values()):
                check()
                for key, _ in selector.select(limits.POLL_SECONDS):
                    ready = key.fileobj
                    assert isinstance(ready, socket.socket)
                    if ready in said:
                        goes_on = self._read(ready, said, buffer)
                        proven += goes_on is None
                        if goes_on is False:
                            selector.unregister(ready)
                            del said[ready]
                            ready.close()
                        continue
                    with contextlib.suppress(OSError):
                        connection = ready.accept()[0]
                        if len(said) >= 2 * limits.SINK_STREAMS:
                            connection.close()
                            continue
                        connection.setblocking(False)
                        said[connection] = b""
                        selector.register(connection, selectors.EVENT_READ)

    def _read(
        self, connection: socket.socket, said: dict[socket.socket, bytes | None], buffer: bytearray
    ) -> bool | None:
        """Take some bytes. False: it has ended or is a stranger's; None: it has proved the secret with these."""
        so_far = said[connection]
        try:
            if so_far is None:
                return connection.recv_into(buffer) > 0
            more = connection.recv(SECRET_BYTES - len(so_far))
        except BlockingIOError:
            return True
        except OSError:
            return False
        said[connection] = so_far = so_far + more
        if len(so_far) < SECRET_BYTES:
            return bool(more)
        if not secrets.compare_digest(so_far, self._secret):
            return False
        said[connection] = None
        return None


def _listen(hosts: Sequence[str], port: int) -> list[socket.socket]:
    listeners: list[socket.socket] = []
    try:
        for host in hosts:
            listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            listeners.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(2 * limits.SINK_STREAMS)
            port = listener.getsockname()[1]
    except (OSError, OverflowError):
        for listener in listeners:
            listener.close()
        raise
    return listeners
