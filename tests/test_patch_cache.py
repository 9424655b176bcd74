"""The worker's cache of patch tensors: what leaves it, what stays, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from monarch_split.distributed.codec import Kept, ProtocolError
from monarch_split.distributed.patch_cache import PatchCache
from monarch_split.distributed.recipe import tensor_digest


def test_the_oldest_go_first_and_never_those_in_use() -> None:
    tensors = {tensor_digest(tensor): tensor for tensor in (torch.full((100,), float(n)) for n in range(4))}
    names = list(tensors)
    cache = PatchCache(max_bytes=800)
    for name in names[:2]:
        assert cache.missing({"patch": Kept(name)}) == [name]
        cache.add({name: tensors[name]}, {name})
    tree: dict[str, Any] = {"a": [Kept(names[0])], "b": (Kept(names[2]), {"c": Kept(names[3])})}
    assert cache.missing(tree) == names[2:]
    for name in names[2:]:
        cache.add({name: tensors[name]}, set(names[2:]))
    filled = cache.fill(tree)
    assert filled["a"][0] is tensors[names[0]]
    assert filled["b"][1]["c"] is tensors[names[3]]
    assert cache.missing({"patch": Kept(names[1])}) == [names[1]]


def test_a_tensor_that_is_not_what_its_name_says_is_refused() -> None:
    cache = PatchCache(max_bytes=1000)
    digest = tensor_digest(torch.ones(3))
    assert cache.missing({"patch": Kept(digest)}) == [digest]
    for wrong in (torch.zeros(3), torch.ones(3, dtype=torch.float64), torch.ones(1, 3)):
        with pytest.raises(ProtocolError):
            cache.add({digest: wrong}, {digest})
    with pytest.raises(ProtocolError):
        cache.add({digest: torch.ones(3)}, set())
    assert cache.missing({"patch": Kept(digest)}) == [digest]
