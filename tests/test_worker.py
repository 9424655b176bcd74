"""A worker serves one driver at a time, keeps what it was sent, and outlives whatever a driver does. Real workers."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import pytest
import torch

from monarch_split.demo.reference import ReferenceDiT
from monarch_split.demo.worker_process import WorkerProcess
from monarch_split.distributed import limits
from monarch_split.distributed.addresses import parse_address
from monarch_split.distributed.cluster import configuration_file
from monarch_split.distributed.codec import Kept
from monarch_split.distributed.driver_channel import DriverChannel
from monarch_split.distributed.messages import Kind, Message
from monarch_split.distributed.peer import Peer
from monarch_split.distributed.recipe import Recipe, tensor_digest
from monarch_split.distributed.versions import own_versions
from monarch_split.tests.channel_peer import own_keys
from monarch_split.tests.driving import SAME, equal_shares, open_session, render, sample_once
from monarch_split.tests.worker_process import Forge, Worker, ended, until

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="workers run on Linux"),
    pytest.mark.usefixtures("even_shares"),
]


def assert_serves(worker: Worker, recipe: Recipe, model: ReferenceDiT) -> None:
    worst, report = render([worker.address], recipe, model)
    assert worst <= SAME
    assert report.forwards_split >= 2, report.line()


class TestWhoIsServed:
    def test_no_worker_configured_is_said(self, recipe: Recipe, model: ReferenceDiT) -> None:
        worst, report = render([], recipe, model)
        assert worst == 0
        assert report.line() == (
            "One machine: no worker is configured in cluster 'test'; pair one (monarch pair), or name it in "
            f"{configuration_file()}."
        )

    def test_a_worker_that_is_down_is_named_with_the_next_step(self, recipe: Recipe, model: ReferenceDiT) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        worst, report = render([f"127.0.0.1:{port}"], recipe, model)
        assert worst == 0
        assert report.line() == f"One machine: nothing listens at 127.0.0.1:{port}; start the worker there."

    def test_another_program_behind_the_address_is_told_from_a_worker(
        self, recipe: Recipe, model: ReferenceDiT
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            worst, report = render([f"127.0.0.1:{server.getsockname()[1]}"], recipe, model)
        assert worst == 0
        assert "does not answer as a Monarch worker" in report.line()

    def test_another_version_of_the_pack_is_refused_with_both_named(
        self, forge: Forge, recipe: Recipe, model: ReferenceDiT
    ) -> None:
        other = forge.worker("old", pack="0.0.1")
        with ended(other):
            worst, report = render([other.address], recipe, model)
        assert worst == 0
        assert all(version in report.line() for version in ("0.0.1", own_versions(None).pack))
        assert "install the same version on both" in report.line()

    def test_another_version_is_used_with_a_warning_by_who_allows_it(self, forge: Forge) -> None:
        with ended(other := forge.worker("old", pack="0.0.1")):
            peer = Peer(parse_address(other.address), lambda: None)
            try:
                warnings = peer.connect(own_versions(None), allow_mismatch=True)
            finally:
                peer.close(cancel=False)
        assert any("0.0.1" in warning for warning in warnings)

    def test_a_second_driver_hears_since_when_the_worker_is_busy(
        self, worker: Worker, recipe: Recipe, model: ReferenceDiT
    ) -> None:
        with open_session([worker.address], recipe) as first:
            sample_once(first, model)
            began = time.monotonic()
            worst, report = render([worker.address], recipe, model)
            assert time.monotonic() - began < 2
            assert worst == 0
            assert "busy with a driver on this machine since" in report.line()
            assert ":" in report.line().partition("since ")[2][:8]
            sample_once(first, model)
        assert first.report.forwards_split == 5
        assert_serves(worker, recipe, model)

    @pytest.mark.parametrize("slow", [0.0, 30.0])
    def test_a_driver_that_is_killed_frees_the_worker(
        self, forge: Forge, worker: Worker, recipe: Recipe, model: ReferenceDiT, slow: float
    ) -> None:
        driver = forge.driver(worker.address, recipe.path)
        with ended(driver):
            until(lambda: "driving" in driver.log, "the driver to split")
            worker.behave(slow=slow)
            worker.mark()
            until(lambda: worker.reached("forward"), "a forward")
        worker.behave()
        began = time.monotonic()
        assert_serves(worker, recipe, model)
        assert time.monotonic() - began < 3

    def test_a_driver_that_is_frozen_frees_the_worker_and_goes_on_alone(
        self, forge: Forge, worker: Worker, recipe: Recipe, model: ReferenceDiT
    ) -> None:
        driver = forge.driver(worker.address, recipe.path)
        with ended(driver):
            until(lambda: "driving" in driver.log, "the driver to split")
            driver.freeze()
            time.sleep(limits.HEARTBEAT_INTERVAL + limits.HEARTBEAT_TIMEOUT + 0.5)
            assert_serves(worker, recipe, model)
            rounds = driver.log.count("driving")
            driver.thaw()
            until(lambda: driver.log.count("driving") > rounds + 2, "the driver to go on")


class TestWhatIsKept:
    def test_a_file_is_streamed_once(self, worker: Worker, recipe: Recipe, model: ReferenceDiT) -> None:
        done: list[tuple[int, int]] = []
        _, first = render([worker.address], recipe, model, progress=lambda *at: done.append(at))
        assert first.bytes_sent > recipe.file.bytes
        assert done[-1] == (recipe.file.bytes, recipe.file.bytes)
        _, second = render([worker.address], recipe, model, progress=lambda *at: done.append((0, 0)))
        assert second.bytes_sent < recipe.file.bytes / 10
        assert (0, 0) not in done

    @pytest.mark.parametrize("room", [0.0, 0.5, 0.999])
    def test_a_full_disk_is_one_clear_sentence_and_leaves_nothing(
        self, forge: Forge, recipe: Recipe, model: ReferenceDiT, room: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(limits, "FILE_CHUNK_BYTES", 100_000)
        # Room for what the worker prints, at least.
        small = forge.worker("small", largest_file=max(4096, int(recipe.file.bytes * room)))
        with ended(small):
            for _ in range(2):
                worst, report = render([small.address], recipe, model)
                assert worst == 0
                assert report.line().startswith("One machine: small: the model file cannot be kept on the worker: ")
                assert "File too large; free some space there" in report.line()
                assert [path.name for path in small.cache.iterdir()] == ["behaviour"]
            assert small.end() == 0

    def test_a_cache_that_cannot_be_read_is_said_and_does_not_end_the_worker(
        self, worker: Worker, recipe: Recipe, model: ReferenceDiT
    ) -> None:
        # A folder in the file's place, whose content the worker must not touch.
        in_the_way = worker.cache / f"{recipe.file.digest}.safetensors"
        (in_the_way / "precious").mkdir(parents=True)
        worst, report = render([worker.address], recipe, model)
        assert worst == 0
        assert "the model file cannot be kept on the worker" in report.line()
        (in_the_way / "precious").rmdir()
        in_the_way.rmdir()
        assert_serves(worker, recipe, model)

    def test_a_model_that_is_ready_at_once_is_not_taken_for_no_answer(
        self, worker: Worker, recipe: Recipe, model: ReferenceDiT
    ) -> None:
        assert_serves(worker, recipe, model)
        # The driver comes to read what the worker needs only when it has been built already.
        slow = iter([0.0, 0.3, 0.3])
        with open_session([worker.address], recipe, check=lambda: time.sleep(next(slow, 0.0))) as session:
            sample_once(session, model)
        assert session.report.forwards_split == 3, session.report.line()

    def test_unchanged_patch_tensors_are_not_sent_again(
        self, worker: Worker, recipe: Recipe, model: ReferenceDiT
    ) -> None:
        up, down = torch.randn(64, 512), torch.randn(512, 64)
        sent = []
        for strength, tensors in ((1.0, [up]), (0.5, [up]), (0.5, [up, down]), (0.25, [down, up]), (0.25, [])):
            named = {tensor_digest(tensor): tensor for tensor in tensors}
            tree = {**recipe.tree, "content": [[strength, Kept(name)] for name in named]}
            patched = Recipe(tree, recipe.file, recipe.path, named)
            _, report = render([worker.address], patched, model)
            assert report.forwards_split >= 2
            sent.append(report.bytes_sent)
        assert sent[0] >= recipe.file.bytes + up.nbytes
        assert up.nbytes <= sent[2] < 2 * up.nbytes
        assert max(sent[1], *sent[3:]) < up.nbytes


class TestWhatADriverMaySay:
    def greeted(self, worker: Worker) -> DriverChannel:
        channel = DriverChannel("127.0.0.1", worker.port, keys=own_keys())
        channel.send(Kind.HELLO, {"lanes": channel.lanes, **own_versions(None).as_dict()})
        assert self.answer(channel).kind is Kind.WELCOME
        return channel

    def answer(self, channel: DriverChannel) -> Message:
        messages = until(lambda: channel.receive(0.05), "an answer", 5)
        return messages[0]

    def test_nonsense_is_answered_and_the_worker_lives_on(
        self, worker: Worker, recipe: Recipe, model: ReferenceDiT
    ) -> None:
        file = recipe.file.as_dict()
        for kind, body in (
            (Kind.PREPARE, {}),
            (Kind.PREPARE, {"file": file, "recipe": [1]}),
            (Kind.PREPARE, {"file": {**file, "bytes": -1}, "recipe": {}}),
            (Kind.PREPARE, {"file": {**file, "digest": "../../x"}, "recipe": {}}),
            (Kind.TENSORS, {"tensors": {}}),
            (Kind.FILE_BEGIN, {"file": file}),
            (Kind.FILE_CHUNK, {"offset": 0, "data": torch.zeros(3)}),
            (Kind.FILE_END, {"digest": ""}),
            (Kind.FORWARD, {}),
            (Kind.FORWARD, {"args": [], "kwargs": {}, "keep": {}, "drop": []}),
            (Kind.FORWARD, {"args": [], "kwargs": {}, "keep": [3], "drop": 5}),
        ):
            channel = self.greeted(worker)
            try:
                number = channel.send(kind, body)
                answer = self.answer(channel)
                assert (answer.kind, answer.body["for"]) == (Kind.FAILED, number), (kind, body)
                channel.send(Kind.END, {})
            finally:
                channel.close()
        assert_serves(worker, recipe, model)

    def test_a_second_recipe_before_the_first_is_complete_ends_the_run(self, worker: Worker, recipe: Recipe) -> None:
        channel = self.greeted(worker)
        try:
            first = channel.send(Kind.PREPARE, {"file": recipe.file.as_dict(), "recipe": recipe.tree})
            assert self.answer(channel).kind is Kind.NEED
            second = channel.send(Kind.PREPARE, {"file": recipe.file.as_dict(), "recipe": {"other": 1}})
            failed: list[int] = []
            until(lambda: failed.extend(m.body["for"] for m in channel.receive(0.05)) or len(failed) == 2, "answers", 5)
            assert failed == [first, second]
        finally:
            channel.close()

    def test_messages_after_the_end_of_a_run_are_ignored(
        self, worker: Worker, recipe: Recipe, model: ReferenceDiT
    ) -> None:
        channel = self.greeted(worker)
        try:
            channel.send(Kind.END, {})
            channel.send(Kind.PREPARE, {"file": recipe.file.as_dict(), "recipe": recipe.tree})
            channel.send(Kind.FORWARD, {"args": [torch.zeros(1 << 20)], "kwargs": {}, "keep": {}, "drop": []})
            assert_serves(worker, recipe, model)
        finally:
            channel.close()


class TestStartingAndStopping:
    def test_the_command_line_starts_one_that_serves(
        self, recipe: Recipe, model: ReferenceDiT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        equal_shares(monkeypatch)
        with WorkerProcess(cache=tmp_path, name="told", timeout=30) as process:
            worst, report = render([process.address], recipe, model)
        assert worst <= SAME
        assert set(report.rows) == {"this machine", "told"}

    def test_sigterm_ends_it_in_good_order_even_in_a_forward(
        self, worker: Worker, recipe: Recipe, model: ReferenceDiT
    ) -> None:
        worker.behave(slow=30)
        began = []

        def check() -> None:
            if worker.reached("forward") and not began:
                worker.send(signal.SIGTERM)
                began.append(time.monotonic())

        worst, report = render([worker.address], recipe, model, check=check)
        assert time.monotonic() - began[0] < 3
        assert worst <= SAME
        assert "lost" in report.line()
        assert worker.end() == 0
        assert "Traceback" not in worker.log

    def test_a_taken_port_is_said_with_the_next_step(
        self, worker: Worker, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        from monarch_split.demo.reference_runtime import ReferenceRuntime
        from monarch_split.distributed.serve import serve

        assert serve(ReferenceRuntime(), ["127.0.0.1"], worker.port, cache=tmp_path, name="late") == 1
        assert f"Cannot listen on port {worker.port} of 127.0.0.1: Address already in use" in capsys.readouterr().err

    def test_a_cache_folder_that_cannot_be_used_is_said_at_once(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        from monarch_split.demo.reference_runtime import ReferenceRuntime
        from monarch_split.distributed.serve import serve

        taken = tmp_path / "a file"
        taken.touch()
        assert serve(ReferenceRuntime(), ["127.0.0.1"], 0, cache=taken) == 1
        assert f"cannot be kept in {taken}" in capsys.readouterr().err
