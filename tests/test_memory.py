"""A model that does not fit into memory is refused with the numbers, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from monarch_split.distributed.memory import available_bytes, forget_pages, is_unified, loaded_bytes, require_memory
from monarch_split.formats import inspect_file


def test_available_memory_is_less_than_there_is() -> None:
    total = int(Path("/proc/meminfo").read_text().split("MemTotal:")[1].split()[0]) * 1024
    assert 0 < available_bytes() < total


def test_too_large_a_model_is_refused_with_both_numbers_once_nothing_is_left_to_free() -> None:
    calls: list[bool] = [True, True, False]
    with pytest.raises(MemoryError, match=r"big\.safetensors needs 1000000\.0 GB .* GB are available on the worker"):
        require_memory("big.safetensors", 10**15, "the worker", lambda: calls.pop(0))
    assert not calls


def test_what_fits_frees_nothing() -> None:
    require_memory("small.safetensors", 1, "the worker", lambda: pytest.fail("something was freed"))


def test_plain_weights_count_in_the_dtype_that_they_are_loaded_in(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "model.safetensors"
    save_file({"blocks.0.weight": torch.zeros(1000, 1000, dtype=torch.bfloat16)}, path)
    report = inspect_file(path)
    stored = loaded_bytes(report)
    assert 2_000_000 <= stored < 2_500_000
    assert loaded_bytes(report, torch.float32) == pytest.approx(2 * stored, rel=0.01)
    forget_pages(path)
    assert inspect_file(path) == report


def test_a_cpu_is_no_gpu_that_shares_memory() -> None:
    assert not is_unified(torch.device("cpu"))
