"""Main memory: how much there is, what a model file will take of it, and whether a GPU shares it.

On a machine whose GPU shares its memory, running out ends the process or the host, not the call: look first.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from ..formats import FileReport

# What ComfyUI loads in another dtype than it is stored in, if it has to; quantised weights stay as they are.
_PLAIN = frozenset({"bf16", "fp16", "fp32", "fp8_e4m3fn", "fp8_e5m2"})
# Buffers of a load besides the weights.
_HEADROOM = 1.1


def available_bytes() -> int:
    """Memory that programs can still take without swapping, caches included."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    import psutil

    return int(psutil.virtual_memory().available)


def is_unified(device: torch.device) -> bool:
    """Whether `device` is a GPU that has no memory of its own."""
    if device.type == "mps":
        return True
    return device.type == "cuda" and bool(getattr(torch.cuda.get_device_properties(device), "is_integrated", False))


def loaded_bytes(report: FileReport, dtype: torch.dtype | None = None) -> int:
    """Memory for the weights of a file once they are loaded; `dtype` is that of the model's plain weights."""
    size = report.memory_bytes
    if dtype is not None and report.layers and set(report.layers) <= _PLAIN:
        size = report.parameters * dtype.itemsize
    return int(size * _HEADROOM)


def require_memory(name: str, needed: int, where: str, free_some: Callable[[], bool]) -> None:
    """Call `free_some` until `needed` bytes are available. Raises MemoryError with the numbers if they never are.

    `free_some` gives memory back and returns False if there is nothing left to give.
    """
    while (available := available_bytes()) < needed:
        if not free_some():
            raise MemoryError(
                f"{name} needs {needed / 1e9:.1f} GB of memory and {available / 1e9:.1f} GB are available on {where}. "
                "End what else uses memory there, or use the model in a smaller format."
            )


def give_back_freed() -> None:
    """Return freed memory to the system; glibc keeps much of it for this process (other C libraries do not)."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def forget_pages(path: Path) -> None:
    """Have the system drop what it caches of a file, which is in memory twice once its weights are loaded."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
