"""What a driver that is let in still may not do: name other files or places, fill the memory, say what nobody knows."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from monarch_split.benchmarks.hostile import valid_messages
from monarch_split.demo.reference_runtime import ReferenceRuntime
from monarch_split.distributed import jobs, limits
from monarch_split.distributed.addresses import Address
from monarch_split.distributed.auth import AuthError, ExchangeKeys, KeyPair, Paired, Pairings
from monarch_split.distributed.channel import Assembler
from monarch_split.distributed.codec import Kept, PartialMessage, ProtocolError, chunk_prefix, parse_chunk_prefix
from monarch_split.distributed.fields import FIELDS, check_fields
from monarch_split.distributed.file_cache import FileCache
from monarch_split.distributed.files import FileRef, file_digest
from monarch_split.distributed.folders import configuration_folder
from monarch_split.distributed.invitation import Invitation
from monarch_split.distributed.jobs import Job, Jobs
from monarch_split.distributed.messages import FROM_DRIVER, Kind, Message
from monarch_split.distributed.pairing import announced, issue_code, open_token, running_worker
from monarch_split.distributed.patch_cache import PatchCache
from monarch_split.distributed.recipe import Recipe, tensor_digest
from monarch_split.distributed.worker_tokens import TokenRank, checked_shares

HERE = "127.0.0.1"
REF = {"folder": "checkpoints", "name": "a.safetensors", "bytes": 100, "digest": "0" * 40}
JOIN = {"engine": "lanes", "rank": 1, "addresses": [None, ("10.0.0.2", 7691)], "secret": "00" * 32, "store": None}


class TestFields:
    def test_every_message_of_a_driver_has_its_fields_in_the_table(self, recipe: Recipe) -> None:
        assert set(FIELDS) == FROM_DRIVER | {Kind.PAIR}
        for kind, body in valid_messages(recipe):
            check_fields(Message(kind, 1, body))

    def test_a_field_too_many_too_few_or_of_another_type_is_refused(self, recipe: Recipe) -> None:
        others: list[Any] = [True, 1.0, "1", b"", 1 << 70, [], {}, (), torch.zeros(1), 1]
        for kind, body in valid_messages(recipe):
            if kind is Kind.HELLO:
                continue
            with pytest.raises(ProtocolError, match="unknown field 'more'"):
                check_fields(Message(kind, 1, {**body, "more": 1}))
            for name, types in FIELDS[kind].items():
                for other in others:
                    if type(other) not in types:
                        with pytest.raises(ProtocolError, match=f"'{name}' is missing or of a wrong type"):
                            check_fields(Message(kind, 1, {**body, name: other}))
                if type(None) not in types:
                    with pytest.raises(ProtocolError, match=f"'{name}' is missing"):
                        check_fields(Message(kind, 1, {key: value for key, value in body.items() if key != name}))

    @pytest.mark.parametrize("header", [{"b": {}, "t": [], "x": 1}, {"t": []}, {"b": {}}], ids=str)
    def test_a_header_with_other_fields_is_refused(self, header: dict[str, Any]) -> None:
        text = json.dumps(header).encode()
        with pytest.raises(ProtocolError):
            PartialMessage([memoryview(_prefix(len(text)) + text)], FROM_DRIVER)

    def test_reserved_bytes_are_zero(self) -> None:
        text = b'{"b":{},"t":[]}'
        PartialMessage([memoryview(_prefix(len(text)) + text)], FROM_DRIVER)
        with pytest.raises(ProtocolError):
            PartialMessage([memoryview(_prefix(len(text), reserved=1) + text)], FROM_DRIVER)
        for at in (5, 6, 7):
            bad = bytearray(chunk_prefix(1, 0, 0))
            bad[at] = 1
            with pytest.raises(ProtocolError):
                parse_chunk_prefix(memoryview(bad))


def _prefix(length: int, *, reserved: int = 0, number: int = 1) -> bytes:
    return struct.pack("<4sBBHIQ", b"MNRC", limits.PROTOCOL_VERSION, Kind.FORWARD, reserved, length, number)


class TestMemory:
    def test_headers_count_for_what_they_take_once_they_are_parsed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(limits, "MAX_PENDING_BYTES", 8 << 20)
        size = limits.INLINE_BYTES + 1
        text = json.dumps({"b": {"x": [{}] * 25_000}, "t": [["uint8", [size], size, 0]]}).encode()
        assembler = Assembler(FROM_DRIVER)

        def flood() -> None:
            for number in range(1, 100):
                assembler.control([memoryview(_prefix(len(text), number=number) + text)])

        with pytest.raises(ProtocolError, match="not complete"):
            flood()
        assert len(assembler._pending) * 25_000 * 64 <= limits.MAX_PENDING_BYTES

    @pytest.mark.parametrize("nbytes", [0, 1000], ids=["many", "large"])
    def test_what_a_driver_asks_for_does_not_pile_up(self, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(limits, "MAX_WAITING_JOBS", 5)
        monkeypatch.setattr(limits, "MAX_WAITING_BYTES", 4000 if nbytes else 1 << 40)
        go_on, done = threading.Event(), threading.Semaphore(0)
        waiting = Jobs(ReferenceRuntime(), lambda *_: done.release())

        def work() -> dict[str, Any]:
            go_on.wait(10)
            return {}

        def add(number: int) -> None:
            waiting.add(Job(b"driver", number, Kind.RESULT, work, nbytes))

        try:
            room = 4 if nbytes else 5
            for number in range(1, room + 1):
                add(number)
            with pytest.raises(ProtocolError, match="can wait here"):
                add(room + 1)
            waiting.add(Job(b"", 0, None, work))  # the worker's own
            go_on.set()
            assert all(done.acquire(timeout=10) for _ in range(room))
            waiting.add(Job(b"", 0, Kind.RESULT, work))
            assert done.acquire(timeout=10)
            for number in range(1, room + 1):
                add(number)
        finally:
            go_on.set()
            waiting.close()

    def test_patch_tensors_of_one_recipe_are_bounded(self) -> None:
        cache = PatchCache(max_bytes=100, max_pinned=1000)
        tensors = {tensor_digest(tensor): tensor for tensor in (torch.full((100,), float(i)) for i in range(4))}
        wanted = set(cache.missing({"patches": [Kept(name) for name in tensors]}))
        first, second, third, _ = tensors
        cache.add({name: tensors[name] for name in (first, second)}, wanted)
        with pytest.raises(ProtocolError, match="more patch tensors"):
            cache.add({third: tensors[third]}, wanted)


class TestPlaces:
    @pytest.mark.parametrize(
        "name",
        ["", ".", "..", "/etc/passwd", "../a", "a/../../b", "a/..", "./a", "a//b", "..\\a", "\\\\server\\a", "a\0b"],
    )
    def test_a_name_that_leaves_its_folder_is_refused(self, name: str) -> None:
        with pytest.raises(ProtocolError):
            FileRef.from_message({**REF, "name": name})

    @pytest.mark.parametrize("name", ["a", "flux/dev v1.0..safetensors", "ü: 100%.safetensors", "sub\\a.safetensors"])
    def test_names_that_people_use_are_taken(self, name: str) -> None:
        assert FileRef.from_message({**REF, "name": name}).name == name

    def test_a_link_in_the_cache_is_neither_read_nor_written(self, tmp_path: Path, recipe: Recipe) -> None:
        outside = tmp_path / "outside.safetensors"
        outside.write_bytes(recipe.path.read_bytes())
        ref = FileRef(None, "a", outside.stat().st_size, file_digest(outside))
        cache = FileCache(tmp_path / "cache")
        cache.folder.mkdir()
        (cache.folder / f"{ref.digest}.safetensors").symlink_to(outside)
        assert cache.find(ref) is None
        (cache.folder / f"{ref.digest}.part").symlink_to(tmp_path / "victim")
        with pytest.raises(OSError, match=r"(?i)symbolic links"):
            cache.receive(ref)
        assert not (tmp_path / "victim").exists()

    @pytest.mark.parametrize(
        "place",
        [
            ("example.com", 1),
            ("*", 1),
            ("0.0.0.0", 1),
            ("::", 1),
            ("::ffff:127.0.0.1", 1),
            ("10.0.0.2;10.0.0.3", 1),
            ("10.0.0.2:5", 1),
            ("10.0.0.2", 0),
            ("10.0.0.2", 65536),
            ("10.0.0.2", -1),
            ("fe80::1%eth0/../x", 1),
            ("", 1),
            "10.0.0.2",
            5,
            [],
        ],
        ids=str,
    )
    @pytest.mark.parametrize("field", ["addresses", "store"])
    def test_only_plain_addresses_of_machines_are_connected_to(self, place: Any, field: str) -> None:
        wrong = {**JOIN, field: [None, place] if field == "addresses" else place}
        with pytest.raises(ProtocolError):
            Invitation.from_message(wrong)

    @pytest.mark.parametrize("host", ["10.0.0.2", "fd00::2", "fe80::1%enp1s0"])
    def test_addresses_of_machines_are_taken(self, host: str) -> None:
        told = Invitation.from_message({**JOIN, "addresses": [None, (host, 7691)], "store": [host, 1]})
        assert told.addresses == (None, (host, 7691))

    def test_a_worker_behind_a_tunnel_may_be_told_its_own_address(self) -> None:
        told = {**JOIN, "addresses": [None, (HERE, 7691)]}
        assert not Invitation.from_message(told).names_loopback
        assert Invitation.from_message({**told, "addresses": [None, (HERE, 7691), (HERE, 22)]}).names_loopback
        assert Invitation.from_message({**told, "store": (HERE, 22)}).names_loopback

    @pytest.mark.parametrize("rank", [0, 2, -1])
    def test_a_rank_is_one_of_those_that_are_told(self, rank: int) -> None:
        with pytest.raises(ProtocolError):
            Invitation.from_message({**JOIN, "rank": rank})
        with pytest.raises(ProtocolError):
            Invitation.from_message({**JOIN, "addresses": [None] * (limits.MAX_RANKS + 1)})


class TestTokenRanks:
    @pytest.fixture
    def replica(self, recipe: Recipe) -> Any:
        return ReferenceRuntime().build(recipe.tree, recipe.path, "")

    def test_a_driver_elsewhere_cannot_have_it_connect_to_its_own_services(self, replica: Any) -> None:
        rank = TokenRank([HERE], 0)
        try:
            rank.open(replica, store=False, keys=ExchangeKeys.new(encrypted=False))
            body = {**JOIN, "addresses": [None, ("192.0.2.7", 7691), (HERE, 22)], "number": 1}
            with pytest.raises(ProtocolError, match="connect to itself"):
                rank.join(body, replica, lambda: None, local=False)
        finally:
            rank.close()

    def test_nothing_listens_once_the_driver_is_gone(self, replica: Any) -> None:
        rank = TokenRank([HERE], 0)
        try:
            port = rank.open(replica, store=True, keys=ExchangeKeys.new(encrypted=True))["port"]
            socket.create_connection((HERE, port)).close()
            rank.forget()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((HERE, port))
        finally:
            rank.close()


class TestFilesThatSayWhoMayComeIn:
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("MONARCH_CONFIG_DIR", str(tmp_path))
        return configuration_folder()

    @pytest.mark.skipif(os.name == "nt", reason="no such permissions")
    @pytest.mark.parametrize("mode", [0o666, 0o620, 0o602])
    def test_those_that_others_could_have_written_are_not_believed(self, folder: Path, mode: int) -> None:
        Pairings.add_driver(Paired("driver", KeyPair.new().public))
        issue_code([Address(HERE, 7690)])
        with announced([Address(HERE, 7690)]):
            for name, read in (
                ("pairings.json", Pairings.load),
                ("pairing-code.json", open_token),
                ("worker-7690.json", running_worker),
            ):
                assert read()
                (folder / name).chmod(mode)
                with pytest.raises(AuthError, match=f"others can change .*chmod 600 {folder / name}"):
                    read()


def test_names_from_the_network_do_not_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    jobs.say("Receiving \x1b[2J\x9b1mmodel\r\n\tü.safetensors")
    assert capsys.readouterr().out == "Receiving [2J1mmodel\n\tü.safetensors\n"


@pytest.mark.parametrize(
    "told", [[1.0], [1, 1, 1], [float("nan"), 1], [float("inf"), 1], [-1, 2], [0, 0], [], ["x", 1]]
)
def test_shares_of_a_token_split_are_numbers_that_can_be_shares(told: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"shares|could not convert"):
        checked_shares(told, 2)
    assert checked_shares([3, 0.5], 2) == [3.0, 0.5]
