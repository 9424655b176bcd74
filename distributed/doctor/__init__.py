"""What `monarch doctor` and the sidebar look at before a render: everything that has to be right for a split.

Each step is a Check with the fix beside it; nothing here prints.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..cluster import Cluster
from .check import FAIL, PASS, WARN, Check
from .machine import Here, Largest, TinyModel, configuration, keys, memory, models, software
from .worker import examine_worker

__all__ = ["FAIL", "PASS", "WARN", "Check", "Here", "TinyModel", "examine"]


def examine(here: Here) -> Iterator[Check]:
    """All checks, each as soon as it is done; none waits longer than a minute."""
    clusters: list[Cluster] = []
    largest: list[Largest] = []
    yield from configuration(clusters)
    yield keys()
    yield software(here)
    yield from models(here, largest)
    yield memory(here, largest)
    for cluster in clusters:
        for address in dict.fromkeys(cluster.workers):
            yield from examine_worker(address, cluster, here, largest)
