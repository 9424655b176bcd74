"""The routes under /monarch/ as programs call them: who is refused, what the answers hold, and nobody else waits."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = [pytest.mark.comfyui, pytest.mark.timeout(180)]

CHANGING = ("attend", "pair", "forget", "check", "free")
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server(comfy: Any, comfyui_path: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A ComfyUI server with the pack, which lets every site in itself; its configuration folder has a telling name."""
    from monarch_split.demo.comfy_server import ComfyServer
    from monarch_split.demo.worker_process import PACK
    from monarch_split.tests.driving import share_identity

    base = tmp_path_factory.mktemp("server")
    configuration = base / "SECRETFOLDER"
    configuration.mkdir()
    share_identity(configuration)
    with ComfyServer(
        base, comfyui=comfyui_path, pack=PACK, pack_name="monarch-split", frontend=False,
        arguments=["--enable-cors-header", "*"],
        environment={"MONARCH_CONFIG_DIR": str(configuration)},
    ) as running:  # fmt: skip
        running.configuration = configuration
        yield running


def ask(
    server: Any, path: str, body: Any = None, headers: dict[str, str] | None = None, method: str | None = None
) -> tuple[int, str]:
    """(status, text of the answer)."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        data = body if body is None or isinstance(body, (str, bytes)) else json.dumps(body)
        connection.request(method or ("GET" if data is None else "POST"), path, data, headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@pytest.mark.parametrize("route", CHANGING)
@pytest.mark.parametrize("prefix", ["/monarch/", "/api/monarch/"])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({**JSON, "Origin": "http://elsewhere.example"}, 403),
        ({**JSON, "Origin": "null"}, 403),
        ({**JSON, "Sec-Fetch-Site": "cross-site"}, 403),
        ({**JSON, "Sec-Fetch-Site": "same-site"}, 403),
        ({**JSON, "Sec-Fetch-Site": "none"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({}, 415),
    ],
)
def test_what_another_site_could_send_is_refused(
    server: Any, route: str, prefix: str, headers: dict[str, str], status: int
) -> None:
    body = {"client": "x", "open": True, "code": "monarch1-x", "name": "x"}
    assert ask(server, prefix + route, body, headers)[0] == status
    assert json.loads(ask(server, "/monarch/state")[1])["doctor"]["at"] is None


@pytest.mark.parametrize("route", CHANGING)
def test_nothing_changes_by_get(server: Any, route: str) -> None:
    assert ask(server, f"/monarch/{route}")[0] in (404, 405)
    assert ask(server, f"/monarch/{route}", "", method="HEAD")[0] in (404, 405)


@pytest.mark.parametrize("origin", ["http://elsewhere.example", "null"])
def test_the_state_is_not_given_to_another_site(server: Any, origin: str) -> None:
    assert ask(server, "/monarch/state", headers={"Origin": origin})[0] == 403
    assert ask(server, "/monarch/state", headers={"Sec-Fetch-Site": "same-site"})[0] == 403
    assert ask(server, "/monarch/state")[0] == 200


@pytest.mark.parametrize("body", ["", "[]", "null", "{", '"code"', "{}", '{"code": 5}', '{"code": " "}', b"\xff\xfe"])
def test_a_body_that_makes_no_sense_is_refused(server: Any, body: Any) -> None:
    assert ask(server, "/monarch/pair", body, JSON)[0] == 400


def test_a_body_without_end_is_refused(server: Any) -> None:
    assert ask(server, "/monarch/pair", json.dumps({"code": "x" * 200_000}), JSON)[0] == 413


def test_answers_hold_no_keys_and_no_folders(server: Any) -> None:
    (server.configuration / "monarch.toml").write_text("[clusters.default\n")
    answers = [ask(server, "/monarch/state")[1]]
    (server.configuration / "monarch.toml").unlink()
    (server.configuration / "pairings.json").write_text("not JSON")
    answers.append(ask(server, "/monarch/forget", {"name": "x"}, JSON)[1])
    (server.configuration / "pairings.json").unlink()
    ask(server, "/monarch/check", {}, JSON)
    while True:
        answers.append(ask(server, "/monarch/state")[1])
        if not json.loads(answers[-1])["doctor"]["running"]:
            break
        time.sleep(0.5)
    assert json.loads(answers[-1])["doctor"]["checks"]
    assert "does not hold pairings" in answers[1]
    identity = json.loads((server.configuration / "identity.json").read_text())
    for answer in answers:
        assert "SECRETFOLDER" not in answer
        assert str(server.base) not in answer
        assert identity["secret"] not in json.loads(json.dumps(answer))
        assert identity["public"] not in answer


def test_nobody_else_waits_while_the_doctor_examines_and_a_worker_is_silent(server: Any) -> None:
    import socket

    from monarch_split.distributed.addresses import Address
    from monarch_split.distributed.auth import KeyPair
    from monarch_split.distributed.pairing import _encode

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        code = _encode([Address("127.0.0.1", silent.getsockname()[1])], KeyPair.new().public, bytes(16))
        ask(server, "/monarch/check", {}, JSON)
        pairing = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        began = time.monotonic()
        pairing.request("POST", "/monarch/pair", json.dumps({"code": code}), JSON)
        slowest = 0.0
        for _ in range(10):
            at = time.monotonic()
            assert ask(server, "/queue")[0] == 200
            slowest = max(slowest, time.monotonic() - at)
        answer = pairing.getresponse()
        took = time.monotonic() - began
        assert answer.status == 409
        assert "could not be reached" in answer.read().decode()
        pairing.close()
    assert slowest < took / 2
