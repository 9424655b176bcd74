"""The link to a worker is measured without opening anything that stays open or serves a stranger. Real workers."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from monarch_split import cli
from monarch_split.distributed import limits
from monarch_split.distributed.addresses import Address
from monarch_split.distributed.jobs import Stopped
from monarch_split.distributed.link_rate import measure_link
from monarch_split.distributed.link_sink import SECRET_BYTES, Sink
from monarch_split.distributed.messages import Kind
from monarch_split.distributed.peer import Peer, PeerFailed
from monarch_split.distributed.versions import own_versions
from monarch_split.tests.driving import share_identity
from monarch_split.tests.network_proxy import NetworkProxy
from monarch_split.tests.worker_process import Forge, Worker, ended

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="workers run on Linux")


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LINK_TEST_SECONDS", 0.05)


@pytest.fixture(scope="module")
def worker(forge: Forge) -> Iterator[Worker]:
    made = forge.worker("second")
    with ended(made):
        yield made


@pytest.fixture
def peer(worker: Worker) -> Iterator[Peer]:
    peer = Peer(Address("127.0.0.1", worker.port), lambda: None)
    peer.connect(own_versions(None), allow_mismatch=False)
    yield peer
    peer.close(cancel=True)


class TestMeasuring:
    def test_rates_are_of_this_link(self, peer: Peer) -> None:
        link = measure_link(peer)
        assert 0 < link.rtt < 5
        assert link.lanes == limits.DATA_LANES
        # Wide bounds: a loopback carries more than a modem and less than memory does.
        assert 1e6 < link.rate < 1e12
        assert link.tcp_rate is not None
        assert 1e6 < link.tcp_rate < 1e12

    def test_a_slow_link_is_measured_as_one_and_without_its_third_port(self, worker: Worker) -> None:
        proxy = NetworkProxy(worker.port, "127.0.0.2")
        proxy.throttle(2e6)
        host, _, port = proxy.address.rpartition(":")
        peer = Peer(Address(host, int(port)), lambda: None)
        try:
            peer.connect(own_versions(None), allow_mismatch=False)
            link = measure_link(peer)
        finally:
            peer.close(cancel=True)
            proxy.close()
        assert link.rate < 4e6
        assert link.tcp_rate is None
        assert "plain TCP to it did not work" in link.tcp_problem

    def test_an_answer_of_any_size_is_not_to_be_had(self, worker: Worker, peer: Peer) -> None:
        for size in (limits.ECHO_BYTES + 1, -1, 1 << 60):
            other = Peer(Address("127.0.0.1", worker.port), lambda: None)
            peer.close(cancel=True)
            other.connect(own_versions(None), allow_mismatch=False)
            ticket = other.ask(Kind.ECHO, {"data": torch.zeros(0), "bytes": size})
            with pytest.raises(PeerFailed, match="too large"):
                other.answer(ticket, Kind.ECHO)
            other.close(cancel=True)

    def test_a_second_port_for_plain_tcp_is_not_to_be_had(self, peer: Peer) -> None:
        secret = {"secret": secrets.token_hex(SECRET_BYTES)}
        peer.answer(peer.ask(Kind.SINK, secret), Kind.SINK)
        with pytest.raises(PeerFailed, match="once in a run"):
            peer.answer(peer.ask(Kind.SINK, secret), Kind.SINK)


class TestTheSink:
    SECRET = secrets.token_bytes(SECRET_BYTES)

    @pytest.fixture
    def sink(self) -> Iterator[Sink]:
        """A sink that drains in a thread, which has ended by the end of the test."""
        sink = Sink(["127.0.0.1"], 0, self.SECRET)
        thread = threading.Thread(target=sink.drain, args=(lambda: None,))
        thread.start()
        yield sink
        thread.join(limits.SINK_SECONDS + 5)
        assert not thread.is_alive()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", sink.port), timeout=2)

    def connect(self, sink: Sink) -> socket.socket:
        return socket.create_connection(("127.0.0.1", sink.port), timeout=5)

    def test_takes_what_follows_the_secret_and_closes(self, sink: Sink) -> None:
        with self.connect(sink) as stream:
            stream.sendall(self.SECRET[:7])
            time.sleep(0.05)
            stream.sendall(self.SECRET[7:] + bytes(3 << 20))
            stream.shutdown(socket.SHUT_WR)
            assert stream.recv(1) == b""

    def test_a_stranger_is_shown_the_door_and_the_driver_is_served(self, sink: Sink) -> None:
        with self.connect(sink) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n  ")
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
        crowd = [self.connect(sink) for _ in range(3 * limits.SINK_STREAMS)]
        for stranger in crowd:
            stranger.close()
        with self.connect(sink) as stream:
            stream.sendall(self.SECRET)
            stream.shutdown(socket.SHUT_WR)
            assert stream.recv(1) == b""

    def test_closes_if_nobody_comes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(limits, "SINK_SECONDS", 0.2)
        sink = Sink(["127.0.0.1"], 0, self.SECRET)
        began = time.monotonic()
        sink.drain(lambda: None)
        assert time.monotonic() - began < 5
        with pytest.raises(ConnectionRefusedError):
            self.connect(sink)

    def test_ends_when_the_driver_is_gone(self) -> None:
        sink = Sink(["127.0.0.1"], 0, self.SECRET)
        with pytest.raises(Stopped):
            sink.drain(self._stop)
        with pytest.raises(ConnectionRefusedError):
            self.connect(sink)

    def test_another_port_does_if_the_usual_one_is_taken(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            for port in (taken.getsockname()[1], 65_537):
                sink = Sink(["127.0.0.1", "127.0.0.2"], port, self.SECRET)
                assert sink.port != port
                with pytest.raises(Stopped):
                    sink.drain(self._stop)

    @staticmethod
    def _stop() -> None:
        raise Stopped


class TestTheCommand:
    @pytest.fixture(autouse=True)
    def configuration(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        share_identity(tmp_path)
        monkeypatch.setenv("MONARCH_CONFIG_DIR", str(tmp_path))

    def test_one_worker_is_one_object(self, worker: Worker, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["bench", "link", worker.address, "--json"]) == 0
        said = json.loads(capsys.readouterr().out)
        assert set(said) == {"worker", "address", "rtt_ms", "lanes", "gb_per_s", "tcp_gb_per_s"}
        assert said["worker"] == "second"

    def test_several_workers_are_a_list_and_one_that_is_down_is_a_finding(
        self, worker: Worker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            down = "{}:{}".format(*server.getsockname())
        (tmp_path / "monarch.toml").write_text(f'[clusters.default]\nworkers = ["{worker.address}", "{down}"]\n')
        assert cli.main(["bench", "link", "--json"]) == 1
        first, second = json.loads(capsys.readouterr().out)["workers"]
        assert first["gb_per_s"] > 0
        assert "nothing listens" in second["error"]

    def test_a_person_gets_a_table(self, worker: Worker, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["bench", "link", worker.address]) == 0
        head, row = capsys.readouterr().out.splitlines()
        assert head.split() == ["worker", "round", "trip", "lanes", "channel", "plain", "TCP"]
        assert row.startswith(f"second ({worker.address})")
        assert row.count("GB/s") == 2

    def test_nothing_to_measure(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["bench", "link", "--json"]) == 1
        assert "No worker is configured" in json.loads(capsys.readouterr().out)["error"]
        assert cli.main(["bench", "link", "a:b:c:d"]) == 2
        assert cli.main(["bench"]) == 2
