"""Memory for what arrives is used again, but never while anybody still looks at what is in it."""

from __future__ import annotations

import gc

import pytest
import torch

from monarch_split.distributed import limits
from monarch_split.distributed.receive_buffers import ReceiveBuffers

MIB = limits.MIB


def test_a_block_is_used_again_once_its_tensor_is_gone() -> None:
    buffers = ReceiveBuffers()
    first = buffers.take(4 * MIB)
    address = first.data_ptr()
    del first
    assert buffers.take(3 * MIB).data_ptr() == address


@pytest.mark.parametrize(
    "keep",
    [
        lambda t: t.view(torch.float32).reshape(2, -1)[1:],
        lambda t: t.numpy()[5:],
        lambda t: memoryview(t.numpy())[7:],
        lambda t: torch.nn.Parameter(t.view(torch.float32)),
        lambda t: t.untyped_storage(),
    ],
    ids=["view", "array", "memory", "parameter", "storage"],
)
def test_a_block_is_not_used_again_while_anything_shares_its_memory(keep) -> None:
    buffers = ReceiveBuffers()
    tensor = buffers.take(4 * MIB)
    address = tensor.data_ptr()
    held = keep(tensor)
    del tensor
    gc.collect()
    other = buffers.take(4 * MIB)
    assert other.data_ptr() != address
    del held
    gc.collect()
    assert buffers.take(4 * MIB).data_ptr() == address


def test_a_small_tensor_does_not_keep_a_large_block() -> None:
    buffers = ReceiveBuffers()
    large = buffers.take(64 * MIB)
    address = large.data_ptr()
    del large
    small = buffers.take(1 * MIB)
    assert small.data_ptr() != address
    assert buffers.take(64 * MIB).data_ptr() == address


def test_what_nobody_uses_is_kept_up_to_a_limit() -> None:
    buffers = ReceiveBuffers(keep_bytes=10 * MIB)
    tensors = [buffers.take(4 * MIB) for _ in range(5)]
    addresses = {tensor.data_ptr() for tensor in tensors}
    del tensors
    gc.collect()
    assert sum(block.nbytes for block in buffers._free) == 8 * MIB
    assert {buffers.take(4 * MIB).data_ptr(), buffers.take(4 * MIB).data_ptr()} <= addresses


def test_tensors_outlive_the_channel_they_came_over() -> None:
    buffers = ReceiveBuffers()
    tensor = buffers.take(MIB).fill_(7)
    del buffers
    gc.collect()
    assert int(tensor.sum()) == 7 * MIB
