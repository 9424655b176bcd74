"""Drives sessions in tests the way the nodes do, with the reference model in place of ComfyUI's."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from monarch_split.demo.reference import TINY, ReferenceConfig, ReferenceDiT, sample
from monarch_split.demo.reference_runtime import FAMILY, LOADER
from monarch_split.distributed import joining, ledger
from monarch_split.distributed.addresses import Address
from monarch_split.distributed.auth import own_identity
from monarch_split.distributed.cluster import Cluster
from monarch_split.distributed.files import FileRef, file_digest
from monarch_split.distributed.folders import configuration_folder
from monarch_split.distributed.plan import Costs, History
from monarch_split.distributed.recipe import Recipe
from monarch_split.distributed.report import Report
from monarch_split.distributed.session import Session
from monarch_split.distributed.versions import own_versions
from monarch_split.tests.worker_process import Worker, shared_forge

SAME = 1e-5


class Stopped(BaseException):
    """What `check` raises, a BaseException as ComfyUI's interrupt is."""


def recipe_of(path: Path) -> Recipe:
    return Recipe({"loader": LOADER}, FileRef(None, path.name, path.stat().st_size, file_digest(path)), path)


def open_session(
    addresses: Sequence[str],
    recipe: Recipe,
    *,
    mode: str = "rows",
    check: Callable[[], None] = lambda: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    describe: Callable[[], Recipe] | None = None,
    model: ReferenceDiT | None = None,
    cluster: Mapping[str, Any] | None = None,
) -> Session:
    workers = tuple(Address(host, int(port)) for host, _, port in (address.rpartition(":") for address in addresses))
    return Session(
        Cluster("test", workers, **(cluster or {})),
        own_versions(None),
        Report(mode),
        describe or (lambda: recipe),
        check=check,
        progress=progress,
        model=model,
        family=FAMILY,
    )


def sample_once(
    session: Session | None,
    forward: Callable[..., Any],
    config: ReferenceConfig = TINY,
    *,
    batch: int = 1,
    cfg: float = 4.0,
    steps: int = 3,
    size: int = 64,
    tokens: int = 16,
    on_step: Callable[[int], None] = lambda step: None,
) -> torch.Tensor:
    """The latent of a small render, split by `session` or, without one, computed here."""

    def split(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs) if session is None else session.forward(forward, args, kwargs)

    return sample(
        split,
        config,
        steps=steps,
        cfg=cfg,
        seed=7,
        batch=batch,
        height=size,
        width=size,
        tokens=tokens,
        on_step=lambda step, _: on_step(step),
    )


def render(
    addresses: Sequence[str], recipe: Recipe, model: Callable[..., Any], *, mode: str = "rows", **how: Any
) -> tuple[float, Report]:
    """(largest difference to the same render in this process alone, report) of one run."""
    session_how = {name: how.pop(name) for name in ("check", "progress", "describe", "cluster") if name in how}
    module = model if isinstance(model, ReferenceDiT) else None
    with open_session(addresses, recipe, mode=mode, model=module, **session_how) as session:
        split = sample_once(session, model, **how)
    how.pop("on_step", None)
    return difference(split, sample_once(None, model, **how)), session.report


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return (a - b).abs().max().item()


@functools.cache
def make_model() -> ReferenceDiT:
    return ReferenceDiT(TINY)


@functools.cache
def _three() -> list[Worker]:
    return [shared_forge().worker(name) for name in ("one", "two", "three")]


def three_workers(monkeypatch: pytest.MonkeyPatch) -> list[Worker]:
    """Workers that behave, of which this process has learned nothing yet; they end with it."""
    forget(monkeypatch)
    for worker in _three():
        worker.behave()
        worker.mark()
    return _three()


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever runs have learned of workers so far."""
    monkeypatch.setattr(ledger, "_history", History())
    monkeypatch.setattr(ledger, "_agreed", set())
    monkeypatch.setattr(joining, "_absences", {})


def share_identity(folder: Path) -> None:
    """Give a configuration folder this process's keys, so that workers of the same user serve its driver."""
    own_identity()
    shutil.copy(configuration_folder() / "identity.json", folder)


def equal_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares do not follow the pace: other work on the machine of the tests would decide what is split."""
    monkeypatch.setattr(Costs, "record_pace", lambda *_, **__: None)


def guided(model: ReferenceDiT, conditionings: int, forwards: int, session: Any = None) -> torch.Tensor:
    """Three steps with prompts of unequal lengths, each of which takes `forwards` forwards of one row."""
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randn(1, 40 + 8 * index, 32, generator=generator) for index in range(conditionings)]
    x = torch.randn(1, 16, 8, 8, generator=generator)

    def conditioning(index: int, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        output = x
        for _ in range(forwards):
            kwargs = {"context": prompts[index], "transformer_options": {"cond_or_uncond": [index]}}
            output = session.forward(model, (output, t), kwargs) if session else model(output, t, **kwargs)
        return output

    for t in (torch.tensor([0.9]), torch.tensor([0.6]), torch.tensor([0.3])):
        calls: list[Callable[[], torch.Tensor]] = [
            (lambda index=index, x=x, t=t: conditioning(index, x, t)) for index in range(conditionings)
        ]

        def stock(calls: list[Callable[[], torch.Tensor]] = calls) -> list[torch.Tensor]:
            return [call() for call in calls]

        results = session.conditionings(calls, stock, tuple(x.shape)) if session else stock()
        x = x - 0.1 * torch.stack(results).mean(0)
    return x
