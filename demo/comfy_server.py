"""Run a real ComfyUI server with a pack in its custom_nodes; talking to it is comfy_client's job.

Standard library only. Graphs come from graphs.py; finding ComfyUI and its Python is the caller's job."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from .comfy_client import ComfyClient, ComfyError
from .signals import undisturbed

HERE = Path(__file__).resolve().parent
HELPER_PACK = "monarch_demo_nodes"
_POLL = 0.05


class ComfyServer(ComfyClient):
    """A ComfyUI process on 127.0.0.1, from entering the context until leaving it.

    base: folder for its custom_nodes, models, input, output and user folders and comfyui.log; made if missing.
    pack: folder that becomes custom_nodes/<pack_name>, or None for only the helper nodes.
    comfyui: ComfyUI's folder; python: its interpreter. threads: OMP_NUM_THREADS; environment: more variables.
    models: an existing models folder to use in place of base/models. test_families: start under family_override.
    frontend: serve ComfyUI's own web pages; None = if they are installed.
    """

    def __init__(
        self,
        base: Path,
        *,
        comfyui: Path,
        pack: Path | None = None,
        pack_name: str = "monarch",
        python: str = sys.executable,
        threads: int = 1,
        models: Path | None = None,
        environment: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
        test_families: bool = False,
        frontend: bool | None = None,
        start_timeout: float = 180.0,
    ) -> None:
        self.base, self.comfyui, self.python = Path(base).resolve(), Path(comfyui).resolve(), str(python)
        self.pack, self.pack_name = pack, pack_name
        self.threads, self.models = threads, models
        self.environment, self.arguments = dict(environment or {}), list(arguments)
        self.test_families, self.frontend, self.start_timeout = test_families, frontend, start_timeout
        self.log_file = self.base / "comfyui.log"
        self.output = self.base / "output"
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ComfyServer:
        self._make_folders()
        self.port = _free_port()
        try:
            with open(self.log_file, "wb") as log, undisturbed():
                self._process = subprocess.Popen(
                    self._command(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=self._working_folder(),
                    env=self._environment(),
                )
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the running server. Raises ComfyError when it does not run."""
        if self._process is None:
            raise ComfyError("the ComfyUI server is not running")
        return self._process.pid

    def models_folder(self, kind: str = "diffusion_models") -> Path:
        """The folder that the server reads models of `kind` from; made if missing."""
        folder = self.base / "models" / kind
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def log(self) -> str:
        """Everything that the server has printed."""
        return self.log_file.read_text(encoding="utf-8", errors="replace") if self.log_file.exists() else ""

    def stop(self, patience: float = 10.0) -> None:
        """End the process: ask, wait `patience` seconds, then kill. Does nothing when it has ended."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(patience)

    def _working_folder(self) -> Path:
        return self.base

    def _make_folders(self) -> None:
        for name in ("custom_nodes", "input", "output", "user", "temp"):
            (self.base / name).mkdir(parents=True, exist_ok=True)
        if self.models is not None:
            _link(self.base / "models", Path(self.models))
        for kind in ("diffusion_models", "loras", "vae_approx"):
            self.models_folder(kind)
        _link(self.base / "custom_nodes" / HELPER_PACK, HERE / "nodes")
        if self.pack is not None:
            _link(self.base / "custom_nodes" / self.pack_name, self.pack)

    def _command(self) -> list[str]:
        script = [str(self.comfyui / "main.py")]
        if not os.path.exists(script[0]):
            raise ComfyError(f"{self.comfyui} is not a ComfyUI folder: there is no main.py in it")
        if self.test_families:
            script.insert(0, str(HERE / "family_override.py"))
        command = [
            self.python, *script, "--cpu", "--base-directory", str(self.base), "--listen", "127.0.0.1",
            "--port", str(self.port), "--disable-api-nodes", "--database-url", "sqlite:///:memory:", "--log-stdout",
        ]  # fmt: skip
        if not (self._has_frontend() if self.frontend is None else self.frontend):
            command += self._without_pages()
        return command + self.arguments

    def _without_pages(self) -> list[str]:
        """Arguments for a ComfyUI that serves no web pages of its own, so that they need not be installed."""
        root = self.base / "frontend"
        root.mkdir(exist_ok=True)
        (root / "index.html").write_text("<!doctype html><title>no front end</title>\n", encoding="utf-8")
        return ["--front-end-root", str(root)]

    def _has_frontend(self) -> bool:
        test = "import importlib.util, sys; sys.exit(importlib.util.find_spec('comfyui_frontend_package') is None)"
        return subprocess.run([self.python, "-c", test], timeout=60, check=False).returncode == 0

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "OMP_NUM_THREADS": str(self.threads), "PYTHONUNBUFFERED": "1", **self.environment}

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self.start_timeout
        while True:
            process = self._process
            if process is None or process.poll() is not None:
                raise ComfyError(f"ComfyUI ended while starting; its log ends with:\n{self._log_tail()}")
            try:
                self._open("/system_stats", timeout=2.0)
                break
            except (OSError, http.client.HTTPException, ComfyError):
                if time.monotonic() > deadline:
                    raise ComfyError(
                        f"ComfyUI was not ready after {self.start_timeout:g} s; its log ends with:\n{self._log_tail()}"
                    ) from None
                time.sleep(_POLL)
        # A pack that fails to import does not stop ComfyUI; six stock files may fail too, for missing extras.
        for name in filter(None, (self.pack and self.pack_name, HELPER_PACK)):
            for line in self.log().splitlines():
                if "IMPORT FAILED" in line and Path(line.strip()).name == name:
                    raise ComfyError(f"ComfyUI could not import custom_nodes/{name}:\n{self.import_error(name)}")

    def import_error(self, name: str) -> str:
        """The part of the log that tells why custom_nodes/<name> could not be imported."""
        text = self.log()
        end = text.find(f"custom_nodes/{name} module for custom nodes")
        end = text.find("\n", end) if end >= 0 else len(text)
        start = text.rfind("Traceback (most recent call last)", 0, end)
        return text[max(start, 0) : end] if start >= 0 else self._log_tail()

    def _log_tail(self, lines: int = 40) -> str:
        # A progress bar overwrites its line with carriage returns; only its last state says anything.
        return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in self.log().split("\n")[-lines:])

    def _more(self) -> str:
        return f"; the log ends with:\n{self._log_tail()}"

    def _open(self, path: str, body: bytes | None = None, timeout: float = 30.0) -> bytes:
        try:
            return super()._open(path, body, timeout)
        except (OSError, http.client.HTTPException) as problem:
            if self._has_ended(within=1.0 if isinstance(problem, ConnectionResetError) else 0.0):
                raise ComfyError(f"ComfyUI has ended; its log ends with:\n{self._log_tail()}") from problem
            raise

    def _has_ended(self, within: float) -> bool:
        """Whether the process is gone; a dying one breaks connections shortly before."""
        if self._process is None:
            return True
        try:
            self._process.wait(within)
        except subprocess.TimeoutExpired:
            return False
        return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _link(link: Path, target: Path) -> None:
    """Make `link` point to the folder `target`: a symbolic link, or a junction where Windows allows none."""
    target = Path(target).resolve()
    if os.path.lexists(link):
        if link.resolve() == target:
            return
        link.unlink()
    try:
        link.symlink_to(target, target_is_directory=True)
    except OSError:
        if sys.platform != "win32":
            raise
        import _winapi

        _winapi.CreateJunction(str(target), str(link))
