"""What a record says of the machine that it was made on."""

from __future__ import annotations

import os
import platform
from typing import Any


def machine() -> dict[str, Any]:
    """cores_used: those that this process may run on."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu_cores": os.cpu_count(),
        "cores_used": usable,
        "architecture": platform.machine(),
        "system": platform.system(),
    }
