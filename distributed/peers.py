"""The workers of one run: connecting them, having them load the model, and letting go of those that fail."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Iterator

from . import limits
from .cluster import Cluster
from .compute_path import common_paths
from .options import NotReproducible
from .peer import Peer, PeerFailed
from .recipe import Recipe
from .report import Report
from .versions import Versions


class Peers:
    """Those of a cluster's workers that take part in a run; what happens to them ends up in the report."""

    def __init__(
        self,
        cluster: Cluster,
        versions: Versions,
        report: Report,
        describe: Callable[[], Recipe],
        check: Callable[[], None],
        progress: Callable[[int, int], None],
        dequantised: Callable[[Collection[str]], contextlib.AbstractContextManager[None]] | None,
    ) -> None:
        """See Session. Nothing is connected before `start`."""
        self.recipe: Recipe | None = None
        self.load_seconds = 0.0
        self._cluster = cluster
        self._versions = versions
        self._report = report
        self._describe = describe
        self._check = check
        self._progress = progress
        self._dequantised = dequantised
        self._model_changes = contextlib.ExitStack()
        self._started = False
        self._prepared_at = 0.0
        self._peers: list[Peer] = []

    def __contains__(self, peer: Peer) -> bool:
        return peer in self._peers

    def end(self, *, cancel: bool) -> None:
        """End the run on every worker; with `cancel` they also stop what they compute."""
        self._model_changes.close()
        for peer in list(self._peers):
            self.release(peer, cancel=cancel)

    def start(self) -> None:
        """Describe the model, connect to the workers and have them load; returns while they still load."""
        if self._started:
            return
        self._started = True
        if not self._cluster.workers:
            self._report.add_reason(f"no worker is configured in cluster {self._cluster.name!r}")
            return
        try:
            self.recipe = self._describe()
        except NotReproducible as error:
            for reason in error.reasons:
                self._report.add_reason(reason)
            return
        except (OSError, LookupError, TypeError, ValueError) as error:
            # A ComfyUI or a loader that keeps its models in a way not known here must not end the render.
            self._report.add_reason(f"the model cannot be described ({type(error).__name__}: {error})")
            return
        for address in dict.fromkeys(self._cluster.workers):
            peer = Peer(address, self._check)
            self._peers.append(peer)
            with self.released_on_failure(peer):
                for warning in peer.connect(self._versions, allow_mismatch=self._cluster.allow_version_mismatch):
                    self._report.add_event(warning)
                if any(other.name == peer.name for other in self._peers if other is not peer):
                    peer.name = f"{peer.name} ({peer.address})"
        self.recipe = recipe = self._same_paths(self.recipe)
        for peer in list(self._peers):
            with self.released_on_failure(peer):
                peer.prepare(recipe, self._progress)
        self._prepared_at = time.monotonic()

    def _same_paths(self, recipe: Recipe) -> Recipe:
        """Have all nodes multiply quantised layers the same way, or each in its own if the cluster prefers speed."""
        for note in recipe.notes:
            self._report.add_event(note)
        if self._dequantised is None or not recipe.tree.get("paths"):
            return recipe
        paths, forced, notes = common_paths(
            recipe.tree["paths"],
            {peer.name: peer.emulated for peer in self._peers},
            speed=self._cluster.prefer == "speed",
        )
        for note in notes:
            self._report.add_event(note)
        self._model_changes.enter_context(self._dequantised(forced))
        return dataclasses.replace(recipe, tree={**recipe.tree, "paths": paths})

    @contextlib.contextmanager
    def released_on_failure(self, peer: Peer) -> Iterator[None]:
        """Within it, a failure of this worker costs the run the worker and nothing else."""
        try:
            yield
        except PeerFailed as error:
            self._report.add_event(str(error))
            self.release(peer, cancel=True)

    def release(self, peer: Peer, *, cancel: bool) -> None:
        """End the run on one worker, which takes no part in it any more."""
        if peer not in self._peers:
            return
        self._peers.remove(peer)
        self._report.add_traffic(*peer.traffic)
        peer.close(cancel=cancel)

    def ready(self) -> list[Peer]:
        """Peers that hold a replica. Those that still load are waited for, unless `auto` can go on without them."""
        began = time.perf_counter()
        self.start()
        recipe = self.recipe
        if recipe is None:
            return []
        for peer in list(self._peers):
            with self.released_on_failure(peer):
                if self._report.mode != "auto" or peer.loaded(self._prepared_at + limits.WARM_WORKER_SECONDS):
                    peer.wait_ready(recipe)
        self.load_seconds += time.perf_counter() - began
        ready = [peer for peer in self._peers if peer.ready]
        if len(ready) < len(self._peers):
            self._report.add_event("the first steps ran while a worker was still loading")
        return ready

    def look(self) -> None:
        """Notice peers that are gone; what the others say is read even while nothing is asked of them."""
        for peer in list(self._peers):
            with self.released_on_failure(peer):
                peer.look()
