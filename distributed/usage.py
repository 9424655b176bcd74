"""What this process took since it was last asked to begin anew: the most memory, and the seconds spent loading models.

For measurements. Where the system cannot begin anew, the main memory is that since the process started.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
# To clear_refs: the peak of the resident memory becomes what it is now (proc(5)).
_BEGIN_ANEW = "5"


class Usage:
    """One per process: memory is not told apart by who asked for it."""

    def __init__(self) -> None:
        self._load_seconds = 0.0

    def begin(self) -> None:
        """Count anew from now on."""
        self._load_seconds = 0.0
        with contextlib.suppress(OSError):
            _CLEAR.write_text(_BEGIN_ANEW)
        if _has_gpu():
            torch.cuda.reset_peak_memory_stats()

    def add_load(self, seconds: float) -> None:
        """A model was loaded in so many seconds."""
        self._load_seconds += seconds

    def taken(self) -> dict[str, int]:
        """Bytes of "main" memory, bytes that torch had on a "gpu", and "load_ms"; what is not known is left out."""
        found = {"load_ms": round(1000 * self._load_seconds)}
        main = _most_main_memory()
        if main:
            found["main"] = main
        if _has_gpu():
            found["gpu"] = torch.cuda.max_memory_allocated()
        return found


def _has_gpu() -> bool:
    # Not is_available alone: asking for numbers must not be what opens the GPU.
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def _most_main_memory() -> int:
    with contextlib.suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    with contextlib.suppress(ImportError):
        import resource

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
    return 0
