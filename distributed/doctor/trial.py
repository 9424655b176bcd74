"""The last check of a worker: forwards of a tiny model are split with it, by rows and by tokens, as a render's are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..addresses import Address
from ..cluster import Cluster
from ..outputs import relative_difference, tolerance
from ..report import Report
from ..session import Session
from .check import Check, failed, passed
from .machine import Here, TinyModel
from .patience import within

# One to see that the worker computes the same, and one that is split.
_FORWARDS = 2
_ROWS = {"rows": 2, "tokens": 1}
# Loading a tiny model and making an NCCL communicator take seconds.
_SECONDS = 60.0


def try_split(address: Address, cluster: Cluster, here: Here) -> Iterator[Check]:
    """Split forwards with the worker at `address`, the only one of `cluster`."""
    try:
        tiny = here.tiny()
    except Exception as error:  # whatever ComfyUI raises while it loads a model is a finding
        yield failed(
            f"split {address}",
            f"the tiny model cannot be made here ({type(error).__name__}: {error})",
            "start ComfyUI by hand and see what it says",
        )
        return
    for mode in _ROWS:
        yield _try(f"{mode} {address}", mode, tiny, cluster, here)


def _try(name: str, mode: str, tiny: TinyModel, cluster: Cluster, here: Here) -> Check:
    report = Report(mode)
    args, kwargs = tiny.inputs(_ROWS[mode])
    models: list[Any] = []

    def alone(model: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        models.append(model)
        return model(*args, **kwargs)

    expected = tiny.replica.forward(args, kwargs, alone)

    def split(model: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        # A replica watches for its own interrupt, in a way that cannot travel.
        options = {name: value for name, value in kwargs["transformer_options"].items() if not callable(value)}
        return session.forward(model, tuple(args), {**kwargs, "transformer_options": options})

    session = Session(
        cluster,
        here.runtime.versions,
        report,
        lambda: tiny.recipe,
        check=within(_SECONDS),
        model=models[0],
        family=tiny.replica.family,
    )
    fix = "look at what the worker printed, and start it again"
    try:
        with session:
            outputs = [tiny.replica.forward(args, kwargs, split) for _ in range(_FORWARDS)]
    except Exception as error:  # as above; and Impatient
        return failed(name, f"a forward of the tiny model failed ({type(error).__name__}: {error})", fix)
    if not report.forwards_split:
        sentence = "; ".join(report.events + report.reasons) or "nothing was split"
        detail, _, advice = sentence.partition("; ")
        return failed(name, f"the tiny model was not split: {detail}", advice or fix)
    difference = max(relative_difference(output, expected) for output in outputs)
    if not difference <= tolerance(expected):
        return failed(
            name, f"a split of the tiny model gives something else (relative difference {difference:.1e})", fix
        )
    return passed(name, f"a tiny model was split by {mode}; relative difference {difference:.1e}")
