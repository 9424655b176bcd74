"""ComfyUI's server as this pack sees it: events to pages, and which of its users sits at which page."""

from __future__ import annotations

import sys
import threading
from typing import Any

_DEFAULT_USER = "default"


def prompt_server() -> Any:
    """ComfyUI's PromptServer, or None where ComfyUI is used as a library."""
    module = sys.modules.get("server")
    return getattr(getattr(module, "PromptServer", None), "instance", None)


def send(event: str, data: dict[str, Any], client: str | None = None) -> None:
    """Send an event to the page with this client id, or to all; may be called from any thread."""
    server = prompt_server()
    if server is not None:
        server.send_sync(event, data, client)


class Pages:
    """Pages that said who they are, by client id, and which of them show the tab."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: dict[str, str] = {}
        self._open: set[str] = set()

    def note(self, client: str, user: str, *, is_open: bool) -> None:
        """A page of `user` shows the tab, or does not."""
        with self._lock:
            self._users[client] = user
            (self._open.add if is_open else self._open.discard)(client)
            self._forget_closed()

    def attended(self) -> str | None:
        """The user of a page that shows the tab now; None if none does."""
        with self._lock:
            self._forget_closed()
            return next((self._users[client] for client in self._open), None)

    def user_of(self, client: str | None) -> str:
        """Whose page a client id belongs to. Without ComfyUI's --multi-user there is one user."""
        with self._lock:
            return self._users.get(client or "", _DEFAULT_USER)

    def _forget_closed(self) -> None:
        server = prompt_server()
        connected = set(getattr(server, "sockets", ()))
        self._open &= connected
        self._users = {client: user for client, user in self._users.items() if client in connected}


pages = Pages()
