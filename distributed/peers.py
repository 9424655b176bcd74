"""The workers of one run: meeting them, having them load the model, and letting go of those that fail."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator

from . import limits
from .addresses import Address
from .cluster import Cluster, configuration_file
from .compute_path import NATIVE, common_paths
from .holdings import holdings
from .joining import Arrival, Joining
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
        self._greet = functools.partial(greet, versions=versions, allow_mismatch=cluster.allow_version_mismatch)
        self._report = report
        self._describe = describe
        self._check = check
        self._progress = progress
        self._dequantised = dequantised
        self._model_changes = contextlib.ExitStack()
        self._started = False
        self._ended = False
        self._prepared_at = 0.0
        self._joining = Joining(self._greet, self._prepare_late)
        # In the order of the cluster.
        self._peers: list[Peer] = []
        # By address: those that took part and are looked for, and how often one failed though it was there.
        self._lost: set[str] = set()
        # Those of them whose connection broke.
        self._gone: set[str] = set()
        self._failures: Counter[str] = Counter()

    @property
    def members(self) -> tuple[Peer, ...]:
        """Those that take part, or will once they have loaded the model; may be asked from any thread."""
        return tuple(self._peers)

    def __contains__(self, peer: Peer) -> bool:
        return peer in self._peers

    def end(self, *, cancel: bool) -> None:
        """End the run on every worker; with `cancel` they also stop what they compute."""
        self._ended = True
        away = sorted(self._gone - {peer.address for peer in self._peers})
        if away and not cancel:
            self._report.add_event(
                f"the render went on without it; have the worker at {' and '.join(away)} running again, "
                "nothing needs a restart here"
            )
        self._joining.end()
        self._model_changes.close()
        for peer in list(self._peers):
            self.release(peer, cancel=cancel)

    def start(self) -> None:
        """Describe the model, connect to the workers and have them load; returns while they still load."""
        if self._started:
            return
        self._started = True
        if not self._cluster.workers:
            self._report.add_reason(
                f"no worker is configured in cluster {self._cluster.name!r}; pair one (monarch pair), or name it in "
                f"{configuration_file()}"
            )
            return
        try:
            self.recipe = self._describe()
        except NotReproducible as error:
            for reason in error.reasons:
                self._report.add_reason(reason)
            return
        except Exception as error:
            # A ComfyUI or a loader that keeps its models in a way not known here must not end the render.
            self._report.add_reason(f"the model cannot be described ({type(error).__name__}: {error})")
            return
        for address in dict.fromkeys(self._cluster.workers):
            self._joining.seek(address)
        for arrival in sorted(self._joining.first(self._check), key=lambda arrival: arrival.peer is None):
            self._take(arrival)
        self.recipe = recipe = self._same_paths(self.recipe)
        self._joining.begin()
        for peer in list(self._peers):
            with self.released_on_failure(peer):
                peer.prepare(recipe, self._progress)
        self._prepared_at = time.monotonic()

    def _take(self, arrival: Arrival) -> None:
        """Have a worker that was met take part, or report why it cannot."""
        for warning in arrival.warnings:
            self._report.add_event(warning)
        peer, problem = arrival.peer, arrival.problem
        if peer is not None:
            peer.watched_by(self._check)
            if any(other.name == peer.name for other in self._peers):
                peer.name = f"{peer.name} ({peer.address})"
            order = [str(address) for address in self._cluster.workers]
            self._peers = sorted([*self._peers, peer], key=lambda each: order.index(each.address))
        elif problem is not None:
            same = next((other for other in self._peers if other.worker_id == problem.worker_id), None)
            if same is None:
                self._report.add_failure(str(problem))
            else:
                self._joining.give_up(arrival.address)
                self._report.add_event(
                    f"{same.address} and {arrival.address} are one and the same worker; name it once in the cluster"
                )

    def _take_late(self) -> None:
        for arrival in self._joining.late():
            self._take(arrival)
            if arrival.peer is not None:
                how = "is back" if arrival.peer.address in self._lost else "joined in the middle of the run"
                self._report.add_event(f"{arrival.peer.name} {how}")

    def _prepare_late(self, peer: Peer) -> None:
        """Have a worker build what the others have; called in a thread of its own."""
        recipe = self.recipe
        assert recipe is not None
        paths = recipe.tree.get("paths", {})
        unable = [name for name, path in paths.items() if path == NATIVE and name in peer.emulated]
        if unable:
            raise PeerFailed(
                f"{peer.name} joins the next run: it cannot compute {', '.join(unable)} as this one does", final=True
            )
        peer.prepare(recipe, lambda done, total: None)
        self._wait_ready(peer, recipe)

    def _wait_ready(self, peer: Peer, recipe: Recipe) -> None:
        if not peer.ready:
            peer.wait_ready(recipe)
            holdings.note(peer.addresses[0], recipe.file.digest, self._greet)

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
        """Within it, a failure of this worker costs the run the worker, for a while at least, and nothing else."""
        try:
            yield
        except PeerFailed as error:
            self._report.add_failure(str(error))
            self.release(peer, cancel=True, again=not error.final)

    def release(self, peer: Peer, *, cancel: bool, again: bool = True) -> None:
        """Let go of a worker. Until the run ends it is looked for `again`, if there is any hope."""
        if peer not in self._peers:
            return
        self._peers.remove(peer)
        self._report.add_traffic(*peer.traffic)
        lost = peer.lost
        peer.close(cancel=cancel)
        if self._ended or not again:
            return
        if not lost:
            self._failures[peer.address] += 1
            if not peer.ready or self._failures[peer.address] > 1:
                return
        else:
            self._gone.add(peer.address)
        self._lost.add(peer.address)
        after = limits.REJOIN_FIRST_SECONDS if lost else limits.REJOIN_FAILED_SECONDS
        self._joining.seek(peer.addresses[0], after=after)

    def ready(self) -> list[Peer]:
        """Peers that hold a replica. Those that still load are waited for, unless `auto` can go on without them."""
        began = time.perf_counter()
        self.start()
        recipe = self.recipe
        if recipe is None:
            return []
        self._take_late()
        for peer in list(self._peers):
            with self.released_on_failure(peer):
                if self._report.mode != "auto" or peer.loaded(self._prepared_at + limits.WARM_WORKER_SECONDS):
                    self._wait_ready(peer, recipe)
        self.load_seconds += time.perf_counter() - began
        ready = [peer for peer in self._peers if peer.ready]
        if len(ready) < len(self._peers):
            self._report.add_event("the first steps ran while a worker was still loading")
        return ready

    def look(self) -> None:
        """Notice peers that are gone or new; what the others say is read even while nothing is asked of them."""
        self._take_late()
        for peer in list(self._peers):
            with self.released_on_failure(peer):
                peer.look()


def greet(
    address: Address, check: Callable[[], None], versions: Versions, *, allow_mismatch: bool
) -> tuple[Peer, list[str]]:
    """A worker that serves this process now, and warnings. It is told what it need not hold any more.

    Raises PeerFailed, and what `check` raises.
    """
    peer = Peer(address, check)
    try:
        warnings = peer.connect(versions, allow_mismatch=allow_mismatch)
        unwanted = holdings.take_unwanted(address)
        try:
            peer.free(unwanted)
        except PeerFailed:
            holdings.put_back(address, unwanted)
            raise
    except BaseException:
        peer.close(cancel=True)
        raise
    return peer, warnings
