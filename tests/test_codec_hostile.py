"""Frames from someone who means harm: always ProtocolError, never another exception or an allocation over the limit."""

from __future__ import annotations

import json
import random
import struct
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from monarch_split.distributed import limits
from monarch_split.distributed.codec import PartialMessage, ProtocolError, chunk_prefix, encode, parse_chunk_prefix
from monarch_split.distributed.messages import FROM_DRIVER, Kind, Message

BIG = limits.INLINE_BYTES + 4
TERABYTE = 1 << 40
MAX_ALLOCATED = 2 << 20


@pytest.fixture(autouse=True)
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes that torch.empty was asked for; one over MAX_ALLOCATED fails the test before it is made."""
    sizes: list[int] = []
    stock = torch.empty

    def empty(size: Any, **options: Any) -> torch.Tensor:
        count = size if isinstance(size, int) else torch.Size(size).numel()
        sizes.append(count * options["dtype"].itemsize)
        assert sizes[-1] <= MAX_ALLOCATED
        return stock(size, **options)

    monkeypatch.setattr(torch, "empty", empty)
    return sizes


PREFIX = struct.Struct("<4sBBHIQ")


def frames(header: Any, *inline: bytes, kind: int = Kind.FORWARD, magic: bytes = b"MNRC", version: int = 1) -> list:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    prefix = PREFIX.pack(magic, version, kind, 0, len(text), 1)
    return [memoryview(prefix + text), *map(memoryview, inline)]


def header(*tensors: Any, body: Any = None) -> dict[str, Any]:
    return {"b": {} if body is None else body, "t": list(tensors)}


def read(incoming: list[memoryview], max_bytes: int = MAX_ALLOCATED) -> Message:
    return PartialMessage(incoming, FROM_DRIVER, max_bytes).message()


def _deep(opening: str, closing: str, depth: int) -> bytes:
    return f'{{"t":[],"b":{opening * depth}{closing * depth}}}'.encode()


def test_the_frames_these_tests_damage_are_good() -> None:
    assert read(frames(header(["float32", [2], 8, 1], body={"x": {"~t": 0}}), bytes(8))).body["x"].tolist() == [0, 0]


@pytest.mark.parametrize(
    "incoming",
    [
        frames(header(), magic=b"HTTP"),
        frames(header(), version=2),
        frames(header(), kind=255),
        frames(header(), kind=Kind.RESULT),
        [memoryview(b"")],
        [memoryview(b"MNRC")],
        [memoryview(bytes(frames(header())[0]) + b" ")],
        [frames(header())[0][:-1]],
        frames(b"not json"),
        frames(b"\xff\xfe\x00"),
        frames(b"[]"),
        frames(b"7" * 5000),
        frames(b'{"b":' + b"7" * 5000 + b',"t":[]}'),
        frames(b'{"b":{},"t":[]} {}'),
        frames(_deep("[", "]", 100_000)),
        frames(_deep("[", "]", 200)),
        frames(_deep('{"a":', "}", 200).replace(b":}", b":1}")),
        frames({"b": {}}),
        frames({"b": {}, "t": {}}),
        frames({"b": {}, "t": [[]] * (limits.MAX_TENSORS + 1)}),
        frames(header(body=[])),
    ],
)
def test_a_malformed_header_is_refused(incoming: list[memoryview]) -> None:
    with pytest.raises(ProtocolError):
        read(incoming)


@pytest.mark.parametrize(
    "spec",
    [
        ["float32", [TERABYTE], 4 * TERABYTE, 0],
        ["float32", [TERABYTE], 8, 1],
        ["float32", [2], TERABYTE, 0],
        ["float32", [1 << 47, 1 << 47, 1 << 47], 0, 1],
        ["uint8", [limits.MAX_MESSAGE_BYTES], limits.MAX_MESSAGE_BYTES, 0],
        ["uint8", [MAX_ALLOCATED + 1], MAX_ALLOCATED + 1, 0],
        ["float32", [0, 1 << 47, 1 << 47], 0, 1],
        ["float32", [2], 7, 1],
        ["float32", [3], 8, 1],
        ["float32", [-2], 8, 1],
        ["float32", [2.0], 8, 1],
        ["float32", [True, 2], 8, 1],
        ["float32", [2], -8, 1],
        ["float32", "2", 8, 1],
        ["float32", [1] * 17 + [2], 8, 1],
        ["float32", [2], 8, 0],
        ["uint8", [BIG], BIG, 1],
        ["object", [2], 8, 1],
        ["qint8", [8], 8, 1],
        [["float32"], [2], 8, 1],
        ["float32", [2], 8],
        {"dtype": "float32"},
        None,
    ],
    ids=str,
)
def test_a_tensor_that_cannot_be_is_refused_before_it_is_allocated(spec: Any, allocated: list[int]) -> None:
    with pytest.raises(ProtocolError):
        read(frames(header(spec), bytes(8)))
    assert sum(allocated) <= MAX_ALLOCATED


def test_many_tensors_may_not_exceed_together_what_one_may_not(allocated: list[int]) -> None:
    half = MAX_ALLOCATED // 2 + 1
    with pytest.raises(ProtocolError, match="larger than allowed"):
        read(frames(header(["uint8", [half], half, 0], ["uint8", [half], half, 0])))
    assert allocated == []


def test_memory_that_is_not_there_is_the_senders_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "empty", no_memory)
    with pytest.raises(ProtocolError, match="cannot be made"):
        read(frames(header(["uint8", [BIG], BIG, 0])))


@pytest.mark.parametrize("inline", [[], [bytes(7)], [bytes(9)], [bytes(8), b""], [bytes(8), bytes(8)]], ids=len)
def test_frames_that_do_not_match_the_header_are_refused(inline: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        read(frames(header(["float32", [2], 8, 1]), *inline))


@pytest.mark.parametrize(
    "value",
    [
        {"~t": 0},
        {"~t": -1},
        {"~t": True},
        {"~t": "0"},
        {"~k": None},
        {"~k": [1]},
        {"~y": "object"},
        {"~y": []},
        {"~z": 3},
        {"~z": [-1]},
        {"~z": ["1"]},
        {"~u": {"a": 1}},
        {"~d": 5},
        {"~d": [[1]]},
        {"~d": [[1, 2, 3]]},
        {"~d": [[[1], 2]]},
        {"~d": [[{"a": 1}, 2]]},
        {"~x": 1},
        {"~": 1},
    ],
    ids=str,
)
def test_bad_tags_are_refused(value: Any) -> None:
    with pytest.raises(ProtocolError):
        read(frames(header(body={"x": [value]})))


# --- chunks -----------------------------------------------------------------------------------------------------------


def _partial(nbytes: int) -> PartialMessage:
    return PartialMessage(frames(header(["uint8", [4], 4, 1], ["uint8", [nbytes], nbytes, 0]), bytes(4)), FROM_DRIVER)


@pytest.mark.parametrize(
    ("index", "offset", "length"),
    [
        (0, 0, 4),
        (2, 0, 10),
        (1, 1, 10),
        (1, limits.CHUNK_BYTES, BIG),
        (1, 1 << 63, 1),
        (1, 0, 0),
        (1, 0, BIG - 1),
        (1, 0, BIG + 1),
    ],
)
def test_a_chunk_that_does_not_fit_is_refused(index: int, offset: int, length: int) -> None:
    with pytest.raises(ProtocolError):
        _partial(BIG).add_chunk(index, offset, memoryview(bytes(length)))


def test_a_chunk_that_comes_twice_is_refused_and_completes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CHUNK_BYTES", BIG // 2)
    partial = _partial(BIG)
    partial.add_chunk(1, 0, memoryview(bytes(BIG // 2)))
    with pytest.raises(ProtocolError):
        partial.add_chunk(1, 0, memoryview(bytes(BIG // 2)))
    assert not partial.complete


def test_chunk_prefixes_say_what_they_said() -> None:
    assert parse_chunk_prefix(memoryview(chunk_prefix(3, 70_000, 1 << 40))) == (3, 70_000, 1 << 40)
    good = chunk_prefix(1, 2, 3)
    for bad in (b"", good[:-1], good + b"x", b"HTTP" + good[4:], good[:4] + b"\x02" + good[5:]):
        with pytest.raises(ProtocolError):
            parse_chunk_prefix(memoryview(bad))


# --- anything ---------------------------------------------------------------------------------------------------------

_fuzz = settings(
    max_examples=600, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def _survives(incoming: list[bytes]) -> None:
    try:
        partial = PartialMessage([memoryview(frame) for frame in incoming], FROM_DRIVER, MAX_ALLOCATED)
        if partial.complete:
            partial.message()
    except ProtocolError:
        pass


def _good_frames() -> list[bytes]:
    body = {"a": (1, [torch.zeros(3), {2: torch.float16}]), "b": torch.ones(2, 2, dtype=torch.bfloat16), "c": {"~t": 9}}
    return [bytes(frame) for frame in encode(Message(Kind.FORWARD, 1, body)).control]


@_fuzz
@given(st.lists(st.binary(max_size=60), min_size=1, max_size=4))
def test_random_frames_are_refused(incoming: list[bytes]) -> None:
    _survives(incoming)
    _survives([PREFIX.pack(b"MNRC", 1, Kind.FORWARD, 0, len(incoming[0]), 1) + incoming[0], *incoming[1:]])


def test_mutated_frames_are_refused_or_harmless() -> None:
    for seed in range(4000):
        chance = random.Random(seed)
        incoming = [bytearray(frame) for frame in _good_frames()]
        for _ in range(chance.randint(1, 4)):
            frame = chance.choice(incoming)
            position = chance.randrange(len(frame) + 1)
            match chance.randrange(4):
                case 0 if position < len(frame):
                    frame[position] ^= chance.randint(1, 255)
                case 1:
                    del frame[position : position + chance.randint(1, 20)]
                case 2:
                    frame[position:position] = chance.randbytes(8)
                case _:
                    frame[position:position] = b"9" * chance.randint(1, 30)
        if chance.random() < 0.7 and len(incoming[0]) >= PREFIX.size:
            # Magic and length that are right let the damage through to what is behind them.
            PREFIX.pack_into(incoming[0], 0, b"MNRC", 1, Kind.FORWARD, 0, len(incoming[0]) - PREFIX.size, 1)
        try:
            _survives([bytes(frame) for frame in incoming])
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["float32", "uint8", ""]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["~t", "~k", "~y", "~z", "~u", "~d", "a", ""]), inner, max_size=2)
    ),
    max_leaves=8,
)


@_fuzz
@given(_json, st.lists(_json, max_size=3), st.lists(st.binary(max_size=8), max_size=3))
def test_any_json_is_refused_or_harmless(body: Any, specs: list[Any], inline: list[bytes]) -> None:
    _survives([bytes(frame) for frame in frames({"b": {"x": body}, "t": specs}, *inline)])
