"""A split run computes what one process computes, and sends no more than it must. Real workers."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch

from monarch_split.demo.reference import TINY, ReferenceDiT
from monarch_split.distributed.recipe import Recipe
from monarch_split.tests.driving import (
    SAME,
    difference,
    guided,
    open_session,
    render,
    sample_once,
)
from monarch_split.tests.worker_process import Worker

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="workers run on Linux")


class TestTheResult:
    @pytest.mark.parametrize("batch", [1, 2, 3, 5])
    @pytest.mark.parametrize("cfg", [1.0, 4.0])
    @pytest.mark.parametrize("count", [1, 3])
    def test_rows_over_workers_are_the_rows_of_one_process(
        self, addresses: list[str], recipe: Recipe, model: ReferenceDiT, count: int, cfg: float, batch: int
    ) -> None:
        worst, report = render(addresses[:count], recipe, model, batch=batch, cfg=cfg)
        assert worst <= SAME
        assert report.forwards == 3
        if batch == 1 and cfg == 1.0:
            assert report.forwards_split == 0
            assert "One machine" in report.line()
            assert "one row" in report.line()
        else:
            # The first forward only compares the machines.
            assert report.forwards_split == 2
            assert "by rows: 2 of 3 forwards" in report.line()
            assert sum(report.rows.values()) == batch * (1 if cfg == 1.0 else 2)

    @pytest.mark.parametrize("forwards", [1, 3])
    @pytest.mark.parametrize("conditionings", [2, 3])
    @pytest.mark.parametrize("count", [1, 3])
    def test_unequal_conditionings_side_by_side_are_those_of_one_process(
        self, addresses: list[str], recipe: Recipe, model: ReferenceDiT, count: int, conditionings: int, forwards: int
    ) -> None:
        with open_session(addresses[:count], recipe) as session:
            split = guided(model, conditionings, forwards, session=session)
        assert difference(split, guided(model, conditionings, forwards)) <= SAME
        assert session.report.split == "conditionings"
        # The first step compares the machines; each of the two others is split with all of its forwards.
        assert session.report.forwards_split == 2 * conditionings * forwards
        assert sum(session.report.rows.values()) == conditionings
        assert session.report.seconds > 0

    def test_forwards_that_write_into_their_arguments_do_not_spoil_later_ones(
        self, workers: list[Worker], recipe: Recipe, model: ReferenceDiT
    ) -> None:
        workers[0].behave(in_place=1)

        def writes(x: torch.Tensor, t: torch.Tensor, *, context: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            output = model(x, t, context=context, **kwargs)
            context.zero_()
            x.zero_()
            return output

        # As in ComfyUI, every step has arguments of its own with equal content.
        x, t = torch.randn(4, 16, 8, 8), torch.full((4,), 0.5)
        context = torch.randn(4, 64, 32)
        with open_session([workers[0].address], recipe) as session:
            for _ in range(4):
                kwargs = {"context": context.clone(), "transformer_options": {}}
                output = session.forward(writes, (x.clone(), t), kwargs)
                assert difference(output, model(x, t, context=context)) <= SAME
        assert session.report.forwards_split == 3

    def test_a_conditioning_that_changes_in_place_is_sent_again(
        self, addresses: list[str], recipe: Recipe, model: ReferenceDiT
    ) -> None:
        x, t, context = torch.randn(2, 16, 8, 8), torch.full((2,), 0.5), torch.randn(2, 64, 32)
        with open_session(addresses[:1], recipe) as session:
            for _ in range(4):
                output = session.forward(model, (x, t), {"context": context})
                assert difference(output, model(x, t, context=context)) <= SAME
                context.mul_(0.9)

    def test_a_worker_that_computes_something_else_is_left_out(
        self, workers: list[Worker], recipe: Recipe, model: ReferenceDiT
    ) -> None:
        workers[1].behave(noise=0.1)
        worst, report = render([worker.address for worker in workers], recipe, model, batch=3)
        assert worst <= SAME
        assert report.forwards_split == 2
        assert set(report.rows) == {"this machine", "one", "three"}
        assert "two computes something else than this machine" in report.line()

    def test_arguments_that_cannot_be_sent_keep_the_forward_here(
        self, addresses: list[str], recipe: Recipe, model: ReferenceDiT
    ) -> None:
        x, t, context = torch.randn(2, 16, 8, 8), torch.full((2,), 0.5), torch.randn(2, 64, 32)
        with open_session(addresses[:1], recipe) as session:
            output = session.forward(model, (x, t), {"context": context, "memo": object()})
        assert difference(output, model(x, t, context=context)) == 0
        assert "object" in session.report.line()
        assert "cannot be sent" in session.report.line()


class TestWhatIsSaid:
    def test_the_pace_is_that_of_the_steps_after_the_first_which_also_loads(
        self, addresses: list[str], recipe: Recipe, model: ReferenceDiT
    ) -> None:
        loading, stepping = 0.6, 0.05
        pauses = iter([loading])

        def slow(*args: Any, **kwargs: Any) -> torch.Tensor:
            time.sleep(next(pauses, stepping))
            return model(*args, **kwargs)

        with open_session(addresses[:1], recipe) as session:
            session.report.steps = 3
            sample_once(session, slow)
        assert session.report.seconds > loading + 2 * stepping
        assert stepping < (session.report.seconds_per_step or 0) < loading / 2

    def test_the_pace_of_a_single_step_is_its_own(self, recipe: Recipe, model: ReferenceDiT) -> None:
        with open_session([], recipe) as session:
            session.report.steps = 1
            sample_once(session, model, steps=1)
        assert session.report.seconds_per_step == session.report.seconds


class TestWhatIsSent:
    def test_unchanged_conditioning_travels_once_per_run(
        self, addresses: list[str], recipe: Recipe, model: ReferenceDiT
    ) -> None:
        row = 512 * TINY.context_width * 4
        sent = []
        for steps in (3, 8):
            with open_session(addresses[:1], recipe) as session:
                sample_once(session, model, steps=steps, tokens=512)
            sent.append(session.report.bytes_sent)
        # In the first run the machines compare the last row and then split, which the second run need not.
        assert sent[0] >= row
        assert sent[1] - sent[0] < row
        assert sent[1] >= row

    def test_changed_conditioning_travels_each_time(
        self, addresses: list[str], recipe: Recipe, model: ReferenceDiT
    ) -> None:
        x, t = torch.randn(2, 16, 8, 8), torch.full((2,), 0.5)
        with open_session(addresses[:1], recipe) as session:
            for _ in range(12):
                session.forward(model, (x, t), {"context": torch.randn(2, 512, 32)})
        assert session.report.bytes_sent >= 12 * 512 * 32 * 4
