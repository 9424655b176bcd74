"""Shares follow measured pace, every row is computed once, and a split that does not pay is dropped."""

from __future__ import annotations

import random

import pytest

from monarch_split.distributed import limits, plan
from monarch_split.distributed.plan import Costs, History, pays, share_rows, shares, wants_measure_alone

NODES = ["driver", "worker"]
BOTH = {"driver": 1, "worker": 1}


def costs(**paces: float) -> Costs:
    return Costs(paces={node: [pace, pace] for node, pace in paces.items()})


def test_every_row_is_given_to_exactly_one_node_and_the_slowest_finishes_as_soon_as_possible() -> None:
    chance = random.Random(3)
    for _ in range(300):
        rows, paces = chance.randint(0, 9), [chance.uniform(0.05, 5) for _ in range(chance.randint(1, 3))]
        given = share_rows(rows, paces)
        assert sum(given) == rows
        assert min(given) >= 0
        slowest = max(share / pace for share, pace in zip(given, paces, strict=True))
        assert slowest <= _best(rows, paces) + 1e-9


def _best(rows: int, paces: list[float]) -> float:
    if len(paces) == 1:
        return rows / paces[0]
    return min(max(here / paces[0], _best(rows - here, paces[1:])) for here in range(rows + 1))


@pytest.mark.parametrize(
    ("rows", "paces", "expected"),
    [
        (2, [1, 1], [1, 1]),
        (3, [1, 1], [2, 1]),
        (4, [3, 1], [3, 1]),
        (8, [5, 3], [5, 3]),
        (2, [1, 100], [0, 2]),
        (1, [1, 1], [1, 0]),
    ],
)
def test_shares_of_known_paces(rows: int, paces: list[float], expected: list[int]) -> None:
    assert share_rows(rows, paces) == expected


def test_the_driver_always_computes_a_row() -> None:
    for rows in range(1, 6):
        result = shares(costs(driver=0.001, worker=1000.0), NODES, rows)
        assert result[0] == 1
        assert sum(result) == rows


def test_nodes_that_were_not_measured_count_as_average() -> None:
    assert shares(costs(), NODES, 4) == [2, 2]
    assert shares(costs(driver=2.0), NODES, 4) == [2, 2]
    assert shares(costs(driver=3.0, worker=1.0), [*NODES, "new"], 6) == [3, 1, 2]


def test_a_node_that_got_no_rows_is_tried_again_after_a_while() -> None:
    slow = costs(driver=100.0, worker=1.0)
    assert shares(slow, NODES, 2) == [2, 0]
    for turn in range(200):
        if shares(slow, NODES, 2) == [1, 1]:
            assert turn > 5
            return
    pytest.fail("the worker was never tried again")


@pytest.mark.parametrize(("rows", "seconds"), [(0, 1.0), (2, 0.0), (2, -1.0)])
def test_measurements_that_mean_nothing_are_ignored(rows: int, seconds: float) -> None:
    known = costs()
    known.record_pace("worker", rows, seconds)
    assert known.pace("worker") is None


def test_paces_follow_what_is_measured() -> None:
    known = costs()
    known.record_pace("worker", 2, 1.0)
    known.record_pace("worker", 2, 1.0)
    assert known.pace("worker") == 2.0
    for _ in range(3):
        known.record_pace("worker", 4, 1.0)
    assert known.pace("worker") == 4.0
    for _ in range(3):
        known.record_pace("worker", 1, 1.0)
    assert known.pace("worker") == 1.0


def test_one_slow_measurement_takes_no_rows_from_a_node() -> None:
    known = costs(driver=2.0)
    known.record_pace("worker", 1, 10.0)
    assert shares(known, NODES, 2) == [1, 1]
    known.record_pace("worker", 1, 0.5)
    known.record_pace("worker", 1, 10.0)
    assert shares(known, NODES, 2) == [1, 1]


@pytest.mark.parametrize(
    ("rows", "expected"), [(1, [1, 0, 0]), (2, [1, 1, 0]), (3, [1, 1, 1]), (6, [4, 1, 1]), (12, [10, 1, 1])]
)
def test_when_everyone_is_to_take_part_slow_nodes_do_too(rows: int, expected: list[int]) -> None:
    nodes = [*NODES, "slower"]
    assert shares(costs(driver=100.0, worker=20.0, slower=1.0), nodes, rows, everyone=True) == expected


def test_the_driver_alone_is_measured_once_before_the_first_split() -> None:
    known = costs()
    assert wants_measure_alone(known)
    known.record_alone(1.0, first_of_run=False)
    assert not wants_measure_alone(known)


def test_a_measurement_that_includes_warming_up_is_repeated_before_it_judges() -> None:
    known = costs()
    known.record_alone(10.0, first_of_run=True)
    assert not wants_measure_alone(known)
    for _ in range(limits.TRIAL_FORWARDS):
        known.record_split(20.0, BOTH)
    assert pays(known, 2, "driver")
    assert wants_measure_alone(known)
    known.record_alone(2.0, first_of_run=False)
    assert not wants_measure_alone(known)
    assert not pays(known, 2, "driver")


def _judged(alone: float, split: list[float], **paces: float) -> bool:
    known = costs(**paces)
    known.record_alone(alone, first_of_run=False)
    for seconds in split:
        known.record_split(seconds, BOTH)
    return pays(known, 2, "driver")


def test_a_split_is_kept_while_it_is_faster_and_dropped_when_it_is_not() -> None:
    assert _judged(1.0, [0.6, 0.6])
    assert not _judged(1.0, [1.1, 1.2])
    assert not _judged(1.0, [0.99, 0.99])


def test_one_slow_forward_does_not_condemn_a_split() -> None:
    assert _judged(1.0, [1.5])
    assert _judged(1.0, [5.0, 0.6])


def test_only_the_latest_forwards_are_judged() -> None:
    assert not _judged(1.0, [0.5] * 5 + [1.2] * limits.TRIAL_FORWARDS)


def test_the_drivers_own_pace_lowers_what_a_split_has_to_beat() -> None:
    assert not _judged(10.0, [1.2, 1.2], driver=2.0)
    assert _judged(1.0, [0.6, 0.6], driver=0.1)


def test_a_verdict_is_remembered_and_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(plan.time, "monotonic", lambda: now)
    known = costs()
    known.record_alone(1.0, first_of_run=False)
    known.record_split(2.0, BOTH)
    known.record_split(2.0, BOTH)
    assert not pays(known, 2, "driver")
    now += 60
    assert not pays(known, 2, "driver")
    now += 3600
    assert pays(known, 2, "driver")
    known.record_split(0.5, BOTH)
    known.record_split(0.5, BOTH)
    assert pays(known, 2, "driver")


def test_history_keeps_what_was_used_last_and_stays_bounded() -> None:
    history = History()
    first = history.costs(("model", 0))
    for number in range(2000):
        history.costs(("model", number))
        assert history.costs(("model", 0)) is first
    assert len(history._costs) <= 300


def _tried(trials: list[float], *, cold: bool = False, refused: bool = False, **paces: float) -> Costs:
    known = costs(**paces)
    known.record_alone(2.0, first_of_run=cold)
    for seconds in trials:
        known.record_split(seconds, BOTH)
    if refused:
        known.refuse("no")
    return known


@pytest.mark.parametrize(
    ("rows", "paces", "expected"),
    [
        (2, [1, 1], 1.0),
        (3, [1, 1], 0.75),
        (5, [1, 1], 5 / 6),
        (2, [1, 1, 1], 2 / 3),
        (6, [1, 1, 1], 1.0),
        (2, [3, 1], 0.75),
        (4, [3, 1], 1.0),
        (2, [100, 1], 100 / 101),
        (1, [1, 3], 0.25),
    ],
)
def test_what_finishing_together_would_gain_over_whole_rows(rows: int, paces: list[float], expected: float) -> None:
    nodes = [*NODES, "other"][: len(paces)]
    assert plan.balance(costs(**dict(zip(nodes, paces, strict=True))), nodes, rows) == pytest.approx(expected)


def test_one_measurement_is_not_enough_to_take_machines_for_unlike() -> None:
    known = Costs(paces={"driver": [3.0], "worker": [1.0]})
    assert plan.balance(known, NODES, 2) == 1.0
    assert plan.balance(known, NODES, 2, measured=1) == pytest.approx(0.75)


def test_a_node_that_is_only_taken_to_be_faster_gains_nothing() -> None:
    slow = costs(driver=100.0, worker=1.0)
    before = plan.balance(slow, NODES, 2)
    for _ in range(50):
        shares(slow, NODES, 2)
    assert plan.balance(slow, NODES, 2) == before > 0.9
    slow.record_pace("worker", 1, 1.0)
    assert slow.pace("worker") == 1.0


def test_what_a_forward_takes_is_known_once_it_was_split_and_measured_alone() -> None:
    assert plan.seconds(_tried([1.2]), 3, "driver") is None
    assert plan.seconds(_tried([1.2, 1.1], cold=True), 3, "driver") is None
    assert plan.seconds(_tried([1.2, 1.1]), 3, "driver") == 1.1
    assert plan.seconds(_tried([3.2, 3.1], refused=True), 3, "driver") == 2.0


def _after_trials(seconds: float, given: dict[str, float], paces: list[float], *, tokens: bool = False) -> Costs:
    """A forward of six rows that takes 6 s alone was tried twice; the nodes were measured once, at `paces`."""
    known = Costs(paces={node: [pace] for node, pace in zip(NODES, paces, strict=True)}, proportional=not tokens)
    known.record_alone(6.0, first_of_run=False)
    for _ in range(limits.TRIAL_FORWARDS):
        known.record_split(seconds, given)
    return known


def test_equal_shares_do_not_condemn_a_split_with_a_slower_machine() -> None:
    known = _after_trials(6.1, {"driver": 3, "worker": 3}, [1.0, 0.5])
    assert pays(known, 6, "driver")
    assert shares(known, NODES, 6) == [4, 2]
    by_tokens = _after_trials(6.1, {"driver": 0.5, "worker": 0.5}, [1 / 6, 1 / 12], tokens=True)
    assert pays(by_tokens, 1, "driver")
    assert plan.fractions(by_tokens, NODES) == pytest.approx([2 / 3, 1 / 3])


def test_other_shares_are_tried_once() -> None:
    known = _after_trials(6.1, {"driver": 3, "worker": 3}, [1.0, 0.5])
    assert pays(known, 6, "driver")
    for _ in range(limits.TRIAL_FORWARDS):
        assert pays(known, 6, "driver")
        known.record_split(6.1, {"driver": 4, "worker": 2})
    known.paces["worker"] = [1.0] * 3
    assert not pays(known, 6, "driver")


@pytest.mark.parametrize(
    ("seconds", "paces"),
    [
        pytest.param(9.0, [1.0, 1.0], id="the link takes the time"),
        pytest.param(9.0, [1.0, 0.5], id="the link takes more than other shares would gain"),
        pytest.param(31.0, [1.0, 0.1], id="the worker is too slow for any row"),
    ],
)
def test_where_other_shares_would_not_help_they_are_not_tried(seconds: float, paces: list[float]) -> None:
    assert not pays(_after_trials(seconds, {"driver": 3, "worker": 3}, paces), 6, "driver")


def test_a_machine_that_slows_down_is_judged_by_its_latest_paces() -> None:
    known = costs(driver=1.0, worker=1.0)
    known.record_alone(6.0, first_of_run=False)
    for _ in range(limits.TRIAL_FORWARDS):
        assert pays(known, 6, "driver")
        known.record_pace("worker", 3, 6.0)
        known.record_split(6.1, {"driver": 3, "worker": 3})
    assert known.pace("worker") == 1.0
    assert pays(known, 6, "driver")
    assert shares(known, NODES, 6) == [4, 2]


@pytest.mark.parametrize(
    ("paces", "given", "expected"),
    [
        ({}, [1, 1], 2.0),
        ({}, [2, 1], 1.5),
        ({"driver": 2.0}, [2, 2], 2.0),
        ({"driver": 1.0, "worker": 0.5}, [4, 2], 1.5),
        ({"driver": 1.0, "worker": 0.5}, [3, 3], 1.0),
    ],
)
def test_the_predicted_speed_up_follows_the_paces_that_are_known(
    paces: dict[str, float], given: list[int], expected: float
) -> None:
    assert plan.predict(costs(**paces), NODES, given) == pytest.approx(expected)


def test_the_predicted_speed_up_is_over_what_one_machine_was_measured_to_take() -> None:
    known = costs(driver=1.0, worker=1.0)
    known.record_alone(1.5, first_of_run=False)
    assert plan.predict(known, NODES, [1, 1]) == pytest.approx(1.5)


def test_what_was_tried_before_is_known_only_together_with_what_it_has_to_beat() -> None:
    assert plan.tried_speedup(_tried([]), 2, "driver") is None
    assert plan.tried_speedup(_tried([1.6, 1.25], cold=True), 2, "driver") is None
    assert plan.tried_speedup(_tried([1.6, 1.25]), 2, "driver") == pytest.approx(1.6)
