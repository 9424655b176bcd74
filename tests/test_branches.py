"""A branch and its owner take strict turns, see the same torch and context state, and always end."""

from __future__ import annotations

import contextvars
import threading
import time
from typing import Any

import pytest
import torch

from monarch_split.distributed.branches import Branch

_variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="default")


class _Interrupt(BaseException):
    """As ComfyUI's interrupt: not an Exception."""


def finished(branch: Branch) -> Any:
    while not branch.done:
        branch.advance()
    return branch.result()


def branch_threads() -> int:
    return sum(thread.name == "monarch-branch" for thread in threading.enumerate())


def test_nothing_runs_until_the_owner_says_so() -> None:
    ran: list[int] = []
    branch = Branch(lambda _: ran.append(1))
    time.sleep(0.05)
    assert ran == []
    branch.advance()
    assert ran == [1]
    assert branch.done
    assert branch.result() is None


def test_turns_are_strict() -> None:
    running = 0
    order: list[str] = []

    def alone(who: str) -> None:
        nonlocal running
        running += 1
        assert running == 1
        time.sleep(0.002)
        order.append(who)
        running -= 1

    def work(branch: Branch) -> str:
        for _ in range(5):
            alone("branch")
            branch.park(None)
        return "result"

    branch = Branch(work)
    for _ in range(5):
        branch.advance()
        alone("owner")
    assert finished(branch) == "result"
    assert order == ["branch", "owner"] * 5


def test_the_owner_sees_what_a_branch_waits_for() -> None:
    branch = Branch(lambda branch: branch.park(17))
    assert branch.waiting_for is None
    branch.advance()
    assert branch.waiting_for == 17
    branch.advance()
    assert branch.waiting_for is None
    assert branch.done


def test_advancing_a_finished_branch_does_nothing() -> None:
    branch = Branch(lambda _: 3)
    for _ in range(3):
        branch.advance()
    assert branch.result() == 3


@pytest.mark.parametrize("error", [ValueError("x"), _Interrupt(), KeyboardInterrupt(), SystemExit(2)], ids=repr)
def test_what_a_branch_raises_is_raised_by_result(error: BaseException) -> None:
    def work(branch: Branch) -> None:
        branch.park(None)
        raise error

    branch = Branch(work)
    branch.advance()
    branch.advance()
    assert branch.done
    with pytest.raises(type(error)) as caught:
        branch.result()
    assert caught.value is error


def test_abandoning_unwinds_at_every_stage_and_leaves_no_thread() -> None:
    before = branch_threads()
    unwound: list[int] = []

    def work(branch: Branch) -> None:
        try:
            branch.park(None)
            branch.park(None)
        except Exception:
            unwound.append(-1)  # a sampler that swallows exceptions must not swallow this
        finally:
            unwound.append(1)

    for advances in range(4):
        branch = Branch(work)
        for _ in range(advances):
            branch.advance()
        branch.abandon()
        branch.abandon()
        assert branch.done
    assert unwound == [1, 1, 1]
    assert branch_threads() == before


def test_an_abandoned_branch_that_parks_while_it_unwinds_still_ends() -> None:
    def work(branch: Branch) -> None:
        try:
            branch.park(None)
        finally:
            branch.park(None)

    branch = Branch(work)
    branch.advance()
    branch.abandon()
    assert branch.done


def test_a_branch_that_was_never_advanced_does_not_run_when_abandoned() -> None:
    ran: list[int] = []
    branch = Branch(lambda _: ran.append(1))
    branch.abandon()
    assert ran == []


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_torch_state_is_the_owners(inference: bool, grad: bool) -> None:
    def work(branch: Branch) -> tuple[bool, bool]:
        branch.park(None)
        return torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    with torch.inference_mode(inference), torch.set_grad_enabled(grad):
        expected = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        assert finished(Branch(work)) == expected
        assert (torch.is_inference_mode_enabled(), torch.is_grad_enabled()) == expected


def test_tensors_made_under_inference_mode_can_be_used_by_the_owner() -> None:
    with torch.inference_mode():
        tensor = finished(Branch(lambda _: torch.ones(2)))
        tensor += 1
        assert tensor.is_inference()
    assert tensor.tolist() == [2, 2]


def test_context_variables_are_the_owners_and_changes_stay_in_the_branch() -> None:
    _variable.set("owner")

    def work(_: Branch) -> str:
        seen = _variable.get()
        _variable.set("branch")
        return seen

    assert finished(Branch(work)) == "owner"
    assert _variable.get() == "owner"


def test_several_branches_side_by_side_keep_apart() -> None:
    def work(number: int) -> Any:
        def run(branch: Branch) -> list[int]:
            seen = []
            for step in range(3):
                branch.park(number)
                seen.append(number * 10 + step)
            return seen

        return run

    branches = [Branch(work(number)) for number in range(4)]
    while not all(branch.done for branch in branches):
        for branch in branches:
            branch.advance()
    assert [branch.result() for branch in branches] == [[n * 10, n * 10 + 1, n * 10 + 2] for n in range(4)]


def test_many_branches_leave_no_thread() -> None:
    before = branch_threads()
    for _ in range(200):
        finished(Branch(lambda branch: branch.park(None)))
    assert branch_threads() == before
