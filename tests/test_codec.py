"""Messages survive the frames bit for bit, what cannot travel is named, and no frames from a stranger do harm.

Hostile frames must end in ProtocolError, without an allocation over the limit.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_split.distributed import limits
from monarch_split.distributed.codec import (
    DTYPES,
    Kept,
    NotPlainData,
    PartialMessage,
    ProtocolError,
    encode,
    pack_plain,
    replace_kept,
    tensor_bytes,
)
from monarch_split.distributed.messages import FROM_DRIVER, Kind, Message


def frame(data: Any) -> memoryview:
    """`data` as a frame of libzmq's: writable, and no better aligned than its frames are."""
    return memoryview(bytearray(8) + data)[8:]


def send(body: dict[str, Any]) -> dict[str, Any]:
    """`body` as it arrives, its chunks last ones first."""
    encoded = encode(Message(Kind.FORWARD, 7, body))
    partial = PartialMessage([frame(data) for data in encoded.control], FROM_DRIVER)
    for index, view in encoded.chunked:
        for offset in reversed(range(0, view.nbytes, limits.CHUNK_BYTES)):
            assert not partial.complete
            partial.add_chunk(index, offset, view[offset : offset + limits.CHUNK_BYTES])
    assert partial.complete
    message = partial.message()
    assert (message.kind, message.number) == (Kind.FORWARD, 7)
    return message.body


# --- what travels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize("size", [16, 1 << 18, 2 << 20], ids=["small", "inline", "chunked"])
def test_every_dtype_arrives_bit_for_bit(name: str, size: int) -> None:
    raw = torch.arange(size, dtype=torch.int64).mul(2654435761).to(torch.uint8)
    tensor = raw.view(DTYPES[name])
    received = send({"x": tensor})["x"]
    assert received.dtype is DTYPES[name]
    assert received.shape == tensor.shape
    assert received.data_ptr() % received.dtype.itemsize == 0
    assert torch.equal(received.view(torch.uint8), raw)


def test_every_dtype_that_models_use_is_known() -> None:
    used = "bfloat16 float16 float32 float64 float8_e4m3fn float8_e5m2 float8_e8m0fnu float4_e2m1fn_x2 bool uint8 int8 "
    used += "int32 int64 complex64 complex32 uint4 int4 uint1"
    assert {name for name in used.split() if hasattr(torch, name)} <= set(DTYPES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 5), (1,), (1, 1, 1)], ids=str)
def test_scalars_and_empty_tensors_keep_shape_and_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    received = send({"x": torch.ones(shape).to(dtype)})["x"]
    assert (received.dtype, tuple(received.shape)) == (dtype, shape)
    assert bool((received.to(torch.complex64) == 1).all())


def test_nan_payloads_and_negative_zero_are_not_normalised() -> None:
    bits = torch.tensor([0x7FC00001, 0x7F800001, -0x3FFFFF, -0x80000000], dtype=torch.int32)
    assert torch.equal(send({"x": bits.view(torch.float32)})["x"].view(torch.int32), bits)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[:, ::3],
        lambda t: t[1:2, 2:3],
        lambda t: t.as_strided((1,), (3,)),
        lambda t: t[:1].expand(5, -1),
        lambda t: t.flip(0)[3:],
        lambda t: torch.nn.Parameter(t.clone()),
    ],
    ids=["transposed", "stepped", "one_element", "one_element_strided", "expanded", "offset", "parameter"],
)
def test_views_arrive_as_what_they_show(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensor = view(torch.arange(60.0).reshape(6, 10))
    assert torch.equal(send({"x": tensor})["x"], tensor.detach())


def test_lazy_conjugates_and_negatives_arrive_resolved() -> None:
    z = torch.complex(torch.randn(4, 5), torch.randn(4, 5))
    for tensor in (z.conj(), z.conj().imag, z.conj()[:, ::2], z.t().conj()):
        received = send({"x": tensor})["x"]
        assert torch.equal(received, tensor)
        assert not received.is_conj()
        assert not received.is_neg()


def test_contiguous_cpu_tensors_are_not_copied() -> None:
    tensor = torch.zeros(100)
    view = tensor_bytes(tensor)
    tensor[0] = 1.0
    assert bytes(view[:4]) == struct.pack("<f", 1.0)


def test_nested_plain_data_keeps_its_types() -> None:
    body = {
        "tuple": (1, (2.5, [None, True]), ()),
        "size": torch.Size([2, 0, 3]),
        "dtypes": [torch.bfloat16, torch.float8_e5m2],
        "keys": {1: "a", (2, "b"): [3], None: 4, False: 5, 2.5: torch.float16},
        "tilde": {"~t": 0, "~": {"~u": []}, "plain": 1},
        "one_tilde": {"~t": 3},
        "kept": [Kept(3), Kept("digest")],
        "text": "é\ud800\0",
        "empty": [{}, [], ""],
        "big": 1 << 70,
    }
    received = send(body)
    assert received == body
    assert type(received["size"]) is torch.Size
    assert type(received["tuple"]) is tuple


def test_infinities_and_nan_arrive() -> None:
    received = send({"x": [math.inf, -math.inf, math.nan, -0.0, 5e-324]})["x"]
    assert received[:2] == [math.inf, -math.inf]
    assert math.isnan(received[2])
    assert math.copysign(1, received[3]) == -1
    assert received[4] == 5e-324


_leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
_keys = st.text(max_size=3) | st.sampled_from(["~", "~t", "~d", "~u", "~k"]) | st.integers() | st.tuples(st.integers())
_trees = st.recursive(
    _leaves,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(_keys, inner, max_size=3) | st.lists(inner, max_size=3).map(tuple)
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(_trees)
def test_any_tree_of_plain_data_arrives_equal(tree: Any) -> None:
    received = send({"tree": tree})["tree"]
    assert received == tree
    assert repr(received) == repr(tree)


def test_kept_names_are_replaced_by_what_is_held() -> None:
    held = torch.ones(1)
    tree = replace_kept({"a": (Kept(1), [Kept(1)]), "b": 2}, {1: held})
    assert tree["a"][0] is held
    assert tree["a"][1][0] is held
    with pytest.raises(ProtocolError, match="'x'"):
        replace_kept([Kept("x")], {1: held})


# --- what does not ----------------------------------------------------------------------------------------------------


class _Subclass(torch.Tensor):
    pass


def _too_deep() -> list:
    tree: list = []
    for _ in range(limits.MAX_TREE_DEPTH + 5):
        tree = [tree]
    return tree


def _cycle() -> dict[str, Any]:
    tree: dict[str, Any] = {}
    tree["again"] = tree
    return tree


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {1, 2},
        b"bytes",
        1j,
        print,
        torch.device("cpu"),
        torch.zeros(2).as_subclass(_Subclass),
        torch.eye(3).to_sparse(),
        torch.empty(3, device="meta"),
        torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
        torch.empty(3, dtype=torch.bits8),
        torch.quint8,
        _too_deep(),
        _cycle(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_travel_is_refused_with_its_path(value: Any) -> None:
    with pytest.raises(NotPlainData) as caught:
        encode(Message(Kind.FORWARD, 1, {"a": [0, {"b": value}]}))
    assert caught.value.path.startswith("forward.a[1].b")
    assert "a[1].b" in str(caught.value)
    assert len(str(caught.value)) < 600


def test_the_path_names_other_keys_too() -> None:
    with pytest.raises(NotPlainData) as caught:
        pack_plain({(1, 2): {"x": (object(),)}}, "options")
    assert caught.value.path == "options[(1, 2)].x[0]"


def test_as_deep_as_may_be_sent_may_be_received() -> None:
    tree: Any = 1
    for _ in range(limits.MAX_TREE_DEPTH - 1):
        tree = (tree,)
    assert send({"x": tree})["x"] == tree
    with pytest.raises(NotPlainData):
        encode(Message(Kind.FORWARD, 1, {"x": (tree,)}))


@pytest.mark.parametrize(
    ("limit", "value"), [("MAX_HEADER_BYTES", 10), ("MAX_TENSORS", 1), ("MAX_MESSAGE_BYTES", 30)], ids=str
)
def test_a_message_over_a_limit_is_not_sent(monkeypatch: pytest.MonkeyPatch, limit: str, value: int) -> None:
    monkeypatch.setattr(limits, limit, value)
    with pytest.raises(ValueError, match="too large to send"):
        encode(Message(Kind.FORWARD, 1, {"x": [torch.zeros(4), torch.zeros(4)]}))
