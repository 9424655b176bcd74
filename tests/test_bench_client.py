"""What ComfyUI's client says when what answers is slow, breaks off, or is no ComfyUI."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from monarch_split.bench.errors import BenchError
from monarch_split.bench.server import running
from monarch_split.demo import comfy_client
from monarch_split.demo.comfy_client import ComfyClient, ComfyError

ENDED = b'{"a": {"status": {"status_str": "success"}}}'


def http(body: bytes, length: int | None = None) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (length or len(body), body)


@pytest.fixture
def answering() -> Iterator[Callable[..., str]]:
    """answering(*answers) -> address: takes a connection for each answer, in turn; None: it never answers that one."""
    with contextlib.ExitStack() as open_until_the_end:

        def listen(*answers: bytes | None) -> str:
            listener = open_until_the_end.enter_context(socket.create_server(("127.0.0.1", 0)))

            def answer() -> None:
                for text in answers:
                    with contextlib.suppress(OSError):
                        connection, _ = listener.accept()
                        open_until_the_end.push(connection)
                        if text is not None:
                            connection.recv(65536)
                            connection.sendall(text)
                            connection.shutdown(socket.SHUT_RDWR)

            threading.Thread(target=answer, daemon=True).start()
            return f"127.0.0.1:{listener.getsockname()[1]}"

        yield listen


def test_one_poll_without_an_answer_does_not_end_the_waiting(
    answering: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comfy_client, "_PATIENCE", 0.2)
    client = ComfyClient(f"http://{answering(None, http(b'{}'), None, http(ENDED))}")
    assert client.wait("a", timeout=30)["status"]["status_str"] == "success"


def test_waiting_has_an_end_though_nothing_answers(answering: Callable[..., str]) -> None:
    with pytest.raises(TimeoutError, match=r"did not end within 0\.3 s"):
        ComfyClient(f"http://{answering(None, None, None)}").wait("a", timeout=0.3)


@pytest.mark.parametrize(
    "answer",
    [b"SSH-2.0-OpenSSH_9.6\r\n", http(b'{"a": ', length=100), http(b"<html>Bad gateway</html>"), http(b"\xff\xfe")],
    ids=["another protocol", "broken off", "a page", "bytes"],
)
def test_what_is_no_answer_of_comfyui_is_told_in_a_sentence(answering: Callable[..., str], answer: bytes) -> None:
    with pytest.raises(ComfyError, match=r"what http://127\.0\.0\.1:\d+ answered to /history/a "):
        ComfyClient(f"http://{answering(answer)}").wait("a", timeout=30)
    with pytest.raises(BenchError, match="is no ComfyUI"):
        running(answering(answer))
