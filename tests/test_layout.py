"""Each rank of a token split gets a part of every stream, all of them are the stream, and nothing is sent twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_split.distributed.layout import Layout, spans

SHARES = st.lists(st.floats(0.0, 1e6), min_size=1, max_size=6).filter(lambda shares: sum(shares) > 0)
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=4)


@given(st.integers(0, 5000), SHARES)
def test_spans_cover_the_stream_and_are_never_empty(more: int, shares: list[float]) -> None:
    length = len(shares) + more
    cut = spans(length, shares)
    assert len(cut) == len(shares)
    assert [token for start, stop in cut for token in range(start, stop)] == list(range(length))
    assert all(start < stop for start, stop in cut)


@given(st.integers(100, 100_000), st.lists(st.integers(1, 20), min_size=2, max_size=5))
def test_spans_are_in_proportion(length: int, shares: list[int]) -> None:
    ideal = [length * share / sum(shares) for share in shares]
    for (start, stop), wanted in zip(spans(length, shares), ideal, strict=True):
        assert abs(stop - start - max(wanted, 1)) <= 1 + 1e-6


@pytest.mark.parametrize(
    ("length", "shares", "lengths"),
    [
        (13, (0.5, 0.5), [7, 6]),
        (16, (0.37, 0.63), [6, 10]),
        (3, (0.1, 0.9), [1, 2]),
        (2, (0.0, 1.0), [1, 1]),
        (3, (1.0, 0.0, 0.0), [1, 1, 1]),
        (10, (0.3, 0.3, 0.4), [3, 3, 4]),
    ],
)
def test_spans(length: int, shares: tuple[float, ...], lengths: list[int]) -> None:
    assert [stop - start for start, stop in spans(length, shares)] == lengths


def layouts(lengths: list[int], shares: list[float], whole: set[int]) -> tuple[list[Layout], list[str]]:
    """The layout of every rank, with streams "0", "1", …"""
    ranks = [Layout(rank, tuple(shares)) for rank in range(len(shares))]
    for layout in ranks:
        for stream, length in enumerate(lengths):
            layout.add(str(stream), length, whole=stream in whole)
    return ranks, [str(stream) for stream in range(len(lengths))]


@given(LENGTHS, SHARES, st.sets(st.integers(0, 3)))
def test_regions_are_each_cut_token_once(lengths: list[int], shares: list[float], whole: set[int]) -> None:
    ranks, streams = layouts(lengths, shares, whole)
    given_away = [token for spans in ranks[0].regions(streams) for span in spans for token in range(*span)]
    full = [(stream, token) for stream, length in zip(streams, lengths, strict=True) for token in range(length)]
    assert all(layout.regions(streams) == ranks[0].regions(streams) for layout in ranks)
    assert sorted(given_away) == [place for place, (stream, _) in enumerate(full) if stream not in ranks[0].whole]
    for layout in ranks:
        own = {place for span in layout.sections(streams) for place in range(*span)}
        assert own.issuperset(place for span in layout.regions(streams)[layout.rank] for place in range(*span))


@given(LENGTHS, SHARES, st.sets(st.integers(0, 3)))
def test_every_rank_holds_some_of_each_stream(lengths: list[int], shares: list[float], whole: set[int]) -> None:
    ranks, streams = layouts(lengths, shares, whole)
    for layout in ranks:
        assert layout.full_length(streams) == sum(lengths)
        assert layout.own_length(streams) == sum(stop - start for start, stop in layout.sections(streams))
        assert all(layout.own_length((stream,)) >= 1 for stream in streams)
        for stream, length in zip(streams, lengths, strict=True):
            if int(stream) in whole or length < len(shares):
                assert layout.own(stream) == (0, length)


@given(LENGTHS, SHARES, st.sets(st.integers(0, 3)), st.integers(0, 160), st.integers(0, 160))
def test_held_finds_a_range_of_the_full_sequence(
    lengths: list[int], shares: list[float], whole: set[int], start: int, stop: int
) -> None:
    ranks, streams = layouts(lengths, shares, whole)
    for layout in ranks:
        own = [place for span in layout.sections(streams) for place in range(*span)]
        found = [own[index] for first, last in layout.held(streams, start, stop) for index in range(first, last)]
        assert found == [place for place in own if start <= place < stop]
        assert all(first < last for first, last in layout.held(streams, start, stop))
