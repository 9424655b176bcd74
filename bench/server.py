"""The ComfyUI that is measured: one that runs already, or one that is started for it and ended afterwards."""

from __future__ import annotations

import contextlib
import os
import tempfile
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ..demo.comfy_client import ComfyClient, ComfyError
from ..demo.comfy_server import ComfyServer
from .errors import BenchError

DEFAULT_ADDRESS = "127.0.0.1:8188"
_LOCAL = ("127.0.0.1", "localhost", "::1")
# How ComfyUI's flags end that take a path, or several.
_PATH_FLAGS = ("-directory", "-config", "-root", "-keyfile", "-certfile")
# A ComfyUI with many packs takes minutes.
_START_SECONDS = 600.0


class OwnComfyUI(ComfyServer):
    """The user's ComfyUI with all that it has: its packs, models and GPU. `base` is for its log."""

    def _make_folders(self) -> None:
        self.base.mkdir(parents=True, exist_ok=True)

    def _working_folder(self) -> Path:
        # As it is usually started: packs read and write files beside it.
        return self.comfyui

    def _command(self) -> list[str]:
        address = ["--listen", "127.0.0.1", "--port", str(self.port), "--disable-auto-launch"]
        arguments = with_absolute_paths(self.arguments)
        return [self.python, str(self.comfyui / "main.py"), *address, *self._without_pages(), *arguments]

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONUNBUFFERED": "1", **self.environment}


def with_absolute_paths(arguments: Sequence[str]) -> list[str]:
    """ComfyUI's arguments, with paths as they are meant in this process's working folder."""
    absolute: list[str] = []
    takes_paths = False
    for argument in arguments:
        if argument.startswith("-"):
            flag, given, value = argument.partition("=")
            takes_paths = flag.endswith(_PATH_FLAGS)
            absolute.append(f"{flag}={os.path.abspath(value)}" if takes_paths and given else argument)
        else:
            absolute.append(os.path.abspath(argument) if takes_paths else argument)
    return absolute


def running(address: str) -> ComfyClient | None:
    """The ComfyUI that answers at "host:port" or an http address; None if nothing does. Raises BenchError."""
    url = (address if "://" in address else f"http://{address}").rstrip("/")
    try:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError
    except ValueError:
        raise BenchError(f"{address!r} is no address. Name one such as {DEFAULT_ADDRESS}.", usage=True) from None
    client = ComfyClient(url)
    try:
        client.system_stats()
    except OSError:
        return None
    except ComfyError as error:
        raise BenchError(f"What answers at {url} is no ComfyUI ({error}).") from None
    return client


def is_local(client: ComfyClient) -> bool:
    """Whether it is on this machine, as far as its address tells."""
    return urllib.parse.urlsplit(client.url).hostname in _LOCAL


@contextlib.contextmanager
def started(comfyui: Path, python: Path, arguments: Sequence[str], say: Callable[[str], None]) -> Iterator[ComfyClient]:
    """A ComfyUI that is started on a free port, and ended afterwards. Raises BenchError if it does not start."""
    say(f"starting the ComfyUI in {comfyui}")
    with tempfile.TemporaryDirectory(prefix="monarch-bench-", ignore_cleanup_errors=True) as folder:
        server = OwnComfyUI(
            Path(folder), comfyui=comfyui, python=str(python), arguments=arguments, start_timeout=_START_SECONDS
        )
        try:
            server.__enter__()
        except ComfyError as error:
            raise BenchError(str(error)) from None
        try:
            yield server
        finally:
            server.stop()
