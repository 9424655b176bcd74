"""The workers of a measurement, as they are before, between and after the runs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ..distributed.addresses import Address
from ..distributed.cluster import Cluster, ConfigurationError, load_configuration
from ..distributed.doctor.patience import Impatient, within
from ..distributed.link_rate import measure_link
from ..distributed.peer import Peer, PeerFailed
from ..distributed.versions import own_versions
from .errors import BenchError

# What a slow link takes to be measured, and what a worker takes to answer.
_LINK_SECONDS, _SECONDS = 60.0, 10.0
_SETTINGS = ("allow_version_mismatch", "prefer", "trusted_link", "exchange", "overlap", "compress")


class Workers:
    """Those of the configuration of this machine, which is the one that ComfyUI uses if it runs here."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._addresses = list(dict.fromkeys(cluster.workers))

    @classmethod
    def configured(cls) -> Workers:
        """Raises BenchError if there are none."""
        try:
            cluster = load_configuration().cluster()
        except ConfigurationError as error:
            raise BenchError(str(error)) from None
        if not cluster.workers:
            raise BenchError(
                "No worker is configured, so there is nothing to compare with. Pair this machine first (monarch pair), "
                "or measure it alone with --modes one."
            )
        return cls(cluster)

    @property
    def settings(self) -> dict[str, Any]:
        """How the cluster is configured to split."""
        return {name: getattr(self._cluster, name) for name in _SETTINGS}

    def examine(self) -> list[dict[str, Any]]:
        """What each worker is and what the link to it carries. Raises BenchError if one is busy or does not answer."""
        found = []
        for address in self._addresses:
            try:
                found.append(examined(address))
            except (PeerFailed, Impatient) as error:
                raise BenchError(f"A worker cannot take part: {error}") from None
        return found

    def before(self) -> None:
        """Have those that answer count what they take anew."""
        for address in self._addresses:
            _usage(address, begin=True)

    def after(self) -> dict[str, dict[str, int]]:
        """What those that answer took since `before`, by name."""
        return dict(found for address in self._addresses if (found := _usage(address, begin=False)))


class NoWorkers:
    """In place of Workers where there are none, or none that can be asked from here."""

    settings: dict[str, Any] = {}  # noqa: RUF012

    def examine(self) -> list[dict[str, Any]]:
        return []

    def before(self) -> None:
        pass

    def after(self) -> dict[str, dict[str, int]]:
        return {}


def examined(address: Address) -> dict[str, Any]:
    """What a worker is and what the link to it carries. Raises PeerFailed or Impatient."""
    peer = Peer(address, within(_LINK_SECONDS))
    try:
        # Nothing is computed, so ComfyUI's version does not matter; runs compare it.
        peer.connect(own_versions(None), allow_mismatch=True)
        link = measure_link(peer)
    finally:
        peer.close(cancel=True)
    assert peer.versions is not None
    return {
        "name": peer.name,
        "address": str(address),
        "device": {key: value for key, value in peer.device.items() if value and key != "free"},
        "versions": asdict(peer.versions),
        "link": {
            "rtt_ms": round(1000 * link.rtt, 3),
            "lanes": link.lanes,
            "gb_per_s": round(link.rate / 1e9, 4),
            "tcp_gb_per_s": None if link.tcp_rate is None else round(link.tcp_rate / 1e9, 4),
            **({"tcp_problem": link.tcp_problem} if link.tcp_rate is None else {}),
        },
    }


def _usage(address: Address, *, begin: bool) -> tuple[str, dict[str, int]] | None:
    """(name, what it took) of a worker; None if it does not answer, of which the run itself will tell."""
    peer = Peer(address, within(_SECONDS))
    try:
        peer.connect(own_versions(None), allow_mismatch=True, begin_usage=begin)
    except (PeerFailed, Impatient):
        return None
    finally:
        peer.close(cancel=False)
    return peer.name, peer.usage
