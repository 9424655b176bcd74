"""Two machines are joined by one code; without keys, with wrong ones or with an old code, nobody gets in."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from monarch_split import cli
from monarch_split.demo.reference import ReferenceDiT
from monarch_split.distributed import auth, limits, pairing
from monarch_split.distributed.addresses import Address, parse_address
from monarch_split.distributed.auth import AuthError, ChannelKeys, KeyPair, Paired, Pairings, own_identity
from monarch_split.distributed.channel import ChannelLost
from monarch_split.distributed.driver_channel import DriverChannel
from monarch_split.distributed.messages import Kind
from monarch_split.distributed.pairing import PairingError, issue_code, pair, running_worker
from monarch_split.distributed.peer import Peer, PeerFailed
from monarch_split.distributed.recipe import Recipe
from monarch_split.distributed.versions import own_versions
from monarch_split.tests.channel_peer import echo_thread, own_keys
from monarch_split.tests.driving import render
from monarch_split.tests.worker_process import Forge, Worker, ended, until

HERE = "127.0.0.1"


class Machine:
    """A machine as far as its configuration folder goes."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._monkeypatch = monkeypatch
        folder.mkdir()

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """Within it, this process is that machine."""
        with self._monkeypatch.context() as patch:
            patch.setenv("MONARCH_CONFIG_DIR", str(self.folder))
            yield


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path / "driver", monkeypatch)


@pytest.fixture
def worker_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path / "worker", monkeypatch)


@pytest.fixture
def worker(forge: Forge, worker_machine: Machine) -> Iterator[Worker]:
    """A worker of another machine: it has keys of its own."""
    with ended(running := forge.worker("spark-2", configuration=worker_machine.folder)):
        printed_code(running)
        yield running


def printed_code(worker: Worker) -> str:
    def find() -> str | None:
        return next((line.split()[-1] for line in worker.log.splitlines() if "monarch pair" in line), None)

    return until(find, "the worker to print a code")


def problem(address: str) -> str:
    """Why this machine cannot use the worker there; empty if it can."""
    peer = Peer(parse_address(address), lambda: None)
    try:
        peer.connect(own_versions(None), allow_mismatch=False)
    except Exception as error:
        return str(error)
    finally:
        peer.close(cancel=False)
    return ""


class TestPairing:
    def test_a_pasted_code_joins_two_machines(
        self, driver: Machine, worker: Worker, worker_machine: Machine, recipe: Recipe, model: ReferenceDiT
    ) -> None:
        code = printed_code(worker)
        with driver.here():
            paired = pair(code)
            assert paired.name == "spark-2"
            assert [str(address) for address in paired.addresses] == [worker.address]
            worst, report = render([worker.address], recipe, model)
            assert worst <= 1e-5
            assert report.forwards_split > 0, report.line()
        with worker_machine.here():
            assert [each.name for each in Pairings.load().drivers] == [os.uname().nodename]
        assert f"Serving {os.uname().nodename}." in worker.log

    def test_a_worker_is_known_under_its_name_too(self, driver: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        first, second = Address("10.0.0.2", 7690), Address("10.0.1.2", 7690)
        key = KeyPair.new().public
        names = {"spark-2.local": "10.0.1.2"}
        monkeypatch.setattr(auth.socket, "getaddrinfo", lambda host, port, **_: [(0, 0, 0, "", (names[host], port))])
        with driver.here():
            Pairings.add_worker(Paired("spark-2", key, (first, second)))
            known = auth.known_worker(Address("spark-2.local", 7690))
            assert (known.keys.server, known.others) == (key, (first,))

    def test_a_machine_that_is_not_paired_gets_one_sentence(self, driver: Machine, worker: Worker) -> None:
        with driver.here():
            # On the loopback a driver takes an unknown worker for its own user's.
            assert "is not a Monarch worker paired with this machine" in problem(worker.address)
            with pytest.raises(AuthError, match=r"not paired with the worker at 10\.0\.0\.2:7690"):
                auth.known_worker(Address("10.0.0.2", 7690))

    def test_a_code_is_good_for_one_machine(self, driver: Machine, worker: Worker, tmp_path: Path) -> None:
        code = printed_code(worker)
        with driver.here():
            pair(code)
        late = Machine(tmp_path / "late", driver._monkeypatch)
        with late.here(), pytest.raises(PairingError, match="the code is used up or too old"):
            pair(code)

    def test_a_code_that_is_too_old_lets_nobody_in(
        self, driver: Machine, worker: Worker, worker_machine: Machine
    ) -> None:
        code = printed_code(worker)
        path = worker_machine.folder / "pairing-code.json"
        record = json.loads(path.read_text())
        path.write_text(json.dumps({**record, "until": time.time() - 1}))
        with driver.here(), pytest.raises(PairingError, match="the code is used up or too old"):
            pair(code)

    def test_a_new_code_for_a_running_worker(self, driver: Machine, worker: Worker, worker_machine: Machine) -> None:
        first = printed_code(worker)
        with worker_machine.here():
            second = issue_code(running_worker())
        with driver.here():
            with pytest.raises(PairingError):
                pair(first)
            assert pair(second).name == "spark-2"

    def test_a_machine_that_is_removed_is_refused(
        self, driver: Machine, worker: Worker, worker_machine: Machine
    ) -> None:
        with driver.here():
            pair(printed_code(worker))
            assert problem(worker.address) == ""
        with worker_machine.here():
            assert Pairings.remove(os.uname().nodename) == ["driver"]
        with driver.here():
            assert "does not know this machine's key" in problem(worker.address)

    def test_a_machine_that_is_removed_while_it_renders_is_let_go(
        self, driver: Machine, worker: Worker, worker_machine: Machine
    ) -> None:
        with driver.here():
            pair(printed_code(worker))
            peer = Peer(parse_address(worker.address), lambda: None)
            peer.connect(own_versions(None), allow_mismatch=False)
            with worker_machine.here():
                Pairings.remove(os.uname().nodename)
            with pytest.raises(PeerFailed, match="the machines are no longer paired"):
                until(lambda: peer.look() or time.sleep(0.05), "the worker to end it")
            peer.close(cancel=False)

    def test_a_worker_with_other_keys_under_the_same_address_is_not_trusted(
        self, driver: Machine, worker: Worker
    ) -> None:
        with driver.here():
            Pairings.add_worker(Paired("spark-2", KeyPair.new().public, (parse_address(worker.address),)))
            assert "is not a Monarch worker paired with this machine" in problem(worker.address)

    def test_a_copied_configuration_folder_is_named(self, worker: Worker, worker_machine: Machine) -> None:
        code = printed_code(worker)
        with worker_machine.here(), pytest.raises(PairingError, match=r"remove identity\.json"):
            pair(code)

    @pytest.mark.parametrize(
        "spoil",
        [lambda code: code[:-3], lambda code: code[:20] + "xxxx" + code[24:], lambda code: "", str.upper],
        ids=["end", "middle", "all", "case"],
    )
    def test_a_code_that_is_not_whole_is_refused_before_anything_is_sent(
        self, worker_machine: Machine, spoil: Callable[[str], str]
    ) -> None:
        with worker_machine.here():
            code = issue_code([Address("203.0.113.7", 7690)])
        with pytest.raises(PairingError, match="copy all of the line"):
            pair(spoil(code))

    def test_a_code_leaves_out_the_loopback_where_it_has_more(self, worker_machine: Machine) -> None:
        lan, loopback = Address("10.0.0.2", 7690), Address(HERE, 7690)
        with worker_machine.here():
            assert pairing._decode(issue_code([lan, loopback]))[0] == (lan,)
            assert pairing._decode(issue_code([loopback]))[0] == (loopback,)

    def test_only_addresses_where_the_worker_is_are_remembered(
        self, driver: Machine, worker: Worker, forge: Forge
    ) -> None:
        own = parse_address(worker.address)
        with ended(other := forge.worker("this machine's own")), driver.here():
            elsewhere = parse_address(other.address)
            assert pair(printed_code(worker), addresses=[own, elsewhere]).addresses == (own,)

    def test_of_several_workers_those_that_run_are_known(self, forge: Forge, worker_machine: Machine) -> None:
        first = forge.worker("one", configuration=worker_machine.folder)
        with worker_machine.here(), ended(second := forge.worker("two", configuration=worker_machine.folder)):
            first.kill()
            assert running_worker() == (parse_address(second.address),)
            second.end()
            with pytest.raises(AuthError, match="no worker of this user is running"):
                running_worker()

    @pytest.mark.parametrize(
        "addresses", [["10.0.0.2"], ["10.0.0.2", "10.0.1.2"], ["fd00::2"]], ids=["one", "both halves", "v6"]
    )
    def test_a_code_says_where_the_worker_is(self, worker_machine: Machine, addresses: list[str]) -> None:
        told = tuple(Address(host, 7777) for host in addresses)
        with worker_machine.here():
            code = issue_code(told)
            assert pairing._decode(f"  {code[:40]}\n{code[40:]} ")[:2] == (told, own_identity().public)
        assert len(code) < 140


class TestWhoGetsIn:
    def test_nothing_of_a_client_without_the_right_key_is_read(self, driver: Machine) -> None:
        with echo_thread() as echo:

            def ask(keys: ChannelKeys | None) -> None:
                with contextlib.closing(DriverChannel(HERE, echo.port, lanes=1, keys=keys)) as channel:
                    channel.send(Kind.HELLO, {"lanes": 1})
                    until(lambda: channel.receive(0.05), "the refusal")

            for _ in range(3):
                with pytest.raises(ChannelLost, match="does not know this machine's key"):
                    ask(ChannelKeys(KeyPair.new(), own_keys().server))
            with pytest.raises(ChannelLost, match="is not a Monarch worker"):
                ask(None)
            assert not echo.channel._sessions

    def test_a_driver_that_pairs_may_do_nothing_else(self, worker: Worker, driver: Machine) -> None:
        _, server, token = pairing._decode(printed_code(worker))
        keys = ChannelKeys(pairing._one_time_pair(token), server)
        address = parse_address(worker.address)
        with contextlib.closing(DriverChannel(address.host, address.port, lanes=1, keys=keys)) as channel:
            channel.send(Kind.HELLO, {"lanes": 1, **own_versions(None).as_dict()})
            with pytest.raises(ChannelLost, match="ended the run"):
                until(lambda: channel.receive(0.05), "the refusal")
        with driver.here():
            assert pair(printed_code(worker)).name == "spark-2"  # the code is still good

    @pytest.mark.parametrize("key", ["", " " * 40, "#" * 40, "é" * 40])
    def test_nonsense_in_place_of_a_key_is_refused_and_the_code_stays_good(
        self, driver: Machine, worker: Worker, key: str
    ) -> None:
        _, server, token = pairing._decode(printed_code(worker))
        keys = ChannelKeys(pairing._one_time_pair(token), server)
        address = parse_address(worker.address)
        with contextlib.closing(DriverChannel(address.host, address.port, lanes=1, keys=keys)) as channel:
            channel.send(Kind.PAIR, {"name": "x", "key": key})
            (answer,) = until(lambda: channel.receive(0.05), "the refusal")
            assert answer.kind is Kind.REFUSED
        with driver.here():
            assert pair(printed_code(worker)).name == "spark-2"

    def test_of_two_drivers_with_the_same_code_the_second_is_refused(self, worker: Worker) -> None:
        _, server, token = pairing._decode(printed_code(worker))
        keys = ChannelKeys(pairing._one_time_pair(token), server)
        address = parse_address(worker.address)
        answers = []
        with contextlib.ExitStack() as stack:
            channels = [
                stack.enter_context(contextlib.closing(DriverChannel(address.host, address.port, lanes=1, keys=keys)))
                for _ in range(2)
            ]
            time.sleep(1.0)  # both are let in while the code is good
            for channel in channels:
                channel.send(Kind.PAIR, {"name": "x", "key": KeyPair.new().public.decode()})
                answers += until(lambda channel=channel: channel.receive(0.05), "an answer")
        assert [answer.kind for answer in answers] == [Kind.PAIRED, Kind.REFUSED]
        assert answers[1].body["reason"] == "the code is used up or too old"

    def test_guessing_keys_closes_pairing_to_an_address_for_a_while(
        self, worker_machine: Machine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with worker_machine.here(), echo_thread() as echo:
            code = issue_code([Address(HERE, echo.port)])
            _, server, token = pairing._decode(code)

            def enters(own: KeyPair) -> bool:
                keys = ChannelKeys(own, server)
                echo.received.clear()
                with contextlib.closing(DriverChannel(HERE, echo.port, lanes=1, keys=keys)) as channel:
                    channel.send(Kind.PAIR, {"name": "x", "key": own.public.decode()})
                    with pytest.raises(ChannelLost) if own is not right else contextlib.nullcontext():
                        until(lambda: channel.receive(0.05) or echo.received, "the message or the refusal")
                return bool(echo.received)

            right = pairing._one_time_pair(token)
            assert enters(right)
            for _ in range(limits.PAIRING_ATTEMPTS):
                assert not enters(KeyPair.new())
            with pytest.raises(ChannelLost):
                enters(right)
            monkeypatch.setattr(limits, "PAIRING_ATTEMPTS_SECONDS", 0.0)
            assert enters(right)


class TestKeysAndRecords:
    def test_keys_are_made_once_and_are_private(self, driver: Machine) -> None:
        with driver.here():
            first = own_identity()
            assert own_identity() == first
            Pairings.add_driver(Paired("a", KeyPair.new().public))
            issue_code([Address(HERE, 1)])
            for path in driver.folder.iterdir():
                assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        assert first.secret.decode() not in repr(first)

    def test_a_key_that_others_can_read_is_refused_with_the_fix(self, driver: Machine) -> None:
        with driver.here():
            own_identity()
            path = driver.folder / "identity.json"
            path.chmod(0o644)
            with pytest.raises(AuthError, match=f"chmod 600 {path}"):
                own_identity()

    @pytest.mark.parametrize("text", ["", "{}", "[]", '{"secret": 3}', '{"secret": "short"}', "\x00"])
    def test_files_that_are_broken_are_named(self, driver: Machine, text: str) -> None:
        with driver.here():
            for name, read in (("identity.json", own_identity), ("pairings.json", Pairings.load)):
                path = driver.folder / name
                path.write_text(text)
                path.chmod(0o600)
                with pytest.raises(AuthError, match=str(path)):
                    read()

    def test_drivers_of_one_name_are_told_apart(self, driver: Machine) -> None:
        with driver.here():
            for _ in range(2):
                Pairings.add_driver(Paired("ubuntu", KeyPair.new().public))
            assert Pairings.remove("ubuntu") == ["driver"]
            assert [each.name for each in Pairings.load().drivers] == ["ubuntu (2)"]

    def test_pairing_again_replaces_what_was_known(self, driver: Machine) -> None:
        one, two = KeyPair.new().public, KeyPair.new().public
        a, b = Address("10.0.0.2", 7690), Address("10.0.0.3", 7690)
        with driver.here():
            Pairings.add_worker(Paired("spark", one, (a,)))
            assert Pairings.add_worker(Paired("spark", two, (b,))).name == "spark (2)"
            Pairings.add_worker(Paired("spark", one, (b,)))  # the first one has moved to the second one's address
            assert {(each.key, each.addresses) for each in Pairings.load().workers} == {(one, (b,))}


class TestTheCommand:
    def run(self, *argv: str) -> int:
        return cli.main(["pair", *argv])

    def test_pair_list_and_remove(self, driver: Machine, worker: Worker, capsys: pytest.CaptureFixture[str]) -> None:
        with driver.here():
            assert self.run(printed_code(worker)) == 0
            assert "Paired with spark-2 at " + worker.address in capsys.readouterr().out
            assert self.run("--list") == 0
            assert f"spark-2  {worker.address}" in capsys.readouterr().out
            assert self.run("--list", "--json") == 0
            assert json.loads(capsys.readouterr().out)["workers"][0]["name"] == "spark-2"
            assert self.run("--remove", "spark-3") == 1
            assert "No paired machine is called 'spark-3'; there are: spark-2." in capsys.readouterr().err
            assert self.run("--remove", "spark-2") == 0
            assert Pairings.load().workers == ()

    def test_a_new_code_needs_a_running_worker(
        self, driver: Machine, worker: Worker, worker_machine: Machine, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with driver.here():
            assert self.run("--new-code") == 1
            assert "No worker of this user is running" in capsys.readouterr().err
        with worker_machine.here():
            assert self.run("--new-code", "--json") == 0
            code = json.loads(capsys.readouterr().out)["code"]
        with driver.here():
            assert self.run(code, "--address", worker.address) == 0

    @pytest.mark.parametrize("argv", [[], ["code", "--list"], ["--address", "x:y", "monarch1-x"]], ids=" ".join)
    def test_usage(self, argv: list[str]) -> None:
        assert self.run(*argv) == 2
