"""Talk to a running ComfyUI over HTTP: queue graphs, wait for them, fetch what they made.

Standard library only. Starting a ComfyUI is comfy_server's job."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

from .graphs import Graph

_POLL = 0.05
# Waiting for a long prompt asks this often in the end, to leave the machine to the prompt.
_LONGEST_POLL = 0.5
# Seconds for one answer.
_PATIENCE = 30.0


class ComfyError(Exception):
    """ComfyUI did not start, refused a graph, or failed in one; the text says which and holds what it said."""


class ComfyRefused(ComfyError):
    """ComfyUI answered a request with an HTTP error."""


class ComfyClient:
    """A ComfyUI at `url` ("http://127.0.0.1:8188"). Every call raises ComfyError with ComfyUI's words, or OSError."""

    def __init__(self, url: str) -> None:
        self._url = url

    @property
    def url(self) -> str:
        return self._url

    def queue(self, graph: Graph) -> str:
        """Send a graph in API format; return its prompt id. Raises ComfyRefused with ComfyUI's reasons."""
        return self._request("/prompt", {"prompt": graph})["prompt_id"]

    def wait(self, prompt_id: str, timeout: float = 120.0) -> dict[str, Any]:
        """The prompt's history entry once it ended, however it ended. Raises TimeoutError, or ComfyError on a crash."""
        began = time.monotonic()
        while (waited := time.monotonic() - began) < timeout:
            # A prompt that keeps ComfyUI busy may keep it from answering, too.
            with contextlib.suppress(TimeoutError):
                patience = min(_PATIENCE, timeout - waited)
                entry = self._request(f"/history/{prompt_id}", timeout=patience).get(prompt_id)
                if entry is not None and entry.get("status"):
                    return entry
            time.sleep(min(_LONGEST_POLL, max(_POLL, waited / 20)))
        raise TimeoutError(f"the prompt did not end within {timeout:g} s{self._more()}")

    def run(self, graph: Graph, timeout: float = 120.0) -> dict[str, Any]:
        """Queue a graph and wait; return its history entry. Raises ComfyError with the node's error if it failed."""
        entry = self.wait(self.queue(graph), timeout)
        status = entry["status"]
        if status.get("status_str") != "success":
            raise ComfyError(f"the prompt failed: {failure(entry)}{self._more()}")
        return entry

    def interrupt(self) -> None:
        """Ask the running prompt to stop, whichever it is."""
        self._request("/interrupt", {})

    def cancel(self, prompt_id: str) -> None:
        """Take a prompt out of the queue, or ask it to stop if it runs; no other prompt is touched."""
        self._request("/queue", {"delete": [prompt_id]})
        # An old ComfyUI takes no prompt's id and stops whatever runs.
        if any(item[1] == prompt_id for item in self._request("/queue")["queue_running"]):
            self._request("/interrupt", {"prompt_id": prompt_id})

    def free(self) -> None:
        """Unload models and forget cached node outputs, as soon as the queue is idle: an unchanged graph runs anew."""
        self._request("/free", {"unload_models": True, "free_memory": True})

    def queue_lengths(self) -> tuple[int, int]:
        """(prompts running, prompts waiting)."""
        queue = self._request("/queue")
        return len(queue["queue_running"]), len(queue["queue_pending"])

    def latest(self, count: int) -> list[str]:
        """Ids of the prompts that ended last, at most `count`, the last one last."""
        return list(self._request(f"/history?max_items={count}"))

    def queue_size(self) -> int:
        """Prompts running or waiting."""
        return sum(self.queue_lengths())

    def view(self, file: Mapping[str, str]) -> bytes:
        """The bytes of a file named as history entries name it: {"filename", "subfolder", "type"}."""
        return self._answer("/view?" + urllib.parse.urlencode(dict(file)))

    def object_info(self, node: str) -> dict[str, Any]:
        """How ComfyUI describes a node class. Raises ComfyError when it does not know it."""
        info = self._request(f"/object_info/{urllib.parse.quote(node)}").get(node)
        if info is None:
            raise ComfyError(f"ComfyUI has no node {node}{self._more()}")
        return info

    def all_object_info(self) -> dict[str, dict[str, Any]]:
        """How ComfyUI describes every node class, by name."""
        return self._request("/object_info")

    def system_stats(self) -> dict[str, Any]:
        """ComfyUI's version, its Python and its devices, as it tells them."""
        return self._request("/system_stats")

    def _more(self) -> str:
        """What else is known when something went wrong; goes to the end of a message."""
        return ""

    def _request(self, path: str, body: Mapping[str, Any] | None = None, timeout: float = _PATIENCE) -> Any:
        answer = self._answer(path, None if body is None else json.dumps(body).encode(), timeout)
        try:
            return json.loads(answer) if answer else None
        except ValueError:
            raise ComfyError(
                f"what {self.url} answered to {path} is not JSON; is it ComfyUI, with nothing in between?"
            ) from None

    def _answer(self, path: str, body: bytes | None = None, timeout: float = _PATIENCE) -> bytes:
        try:
            return self._open(path, body, timeout)
        except urllib.error.URLError as problem:
            if isinstance(problem.reason, TimeoutError):
                raise TimeoutError(f"{self.url} did not answer to {path} within {timeout:.3g} s") from None
            raise
        except TimeoutError:
            raise TimeoutError(f"{self.url} did not answer to {path} within {timeout:.3g} s") from None
        except http.client.HTTPException as problem:
            if isinstance(problem, OSError):
                raise
            raise ComfyError(f"what {self.url} answered to {path} broke off or is not HTTP ({problem!r})") from None

    def _open(self, path: str, body: bytes | None = None, timeout: float = _PATIENCE) -> bytes:
        request = urllib.request.Request(self.url + path, data=body, headers={"Content-Type": "application/json"})
        try:
            # No proxy: an http_proxy variable must not send requests for this machine elsewhere.
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=timeout) as answer:
                return answer.read()
        except urllib.error.HTTPError as problem:
            text = problem.read().decode(errors="replace")
            raise ComfyRefused(f"ComfyUI answered {problem.code} to {path}: {text}") from None


def failure(entry: Mapping[str, Any]) -> str:
    """Why a prompt did not succeed: "interrupted", or the node and its error, from its history entry."""
    for kind, detail in entry["status"].get("messages", []):
        if kind == "execution_interrupted":
            return "interrupted"
        if kind == "execution_error":
            return f"{detail.get('node_type')}: {detail.get('exception_type')}: {detail.get('exception_message')}"
    return "ComfyUI gives no reason"
