"""Keys and values in fewer bytes: their error is that of their formats, the run says so, and garbage is refused."""

from __future__ import annotations

import os

import pytest
import torch

from monarch_split.demo.reference import ReferenceConfig, ReferenceDiT
from monarch_split.distributed import ledger
from monarch_split.distributed.compressed import Packing
from monarch_split.distributed.recipe import Recipe
from monarch_split.distributed.report import Report
from monarch_split.tests.driving import SAME, render
from monarch_split.tests.worker_process import Worker

FP8 = {"compress": "fp8"}


def _packed(k: torch.Tensor, v: torch.Tensor, group: int) -> tuple[Packing, torch.Tensor, torch.Tensor]:
    """(packing, k and v after the way there and back)"""
    packing = Packing.of(k, v, group)
    packed = torch.empty(len(k), packing.width, dtype=torch.uint8)
    packing.pack(k, v, packed)
    got = torch.empty_like(k), torch.empty_like(v)
    packing.unpack(packed, *got)
    return packing, *got


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 2, 64), (2, 3, 5), (1, 48), (7,)])
def test_every_value_keeps_three_bits_and_every_key_its_sixteen(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    # Heads and tokens that differ by orders of magnitude, as those of real models do.
    scale = torch.logspace(-3, 3, 11).view(11, *[1] * len(shape))
    k, v = ((torch.randn(11, *shape, generator=generator) * scale).to(dtype) for _ in range(2))
    packing, got_k, got_v = _packed(k, v, shape[-1])
    assert packing.width <= -(-(3 * k[0].numel() + 2 * v[0].numel() // shape[-1]) // 4) * 4
    assert torch.equal(got_k, k) if dtype.itemsize == 2 else torch.allclose(got_k, k, rtol=2**-8, atol=0)
    largest = v.float().abs().amax(-1, keepdim=True)
    # Half of the last bit of three; below 2^-6 of the largest that E4M3 has, half of what is left.
    assert ((got_v.float() - v.float()).abs() <= v.float().abs() * 2**-4 * 1.01 + largest * 2**-18).all()


def test_zeros_stay_zeros_and_what_is_not_finite_stays_so() -> None:
    v = torch.zeros(4, 8)
    v[1, 0], v[2, 3], v[3, :] = float("nan"), float("inf"), 1e-30
    _, _, got = _packed(v, v, 8)
    assert torch.equal(got[0], v[0])
    assert not got[1, 0].isfinite()
    assert not got[2, 3].isfinite()
    assert torch.allclose(got[3], v[3], rtol=2**-4)


def _render(workers: list[Worker], recipe: Recipe, model: ReferenceDiT, **cluster: str) -> tuple[float, Report]:
    addresses = [worker.address for worker in workers]
    return render(addresses, recipe, model, mode="tokens", cfg=1.0, size=160, steps=4, cluster=cluster)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="workers run on Linux")
@pytest.mark.parametrize("overlap", ["off", "on"])
def test_a_compressed_split_swaps_less_and_is_called_approximate(
    workers: list[Worker], recipe: Recipe, model: ReferenceDiT, overlap: str
) -> None:
    for count in (1, 2):
        exact, plain = _render(workers[:count], recipe, model, overlap=overlap)
        worst, report = _render(workers[:count], recipe, model, overlap=overlap, **FP8)
        assert exact <= SAME < worst < 0.03
        assert (report.split, report.forwards_split) == ("tokens", 3), report.line()
        assert "approximate (compressed exchange)" in report.line()
        assert "approximate" not in plain.line()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="workers run on Linux")
def test_what_is_predicted_to_be_swapped_is_less(workers: list[Worker], recipe: Recipe, model: ReferenceDiT) -> None:
    for cluster in ({}, FP8):
        _render(workers[:1], recipe, model, **cluster)
    plain, packed = (costs.swapped_bytes for costs in ledger._history._costs.values())
    # float32: 8 bytes for a key and a value, or 3 and 2 for the scale of 64; hidden states once, as they are.
    tokens, width, depth = 100, model.config.width, model.config.depth
    assert plain == tokens * width * (8 * depth + 4)
    assert packed == tokens * width * (3 * depth + 4) + tokens * depth * 2 * model.config.heads


@pytest.mark.skipif(not hasattr(os, "fork"), reason="workers run on Linux")
def test_a_worker_that_computes_something_else_is_found_out_although_less_is_asked_of_it(
    workers: list[Worker], recipe: Recipe
) -> None:
    other = ReferenceDiT(ReferenceConfig(weight_seed=5))
    worst, report = _render(workers[:1], recipe, other, **FP8)
    assert worst <= SAME
    assert report.forwards_split == 0
    assert "compute something else" in report.line()
