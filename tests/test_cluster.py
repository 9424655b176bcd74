"""The configuration file: what is in it is used, a mistake in it is named with the file, and none means no workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from monarch_split.distributed import limits
from monarch_split.distributed.addresses import Address, AddressError, parse_address
from monarch_split.distributed.auth import KeyPair, Paired, Pairings
from monarch_split.distributed.cluster import ConfigurationError, configuration_file, load_configuration


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MONARCH_CONFIG_DIR", str(tmp_path))
    return tmp_path / "monarch.toml"


GOOD = """
default = "pair"

[clusters.pair]
workers = ["10.0.0.2", "spark-2.local:7777", "[fe80::1]:99"]
allow_version_mismatch = true

[clusters."no workers"]
workers = []
"""


def test_a_file_is_read_from_the_configuration_folder(file: Path) -> None:
    file.write_text(GOOD)
    assert configuration_file() == file
    configuration = load_configuration()
    assert configuration.exists
    cluster = configuration.cluster()
    assert cluster.workers == (
        Address("10.0.0.2", limits.DEFAULT_PORT),
        Address("spark-2.local", 7777),
        Address("fe80::1", 99),
    )
    assert cluster.allow_version_mismatch
    file.write_text(GOOD.replace('"pair"', '"no workers"'))
    assert load_configuration().cluster().workers == ()


def test_no_file_means_no_workers(file: Path) -> None:
    configuration = load_configuration()
    assert not configuration.exists
    assert configuration.path == file
    assert configuration.cluster().workers == ()


def test_paired_workers_are_used_where_the_file_lists_none(file: Path) -> None:
    assert load_configuration().cluster().workers == ()
    first, second = Address("10.0.0.2", 7690), Address("10.0.1.2", 7690)
    Pairings.add_worker(Paired("spark-2", KeyPair.new().public, (first, second)))
    assert load_configuration().cluster().workers == (first,)
    file.write_text("[clusters.default]\ntrusted_link = true")
    cluster = load_configuration().cluster()
    assert cluster.workers == (first,)
    assert cluster.trusted_link
    file.write_text("[clusters.default]\nworkers = []")
    assert load_configuration().cluster().workers == ()


@pytest.mark.parametrize(("for_all", "trusted"), [("true", [True, False, True]), ("false", [False, False, True])])
def test_a_worker_s_own_link_is_trusted_or_not_whatever_is_said_of_all(
    file: Path, for_all: str, trusted: list[bool]
) -> None:
    file.write_text(
        "[clusters.default]\n"
        f"trusted_link = {for_all}\n"
        "workers = [\n"
        '  "10.0.0.2",\n'
        '  { address = "10.0.0.3", trusted_link = false },\n'
        '  { address = "10.0.0.4:7777", trusted_link = true },\n'
        "]\n"
    )
    cluster = load_configuration().cluster()
    assert [str(worker) for worker in cluster.workers] == ["10.0.0.2:7690", "10.0.0.3:7690", "10.0.0.4:7777"]
    assert [cluster.trusts(worker) for worker in cluster.workers] == trusted
    # Of a worker that the list does not name, what is said of all holds.
    assert cluster.trusts(Address("10.0.0.9", 7690)) is (for_all == "true")


def test_a_file_with_a_windows_signature_is_read(file: Path) -> None:
    file.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert len(load_configuration().cluster().workers) == 3


def test_a_cluster_that_is_not_there_is_an_error_that_names_those_that_are(file: Path) -> None:
    file.write_text(GOOD.replace('"pair"', '"trio"'))
    with pytest.raises(ConfigurationError, match=r"no cluster 'trio' \(it has: pair, no workers\)") as caught:
        load_configuration().cluster()
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[clusters.a]\nworkers = [", r"not valid TOML: .*\(at "),
        ("[clusters]\na = 3", "needs a list"),
        ('[clusters.a]\nworkers = "10.0.0.2"', "needs a list"),
        ("[clusters.a]\nworkers = [7690]", "7690 is not an address"),
        ('[clusters.a]\nworkers = ["x:y"]', "'x:y' is not an address"),
        ("[clusters.a]\nworkers = []\nworker = 1", r"unknown settings: worker \(it may have: .*trusted_link.*workers"),
        ('[clusters.a]\nworkers = []\nallow_version_mismatch = "yes"', "true or false"),
        ('[clusters.a]\nworkers = []\nprefer = "fast"', 'one of "exact", "speed"'),
        ("[clusters.a]\nworkers = []\ncompress = true", 'one of "off", "fp8"'),
        (
            '[cluster.default]\nworkers = ["10.0.0.2"]',
            r"has unknown settings: cluster \(it may have: clusters, default; a cluster is a table \[clusters\.<name>",
        ),
        (
            '[[clusters.a.workers]]\naddress = "h"\ntrusted = true',
            r"a worker of cluster 'a' has unknown settings: trusted \(it may have: address, trusted_link\)",
        ),
        ("[[clusters.a.workers]]\ntrusted_link = true", "needs an address"),
        ('[[clusters.a.workers]]\naddress = "h"\ntrusted_link = "yes"', "worker h:7690 is true or false"),
        ('[[clusters.a.workers]]\naddress = "x:y"', "'x:y' is not an address"),
        ("default = 3", "is a name"),
        ("clusters = 3", "a table"),
    ],
)
def test_a_mistake_is_named_with_its_file(file: Path, text: str, match: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=match) as caught:
        load_configuration()
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_an_error(file: Path) -> None:
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_configuration()
    file.unlink()
    file.mkdir()
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_configuration()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("host", Address("host", 7690)),
        (" host:1 ", Address("host", 1)),
        ("10.0.0.2:65535", Address("10.0.0.2", 65535)),
        ("::1", Address("::1", 7690)),
        ("[::1]", Address("::1", 7690)),
        ("[::1]:80", Address("::1", 80)),
        ("fe80::1%eth0", Address("fe80::1%eth0", 7690)),
    ],
)
def test_addresses_are_read(text: str, expected: Address) -> None:
    assert parse_address(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *[
            "",
            " ",
            ":",
            ":80",
            "host:",
            "host:0",
            "host:65536",
            "host:-1",
            "host:8o",
            "host:" + "9" * 5000,
            "host:²",
            "a b",
        ],
        *[
            "http://host:80",
            "tcp://host",
            "a:b:c",
            "1.2.3.4:80:90",
            "[::1]:x",
            "[]:80",
            "host/path",
            None,
            7690,
            ["host"],
        ],
    ],
    ids=lambda value: repr(value)[:20],
)
def test_what_is_not_an_address_is_refused(text: object) -> None:
    with pytest.raises(AddressError, match="is not an address"):
        parse_address(text)


@pytest.mark.parametrize("address", [Address("10.0.0.2", 1), Address("::1", 80), Address("worker.lan", 7690)], ids=str)
def test_an_address_as_text_is_read_back_as_the_same(address: Address) -> None:
    assert parse_address(str(address)) == address
