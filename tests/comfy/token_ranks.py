"""A real ComfyUI forward, computed whole and computed by several ranks of a token split; a Case says which forward.

The ranks are threads of this process, joined over real lanes. What the families are tested for is in
test_token_families."""

from __future__ import annotations

import copy
import importlib
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from monarch_split.demo import tiny_models
from monarch_split.distributed.auth import ExchangeKeys
from monarch_split.distributed.exchange_lanes import LaneExchange
from monarch_split.distributed.exchange_link import SECRET_BYTES, ExchangeListener, join_as_driver
from monarch_split.distributed.families import find_family
from monarch_split.distributed.tokens import TokenSplit

SECONDS = 60.0  # for one forward of all ranks, on a machine that may be busy


@dataclass(frozen=True)
class Case:
    """One forward of a tiny family, made by one step of a real sampling.

    name: what is special about it. size: latent cells, as for tiny_models.empty_latent; audio: likewise, 0 for a
    latent without sound. tokens: length of the prompt. batch: latents. mask: (latent) -> noise mask. conditioning: more
    keyword arguments for tiny_models.conditioning. more: (options of the conditioning) -> nothing; adds what
    tiny_models knows nothing of. change: (model, arguments of the forward by name) -> nothing; adds what a sampling
    cannot, such as the residuals of a ControlNet. matters: arguments of the forward whose absence must change the
    output; "timestep" stands for timesteps that are not the same everywhere. instead: other values of arguments; each
    must change the output too.
    """

    family: str
    name: str
    size: tuple[int, ...] = ()
    audio: int | None = None
    tokens: int = 9
    batch: int = 1
    mask: Callable[[Any], Any] = lambda latent: None
    conditioning: Mapping[str, Any] = field(default_factory=dict)
    more: Callable[[dict[str, Any]], None] = lambda options: None
    change: Callable[[Any, dict[str, Any]], None] = lambda model, kwargs: None
    matters: tuple[str, ...] = ()
    instead: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.family}-{self.name}"


@dataclass
class Forward:
    """A captured call of a diffusion model."""

    model: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self, without: str | None = None, instead: Mapping[str, Any] | None = None) -> list[Any]:
        """The outputs of the stock forward; `without` names an argument that is left out (see Case.matters)."""
        import torch

        kwargs = {name: value for name, value in self.kwargs.items() if name != without} | dict(instead or {})
        with torch.inference_mode():
            args = own_copy(self.args)
            if without == "timestep":
                args = (args[0], same_everywhere(args[1]), *args[2:])
            return tensors(self.model(*args, **own_copy(kwargs)))


def capture(model: Any, case: Case) -> Forward:
    """The call that ComfyUI makes to the diffusion model of `model` (a ModelPatcher) for `case`."""
    import torch

    sample = importlib.import_module("comfy.sample")
    diffusion_model = model.model.diffusion_model
    calls: list[Forward] = []

    def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(Forward(diffusion_model, own_copy(args), own_copy(kwargs)))

    positive = tiny_models.conditioning(case.family, 1, case.tokens, **case.conditioning)
    case.more(positive[0][1])
    latent = tiny_models.empty_latent(case.family, case.batch, case.size or None, case.audio)
    if case.audio == 0:
        latent = latent.unbind()[0]
    noise = sample.prepare_noise(latent, 0)
    handle = diffusion_model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        settings = {"disable_pbar": True, "seed": 0, "noise_mask": case.mask(latent)}
        sample.sample(model, noise, 1, 1.0, "euler", "simple", positive, positive, latent, **settings)
    finally:
        handle.remove()
    with torch.inference_mode():
        case.change(diffusion_model, calls[0].kwargs)
    return calls[0]


def same_everywhere(timestep: Any) -> Any:
    """Timesteps [B, …] of frames or tokens -> [B]; each of several streams likewise."""
    if isinstance(timestep, tuple):
        return tuple(map(same_everywhere, timestep))
    return timestep.reshape(timestep.shape[0], -1).amax(1)


def own_copy(value: Any) -> Any:
    """`value` with tensors, lists and dictionaries that nobody else writes to."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: own_copy(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(own_copy(item) for item in value)
    return value


def tensors(output: Any) -> list[Any]:
    return list(output) if isinstance(output, (list, tuple)) else [output]


def largest_difference(some: Sequence[Any], others: Sequence[Any]) -> float:
    """NaN if there is one anywhere."""
    import torch

    return float(torch.stack([(one - other).abs().max() for one, other in zip(some, others, strict=True)]).max())


class Models:
    """Tiny models and, for each, a module of its own for every rank; the weights are the same memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loaded: dict[str, tuple[Any, list[Any]]] = {}

    def __call__(self, family: str) -> tuple[Any, list[Any]]:
        """(ModelPatcher, diffusion model of each of three ranks)"""
        if family not in self._loaded:
            path = tiny_models.write_model(family, self._folder)
            patcher = importlib.import_module("comfy.sd").load_diffusion_model(str(path))
            model = patcher.model.diffusion_model
            shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
            self._loaded[family] = patcher, [copy.deepcopy(model, dict(shared)) for _ in range(3)]
        return self._loaded[family]


class Ranks:
    """`size` ranks, joined once; they compute one forward after the other. Every wait of theirs has an end."""

    def __init__(self, size: int) -> None:
        secret, keys = os.urandom(SECRET_BYTES), ExchangeKeys.new(encrypted=False)
        self._listeners = [ExchangeListener(["127.0.0.1"], 0, keys) for _ in range(1, size)]
        self._pool = ThreadPoolExecutor(size)
        self._busy: Collection[Any] = ()
        self._number = 0
        addresses = [None, *(("127.0.0.1", listener.port) for listener in self._listeners)]

        def join(rank: int) -> LaneExchange:
            if rank == 0:
                return join_as_driver(addresses, secret, keys)
            return self._listeners[rank - 1].join(rank, addresses, secret, lambda: None)

        self._exchanges = self._everywhere(join, size)

    def splits(self, model: Any) -> list[TokenSplit]:
        """A TokenSplit for each rank, of the family of `model`, which has to be in the table."""
        family = find_family(model)
        assert family is not None, f"{type(model).__name__} is not in the table of families"
        return [TokenSplit(family, exchange) for exchange in self._exchanges]

    def run(
        self,
        splits: Sequence[TokenSplit],
        models: Sequence[Any],
        forward: Forward,
        shares: Sequence[float],
        **how: bool,
    ) -> list[Any]:
        """Outputs of `forward` on rank 0, each rank with a model and a copy of the arguments of its own.

        how: see TokenSplit.run.
        """
        import torch

        self._number += 1
        failed, deadline = threading.Event(), time.monotonic() + SECONDS

        def check() -> None:
            if failed.is_set():
                raise _OtherRankFailed
            if time.monotonic() > deadline:
                raise TimeoutError("a rank waits for tokens that do not come")

        def compute(rank: int) -> Any:
            split, model = splits[rank], models[rank]
            split.exchange.check = check
            try:
                with torch.inference_mode():
                    args, kwargs = own_copy(forward.args), own_copy(forward.kwargs)
                    return split.run(model, model, args, kwargs, shares, self._number, **how)
            except BaseException:
                failed.set()
                raise

        output, *others = self._everywhere(compute, len(shares))
        assert others == [None] * len(others)
        return tensors(output)

    def sent_bytes(self) -> list[int]:
        """What each rank has sent so far."""
        return [exchange.sent_bytes for exchange in self._exchanges]

    def close(self) -> None:
        for exchange in self._exchanges:
            exchange.close()
        for listener in self._listeners:
            listener.close()
        self._pool.shutdown()

    def _everywhere(self, work: Callable[[int], Any], size: int) -> list[Any]:
        if self._busy:
            raise TimeoutError("a rank is still busy with an earlier forward")
        futures = [self._pool.submit(work, rank) for rank in range(size)]
        self._busy = wait(futures, SECONDS + 10).not_done
        problems = [future.exception(timeout=0) for future in futures]
        for problem in sorted(filter(None, problems), key=lambda problem: isinstance(problem, _OtherRankFailed)):
            raise problem
        return [future.result() for future in futures]


class _OtherRankFailed(Exception):
    """This rank stopped because another one did, which says why."""
