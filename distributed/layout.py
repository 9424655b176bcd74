"""Which tokens of which stream each rank computes in a token split. Pure numbers; no tensors, no network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

Span = tuple[int, int]


class NotSplittable(Exception):
    """A forward whose tokens cannot be split; the message says why. Every rank comes to the same conclusion."""


def spans(length: int, shares: Sequence[float]) -> list[Span]:
    """[start, stop) of each rank in a stream of `length` tokens, in proportion to `shares` but never empty.

    `length` is at least the number of ranks. The same numbers give the same spans on every machine.
    """
    ranks = len(shares)
    total = sum(shares)
    cuts, before = [0], 0.0
    for rank, share in enumerate(shares[:-1], start=1):
        before += share
        wanted = int(length * before / total + 0.5)
        cuts.append(min(max(wanted, cuts[-1] + 1), length - (ranks - rank)))
    cuts.append(length)
    return [(cuts[rank], cuts[rank + 1]) for rank in range(ranks)]


@dataclass
class Layout:
    """The token streams of one forward, as they become known: their lengths and what each rank holds of them."""

    rank: int
    shares: tuple[float, ...]
    lengths: dict[str, int] = field(default_factory=dict)
    spans: dict[str, list[Span]] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)

    def add(self, stream: str, length: int, *, whole: bool = False) -> None:
        """A stream of `length` tokens; every rank holds all of it if `whole`, or if there is not a token for each."""
        self.lengths[stream] = length
        if whole or length < len(self.shares):
            self.whole.add(stream)
            self.spans[stream] = [(0, length)] * len(self.shares)
        else:
            self.spans[stream] = spans(length, self.shares)

    def own(self, stream: str) -> Span:
        """What this rank holds of `stream`."""
        return self.spans[stream][self.rank]

    def full_length(self, streams: Sequence[str]) -> int:
        """Tokens of all ranks in a sequence of these streams, one after the other."""
        return sum(self.lengths[stream] for stream in streams)

    def own_length(self, streams: Sequence[str]) -> int:
        """Tokens of this rank in a sequence of these streams."""
        return sum(stop - start for start, stop in map(self.own, streams))

    def sections(self, streams: Sequence[str]) -> list[Span]:
        """Where this rank's tokens lie in the full sequence of these streams, in order."""
        return self._sections(streams, self.rank)

    def held(self, streams: Sequence[str], start: int, stop: int) -> list[Span]:
        """Where tokens [start, stop) of the full sequence of these streams lie in this rank's own sequence of them."""
        found, offset = [], 0
        for first, last in self.sections(streams):
            if max(start, first) < min(stop, last):
                found.append((max(start, first) - first + offset, min(stop, last) - first + offset))
            offset += last - first
        return found

    def regions(self, streams: Sequence[str]) -> list[list[Span]]:
        """Per rank, what it has to give to the others of the full sequence: its part of the streams that are cut."""
        cut = [stream for stream in streams if stream not in self.whole]
        return [self._sections(streams, rank, cut) for rank in range(len(self.shares))]

    def own_first(self, streams: Sequence[str]) -> tuple[int, list[list[Span]]]:
        """(length, region of each rank) of the streams that are cut, rank after rank, this rank's at the front."""
        lengths = [sum(stop - start for start, stop in spans) for spans in self.regions(streams)]
        regions: list[list[Span]] = [[] for _ in lengths]
        end = 0
        for rank in sorted(range(len(lengths)), key=lambda rank: rank != self.rank):
            regions[rank] = [(end, end + lengths[rank])]
            end += lengths[rank]
        return end, regions

    def _sections(self, streams: Sequence[str], rank: int, only: Sequence[str] | None = None) -> list[Span]:
        found, offset = [], 0
        for stream in streams:
            start, stop = self.spans[stream][rank]
            if only is None or stream in only:
                found.append((offset + start, offset + stop))
            offset += self.lengths[stream]
        return found
