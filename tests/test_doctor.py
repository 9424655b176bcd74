"""`monarch doctor` names the step that fails and what to do about it, in every way that two machines do not meet."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_split import cli
from monarch_split.demo.reference_runtime import ReferenceRuntime
from monarch_split.demo.tiny_trial import reference_trial
from monarch_split.distributed import limits
from monarch_split.distributed.addresses import Address, local_addresses
from monarch_split.distributed.auth import KeyPair, Paired, Pairings, own_identity
from monarch_split.distributed.cluster import Cluster
from monarch_split.distributed.doctor import Check, Here, examine
from monarch_split.distributed.doctor.interfaces import interface, neighbour_answers, twin_of
from monarch_split.distributed.doctor.machine import Largest, enough_memory, models
from monarch_split.distributed.doctor.network import Way, interfaces
from monarch_split.distributed.doctor.worker import _link, _software
from monarch_split.distributed.link_rate import LinkRate
from monarch_split.distributed.peer import Peer
from monarch_split.distributed.versions import Versions, own_versions
from monarch_split.tests import two_machines
from monarch_split.tests.driving import forget, share_identity
from monarch_split.tests.worker_process import Forge, Worker, ended

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="workers run on Linux")


@pytest.fixture(autouse=True)
def configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The configuration file of this test, in a folder with the keys that the workers know."""
    share_identity(tmp_path)
    monkeypatch.setenv("MONARCH_CONFIG_DIR", str(tmp_path))
    monkeypatch.setattr(limits, "LINK_TEST_SECONDS", 0.05)
    forget(monkeypatch)
    return tmp_path / "monarch.toml"


@pytest.fixture
def examined(configuration: Path, tmp_path: Path) -> Callable[..., dict[str, Check]]:
    """examined(address, …) -> the doctor's checks by name, with these workers configured."""

    def run(*addresses: str, more: str = "") -> dict[str, Check]:
        configuration.write_text(f"[clusters.default]\nworkers = {json.dumps(addresses)}\n{more}")
        runtime = ReferenceRuntime()
        here = Here(runtime, lambda: reference_trial(runtime, tmp_path), without="in a test")
        return {check.name: check for check in examine(here)}

    return run


@pytest.fixture
def worker(forge: Forge) -> Iterator[Worker]:
    made = forge.worker("second")
    with ended(made):
        yield made


def failures(checks: dict[str, Check]) -> list[str]:
    return [name for name, check in checks.items() if not check.ok]


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = cli.main(["doctor", "--without-comfyui", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


class TestTheCommand:
    def test_all_right_is_exit_0_and_one_object(
        self, worker: Worker, configuration: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        configuration.write_text(f'[clusters.default]\nworkers = ["{worker.address}"]\n')
        code, said = as_json(capsys)
        assert code == 0
        assert set(said) == {"ok", "checks"}
        assert said["ok"] is True
        for check in said["checks"]:
            assert set(check) == {"name", "ok", "status", "detail", "fix"}
            assert check["ok"] is (check["status"] != "fail")
            assert check["detail"]
            assert bool(check["fix"]) is (check["status"] != "pass")
        status = {check["name"]: check["status"] for check in said["checks"]}
        steps = ("reach", "worker", "software", "memory", "link", "rows", "tokens")
        assert all(status[f"{step} {worker.address}"] == "pass" for step in steps), status
        # Without ComfyUI there is less to look at, and it says so.
        assert status["software"] == "warn"
        # The worker is free for a render at once.
        peer = Peer(Address("127.0.0.1", worker.port), lambda: None)
        peer.connect(own_versions(None), allow_mismatch=False)
        peer.close(cancel=False)

    def test_a_person_reads_the_fix_below_and_the_verdict_last(
        self, configuration: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = "{}:{}".format(*server.getsockname())
        configuration.write_text(f'[clusters.default]\nworkers = ["{address}"]\n')
        assert cli.main(["doctor", "--without-comfyui"]) == 1
        lines = capsys.readouterr().out.splitlines()
        at = next(number for number, line in enumerate(lines) if line.startswith("fail"))
        assert f"reach {address}" in lines[at]
        assert "fix: start the worker there" in lines[at + 1]
        assert lines[-1] == f"Not ready: reach {address}."

    def test_no_worker_is_a_finding(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, said = as_json(capsys)
        assert code == 1
        assert said["ok"] is False
        check = said["checks"][0]
        assert "no worker is configured" in check["detail"]
        assert "monarch pair" in check["fix"]

    def test_unknown_flags_are_usage(self) -> None:
        assert cli.main(["doctor", "--no-such-flag"]) == 2


class TestThisMachine:
    def test_a_broken_file_is_named_with_the_line(
        self, configuration: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        configuration.write_text("[clusters.default]\nworkers = [")
        code, said = as_json(capsys)
        assert code == 1
        check = said["checks"][0]
        assert (check["name"], check["status"]) == ("configuration", "fail")
        assert str(configuration) in check["detail"]
        assert "line 2" in check["detail"] or "end of document" in check["detail"]

    def test_a_key_that_others_can_read_is_a_finding(self, examined: Callable[..., Any], tmp_path: Path) -> None:
        (tmp_path / "identity.json").chmod(0o644)
        check = examined()["keys"]
        assert not check.ok
        assert check.fix == f"make it private with: chmod 600 {tmp_path / 'identity.json'}"

    def test_a_comfyui_that_cannot_be_imported_is_a_finding(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "comfyui" / "comfy").mkdir(parents=True)
        (tmp_path / "comfyui" / "main.py").touch()
        (tmp_path / "comfyui" / "comfyui_version.py").write_text('__version__ = "0.33.0"\n')
        (tmp_path / "comfyui" / "comfy" / "options.py").write_text("raise RuntimeError('torn')\n")
        monkeypatch.setattr("monarch_split.cli.doctor._NEEDS", ("torch", "zmq"))
        monkeypatch.setattr("sys.path", list(__import__("sys").path))
        code = cli.main(["doctor", "--json", "--comfyui", str(tmp_path / "comfyui")])
        check = next(each for each in json.loads(capsys.readouterr().out)["checks"] if each["name"] == "software")
        assert code == 1
        assert check["status"] == "fail"
        assert "torn" in check["detail"]

    def test_the_largest_model_that_can_be_split_is_found(self, tmp_path: Path) -> None:
        folder = tmp_path / "models"
        (folder / "below").mkdir(parents=True)
        for name, size in (("small.safetensors", 10), ("below/large.safetensors", 3000), ("large.ckpt", 9000)):
            (folder / name).write_bytes(bytes(size))
        largest: list[Largest] = []
        runtime = ReferenceRuntime()
        here = Here(runtime, lambda: reference_trial(runtime, tmp_path), model_folders=[folder, tmp_path / "none"])
        (check,) = models(here, largest)
        assert check.status == "pass"
        assert largest == [Largest("large.safetensors", 3000)]

        (folder / "gone.safetensors").symlink_to(tmp_path / "nowhere")
        check = next(iter(models(here, largest)))
        assert check.status == "warn"
        assert "gone.safetensors" in check.detail

    def test_memory_that_a_gpu_shares_has_to_hold_the_largest_model(self) -> None:
        largest = [Largest("wan.safetensors", 28_600_000_000)]
        there = {"unified": "yes"}
        assert enough_memory("m", 100_000_000_000, there, largest, "w").status == "pass"
        check = enough_memory("m", 20_000_000_000, there, largest, "w")
        assert check.status == "warn"
        assert "20.0 GB are free on w" in check.detail
        assert "wan.safetensors (28.6 GB)" in check.detail
        # A GPU with memory of its own does not.
        assert enough_memory("m", 20_000_000_000, {}, largest, "w").status == "pass"
        assert enough_memory("m", 2_000_000_000, {}, [], "w").status == "warn"


class TestTheWay:
    def test_nothing_listens(self, examined: Callable[..., Any]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = "{}:{}".format(*server.getsockname())
        checks = examined(address)
        assert failures(checks) == [f"reach {address}"]
        assert "nothing listens at port" in checks[f"reach {address}"].detail
        assert checks[f"reach {address}"].fix.startswith("start the worker there")

    def test_silence_is_told_from_a_port_that_refuses(
        self, examined: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(limits, "CONNECT_TIMEOUT", 0.5)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(0)
            address = "{}:{}".format(*listener.getsockname())
            # Its queue is full, so the system lets new connections wait without a word, as a firewall does.
            fill = [socket.socket() for _ in range(4)]
            for sock in fill:
                sock.setblocking(False)
                sock.connect_ex(listener.getsockname())
            time.sleep(0.1)
            began = time.monotonic()
            checks = examined(address)
            assert time.monotonic() - began < limits.CONNECT_TIMEOUT + 10
            for sock in fill:
                sock.close()
        assert failures(checks) == [f"reach {address}"]
        assert "nothing answers" in checks[f"reach {address}"].detail

    def test_silence_of_a_machine_that_is_there_is_a_firewall(self, tmp_path: Path) -> None:
        table = tmp_path / "arp"
        table.write_text(
            "IP address       HW type     Flags       HW address            Mask     Device\n"
            "192.168.100.2    0x1         0x2         4c:bb:47:00:00:01     *        enp1s0f0np0\n"
            "192.168.100.3    0x1         0x0         00:00:00:00:00:00     *        enp1s0f0np0\n"
        )
        assert neighbour_answers("192.168.100.2", table) is True
        assert neighbour_answers("192.168.100.3", table) is False
        assert neighbour_answers("192.168.100.20", table) is None
        assert neighbour_answers("192.168.100.2", tmp_path / "none") is None

    def test_each_way_in_which_another_machine_is_not_reached_has_its_own_fix(self) -> None:
        command = ["unshare", "--net", "--mount", sys.executable, str(Path(two_machines.__file__))]
        tools = all(map(shutil.which, ("unshare", "nsenter", "ip")))
        if not tools or subprocess.run([*command[:3], "true"], capture_output=True).returncode:
            pytest.skip("network namespaces are not permitted here")
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        seen = json.loads(done.stdout)
        last = {name: checks[-1] for name, checks in seen.items()}
        assert last["alike"]["status"] == "pass"
        assert "packets of 9000 bytes" in last["alike"]["detail"]
        assert last["small packets there"]["status"] == "warn"
        assert "only 1448 bytes get through" in last["small packets there"]["detail"]
        assert "start the worker there (monarch worker --listen 10.99.0.2)" in last["refused"]["fix"]
        assert "no machine on this network has that address" in last["nobody"]["detail"]
        assert "in the same subnet" in last["no way"]["fix"]
        assert "a firewall" in last["firewall"]["detail"]
        assert "7690 to 7692" in last["firewall"]["fix"]

    def test_an_unknown_name(self, examined: Callable[..., Any]) -> None:
        checks = examined("no-such-host.invalid:7690")
        assert "is not known here" in checks["reach no-such-host.invalid:7690"].detail

    def test_the_other_workers_are_looked_at_all_the_same(self, worker: Worker, examined: Callable[..., Any]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = "{}:{}".format(*server.getsockname())
        checks = examined(address, worker.address)
        assert failures(checks) == [f"reach {address}"]
        assert checks[f"tokens {worker.address}"].ok


class TestInterfaces:
    @pytest.fixture
    def sys_net(self, tmp_path: Path) -> Callable[..., Path]:
        """sys_net(name=(device, speed, mtu, state)) -> a folder like /sys/class/net."""

        def make(**found: tuple[str, str, int, str]) -> Path:
            net, bus = tmp_path / "net", tmp_path / "bus"
            for name, (device, speed, mtu, state) in found.items():
                (net / name).mkdir(parents=True)
                (bus / device).mkdir(parents=True)
                (tmp_path / "drivers" / "mlx5_core").mkdir(parents=True, exist_ok=True)
                (bus / device / "driver").symlink_to(tmp_path / "drivers" / "mlx5_core")
                (net / name / "device").symlink_to(bus / device)
                for file, text in (("speed", speed), ("mtu", str(mtu)), ("operstate", state)):
                    (net / name / file).write_text(f"{text}\n")
            return net

        return make

    def way(self, name: str, net: Path, segment: int = 0) -> Way:
        return Way(Address("192.168.100.2", 7690), "192.168.100.1", interface(name, net), segment)

    def test_small_packets_on_a_fast_link_are_named_with_the_command(self, sys_net: Callable[..., Path]) -> None:
        net = sys_net(enp1s0f0np0=("0000:01:00.0", "200000", 1500, "up"))
        (check,) = interfaces([self.way("enp1s0f0np0", net)], net)
        assert check.status == "warn"
        assert "200 Gb/s, packets of 1500 bytes" in check.detail
        assert "ip link set dev enp1s0f0np0 mtu 9000" in check.fix

    def test_an_mtu_that_only_this_side_has_is_noticed(self, sys_net: Callable[..., Path]) -> None:
        net = sys_net(enp1s0f0np0=("0000:01:00.0", "200000", 9000, "up"))
        (check,) = interfaces([self.way("enp1s0f0np0", net, segment=1448)], net)
        assert check.status == "warn"
        assert "only 1448 bytes get through" in check.detail
        (check,) = interfaces([self.way("enp1s0f0np0", net, segment=8948)], net)
        assert check.status == "pass"

    def test_an_unused_half_of_the_cable_is_named(self, sys_net: Callable[..., Path]) -> None:
        net = sys_net(
            enp1s0f0np0=("0000:01:00.0", "200000", 9000, "up"),
            enp1s0f1np1=("0000:01:00.1", "-1", 1500, "down"),
            enP2p1s0f0np0=("0002:01:00.0", "200000", 9000, "up"),
            enP2p1s0f1np1=("0002:01:00.1", "-1", 1500, "down"),
        )
        half = self.way("enp1s0f0np0", net)
        *_, check = interfaces([half], net)
        assert (check.name, check.status) == ("cable", "warn")
        assert "enP2p1s0f0np0" in check.detail
        assert "f1np1" not in check.detail

        *_, check = interfaces([half, self.way("enP2p1s0f0np0", net)], net)
        assert (check.name, check.status) == ("cable", "pass")
        other = twin_of(interface("enp1s0f1np1", net), net)
        assert other is not None
        assert not other.up

    def test_an_interface_without_a_cable_card_has_no_twin(self, sys_net: Callable[..., Path]) -> None:
        net = sys_net(enp5s0=("0000:05:00.0", "1000", 1500, "up"))
        (check,) = interfaces([self.way("enp5s0", net, segment=1448)], net)
        assert check.status == "pass"
        assert "1 Gb/s" in check.detail

    def test_a_tenth_of_what_the_interface_promises_is_a_finding(self, sys_net: Callable[..., Path]) -> None:
        net = sys_net(enp5s0=("0000:05:00.0", "10000", 9000, "up"))
        ways = [self.way("enp5s0", net)]
        slow = _link("link", LinkRate(0.0003, 2, 0.11e9, 0.117e9), ways)
        assert slow.status == "warn"
        assert "promise 1.25 GB/s" in slow.detail
        # The channel encrypts, so the cable is judged by plain TCP.
        assert _link("link", LinkRate(0.0003, 2, 0.25e9, 1.1e9), ways).status == "pass"
        assert _link("link", LinkRate(0.05, 2, 0.5e9, 1.1e9), ways).status == "warn"


class TestTheWorker:
    @pytest.mark.parametrize(
        ("changes", "status", "named"),
        [
            ({}, "pass", ["comfy-kitchen 0.2 (cuda, eager)", "NVIDIA GB10 with driver 580.95"]),
            ({"kitchen_backends": "eager"}, "warn", ["backends eager, this machine cuda, eager"]),
            ({"torch": "2.8.0"}, "warn", ["torch 2.8.0, this machine 2.9.0"]),
            ({"comfyui": "0.9.0", "comfyui_code": "def"}, "fail", ["0.9.0", "0.8.0"]),
            ({"comfyui": "", "comfyui_code": ""}, "fail", ["the built-in model only"]),
        ],
    )
    def test_what_differs_in_software_is_named_with_both_sides(
        self, tmp_path: Path, changes: dict[str, str], status: str, named: list[str]
    ) -> None:
        runtime = ReferenceRuntime()
        runtime.versions = Versions("0.1.0", "0.8.0", "abc", "2.9.0", "0.2", kitchen_backends="cuda, eager")
        peer = Peer(Address("127.0.0.1", 7690), lambda: None)
        peer.name, peer.device = "second", {"device": "NVIDIA GB10", "driver": "580.95"}
        peer.versions = dataclasses.replace(runtime.versions, **changes)
        here = Here(runtime, lambda: reference_trial(runtime, tmp_path))
        (check,) = _software("software", peer, Cluster("test"), here)
        assert check.status == status
        assert all(word in check.detail for word in named), check.detail
        (check,) = _software("software", peer, Cluster("test", allow_version_mismatch=True), here)
        assert check.ok or "built-in" in check.detail

    def test_another_program(self, examined: Callable[..., Any]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = "{}:{}".format(*server.getsockname())
            checks = examined(address)
        assert failures(checks) == [f"worker {address}"]
        assert checks[f"reach {address}"].ok
        assert "Monarch worker" in checks[f"worker {address}"].detail

    def test_a_worker_that_hangs(self, worker: Worker, examined: Callable[..., Any]) -> None:
        worker.freeze()
        checks = examined(worker.address)
        assert failures(checks) == [f"worker {worker.address}"]

    def test_a_worker_of_another_version(self, forge: Forge, examined: Callable[..., Any]) -> None:
        other = forge.worker("old", pack="0.0.1")
        with ended(other):
            check = examined(other.address)[f"software {other.address}"]
        assert not check.ok
        assert "0.0.1" in check.detail
        assert own_versions(None).pack in check.detail
        assert "install the same version" in check.fix

    def test_a_busy_worker(self, worker: Worker, examined: Callable[..., Any]) -> None:
        host, _, port = worker.address.rpartition(":")
        first = Peer(Address(host, int(port)), lambda: None)
        first.connect(own_versions(None), allow_mismatch=False)
        checks = examined(worker.address)
        first.close(cancel=False)
        assert failures(checks) == [f"worker {worker.address}"]
        assert "busy" in checks[f"worker {worker.address}"].detail

    def test_a_worker_that_does_not_know_this_machine(
        self, worker: Worker, examined: Callable[..., Any], tmp_path: Path
    ) -> None:
        Pairings.add_worker(Paired("second", own_identity().public, (Address("127.0.0.1", worker.port),)))
        (tmp_path / "identity.json").unlink()
        checks = examined(worker.address)
        assert failures(checks) == [f"worker {worker.address}"]
        assert "does not know this machine's key" in checks[f"worker {worker.address}"].detail
        assert "monarch pair" in checks[f"worker {worker.address}"].fix

    def test_a_worker_with_another_key_than_it_had(
        self, worker: Worker, examined: Callable[..., Any], tmp_path: Path
    ) -> None:
        Pairings.add_worker(Paired("second", KeyPair.new().public, (Address("127.0.0.1", worker.port),)))
        checks = examined(worker.address)
        assert failures(checks) == [f"worker {worker.address}"]
        assert "pair it anew" in checks[f"worker {worker.address}"].fix

    def test_an_address_that_is_not_paired(self, examined: Callable[..., Any]) -> None:
        own = local_addresses()
        if not own:
            pytest.skip("this machine has no address but the loopback")
        with socket.create_server((own[0][1], 0)) as server:
            address = f"{own[0][1]}:{server.getsockname()[1]}"
            checks = examined(address)
        assert failures(checks) == [f"pairing {address}"]
        assert "monarch pair" in checks[f"pairing {address}"].fix

    def test_a_worker_that_computes_something_else(self, worker: Worker, examined: Callable[..., Any]) -> None:
        worker.behave(noise=1)
        checks = examined(worker.address)
        assert f"rows {worker.address}" in failures(checks)
        assert "computes something else" in checks[f"rows {worker.address}"].detail

    def test_a_worker_that_fails_in_a_forward(self, worker: Worker, examined: Callable[..., Any]) -> None:
        worker.behave(error="out of memory")
        checks = examined(worker.address)
        assert failures(checks) == [f"rows {worker.address}", f"tokens {worker.address}"]
        assert "out of memory" in checks[f"rows {worker.address}"].detail
