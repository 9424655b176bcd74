"""Attaches a split to a MODEL through ComfyUI's wrappers, and carries it out while something samples that MODEL.

What goes to which machine is session's business. Nothing lasts longer than a run but the wrapper on the MODEL's clone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import comfy.model_management
import comfy.samplers
import comfy.utils
import torch
from comfy.patcher_extension import WrappersMP, add_wrapper_with_key

from ..browser.live import LiveRun
from ..browser.names import names
from ..browser.settings import chosen_cluster, settings_of_prompt
from ..browser.turns import turns
from ..distributed.cluster import ConfigurationError
from ..distributed.compute_path import dequantised
from ..distributed.families import find_family
from ..distributed.recipe import Recipe
from ..distributed.replica import describe, forward_replaced, loaded_file, note_file
from ..distributed.report import Report
from ..distributed.session import Session
from ..formats import UnsupportedFile, gguf_refusal, is_gguf_model, require_loadable
from .stopping import RenderStopped, require_split
from .this_comfyui import versions
from .unloading import follow

_KEY = "monarch"


def attach(model: Any, mode: str, on_report: Callable[[Report], None]) -> Any:
    """A clone of MODEL whose sampling is split as `mode` says (one of split.SPLIT_MODES); replaces an earlier split.

    `on_report` is called after each run. Raises UnsupportedFile for a MODEL from a file that ComfyUI cannot have read
    rightly: GGUF, a format that it does not know, or a damaged file.
    """
    clone = model.clone()
    clone.remove_wrappers_with_key(WrappersMP.OUTER_SAMPLE, _KEY)
    if mode != "off":
        if is_gguf_model(model):
            raise UnsupportedFile(gguf_refusal(patcher=model))
        path = loaded_file(model)
        if path is not None:
            require_loadable(path)
        note_file(model)
        clone.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, _KEY, _SplitSampling(mode, on_report))
    return clone


class _SplitSampling:
    """OUTER_SAMPLE wrapper: opens a session for the length of one sampling. Holds settings only."""

    def __init__(self, mode: str, on_report: Callable[[Report], None]) -> None:
        self._mode = mode
        self._on_report = on_report

    def __call__(
        self,
        executor: Any,
        noise: torch.Tensor,
        latent_image: Any,
        sampler: Any,
        sigmas: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        guider = executor.class_obj
        report = Report(self._mode, steps=max(0, len(sigmas) - 1))
        settings = settings_of_prompt()
        try:
            cluster = chosen_cluster(settings.cluster)
        except ConfigurationError as error:
            report.add_reason(str(error))
            self._on_report(report)
            if settings.stop:
                raise RenderStopped(report.reasons) from None
            return executor(noise, latent_image, sampler, sigmas, *args, **kwargs)
        diffusion_model = guider.model_patcher.model.diffusion_model

        def check() -> None:
            comfy.model_management.throw_exception_if_processing_interrupted()
            live.look()

        def look() -> None:
            live.look()
            if settings.stop:
                require_split(report, session)

        session = Session(
            cluster,
            versions(),
            report,
            lambda: _described(guider.model_patcher, live),
            check=check,
            progress=_FileProgress(),
            dequantised=lambda formats: dequantised(guider.model_patcher.model, formats),
            model=diffusion_model,
            family=find_family(diffusion_model),
        )
        live = LiveRun(report, session, cluster.workers)
        args, kwargs = _with_callback(live.step, args, kwargs)
        remember = False
        try:
            with turns.render(), session, _SplitModel(guider, session, len(cluster.workers) + 1, look).attached():
                if session.splits_tokens or _expected_rows(guider, noise) > 1:
                    session.start()
                    look()
                output = executor(noise, latent_image, sampler, sigmas, *args, **kwargs)
                live.look(at_once=True)
            remember = True
            return output
        except BaseException as error:
            # How many of its steps it got to is not known here.
            report.steps = 0
            remember = isinstance(error, RenderStopped)
            raise
        finally:
            live.end(remember=remember)
            self._on_report(report)


def _with_callback(
    told: Callable[[int], None], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """OUTER_SAMPLE's arguments after the sigmas, with a callback that also tells how many steps are done."""
    given = kwargs.get("callback", args[1] if len(args) > 1 else None)

    def callback(step: int, *rest: Any) -> None:
        told(step + 1)
        if given is not None:
            given(step, *rest)

    if len(args) > 1:
        return (args[0], callback, *args[2:]), kwargs
    return args, {**kwargs, "callback": callback}


def described(patcher: Any) -> Recipe:
    """The recipe of a MODEL (comfy ModelPatcher) that workers are about to load, whose file is known from now on.

    Raises what replica.describe raises.
    """
    recipe = describe(patcher)
    follow(patcher, recipe.file.digest)
    names.note(recipe.file.digest, recipe.file.name)
    return recipe


def _described(patcher: Any, live: LiveRun) -> Recipe:
    recipe = described(patcher)
    live.uses(recipe.file.name)
    return recipe


class _SplitModel:
    """The wrappers of one run, innermost, so that other packs' wrappers see one ordinary model call."""

    def __init__(self, guider: Any, session: Session, nodes: int, look: Callable[[], None]) -> None:
        """nodes: how many there are. look: called after each guidance step."""
        self._options = guider.model_options
        self._model = guider.model_patcher.model
        self._diffusion_model = self._model.diffusion_model
        self._session = session
        self._nodes = nodes
        self._look = look
        self._entered = 0
        self._stock_forward: Callable[..., Any] | None = None
        self._apart: dict[Hashable, bool] = {}

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        kinds = {WrappersMP.CALC_COND_BATCH: self._calc_cond_batch, WrappersMP.APPLY_MODEL: self._apply_model}
        for kind, wrapper in kinds.items():
            add_wrapper_with_key(kind, _KEY, wrapper, self._options, is_model_options=True)
        try:
            yield
        finally:
            for kind in kinds:
                self._options["transformer_options"]["wrappers"][kind].pop(_KEY, None)

    # --- every model call: one forward --------------------------------------------------------------------------

    def _apply_model(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        if executor.class_obj is not self._model:
            self._session.report.add_reason("a second model in the same sampling is not split")
            return executor(*args, **kwargs)
        if self._model.diffusion_model is not self._diffusion_model:
            self._session.report.add_reason("another node swapped the model during sampling (compiled?)")
            return executor(*args, **kwargs)
        if self._entered == 0 and forward_replaced(self._diffusion_model):
            self._session.report.add_reason("another node replaced the model's forward, or a part of it")
            return executor(*args, **kwargs)
        with self._own_forward():
            return executor(*args, **kwargs)

    @contextlib.contextmanager
    def _own_forward(self) -> Iterator[None]:
        """The model instance's forward is ours for the length of a model call; calls may be nested (see branches)."""
        if self._entered == 0:
            self._stock_forward = self._diffusion_model.forward
            self._diffusion_model.forward = self._forward
        self._entered += 1
        try:
            yield
        finally:
            self._entered -= 1
            if self._entered == 0:
                del self._diffusion_model.forward

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        assert self._stock_forward is not None
        return self._session.forward(self._stock_forward, args, kwargs)

    # --- every guidance step: one or more conditionings ---------------------------------------------------------

    def _calc_cond_batch(
        self, executor: Any, model: Any, conds: list[Any], x: torch.Tensor, timestep: torch.Tensor, options: Any
    ) -> list[torch.Tensor]:
        results = self._conditionings(executor, model, conds, x, timestep, options)
        self._look()
        return results

    def _conditionings(
        self, executor: Any, model: Any, conds: list[Any], x: torch.Tensor, timestep: torch.Tensor, options: Any
    ) -> list[torch.Tensor]:
        active = [index for index, cond in enumerate(conds) if cond]

        def only(index: int) -> Callable[[], torch.Tensor]:
            alone = [cond if i == index else None for i, cond in enumerate(conds)]
            return lambda: executor(model, alone, x, timestep, options)[index]

        def stock() -> list[torch.Tensor]:
            results = executor(model, conds, x, timestep, options)
            return [results[index] for index in active]

        if model is not self._model or not self._worth_side_by_side(conds, active, x, timestep):
            return executor(model, conds, x, timestep, options)
        results = self._session.conditionings([only(index) for index in active], stock, tuple(x.shape))
        by_index = dict(zip(active, results, strict=True))
        return [by_index[index] if index in by_index else torch.zeros_like(x) for index in range(len(conds))]

    def _worth_side_by_side(self, conds: list[Any], active: list[int], x: torch.Tensor, timestep: torch.Tensor) -> bool:
        """Whether to share out whole conditionings rather than the rows of each of their forwards."""
        if len(active) < 2 or self._nodes < 2 or any("hooks" in cond for index in active for cond in conds[index]):
            return False
        rounds_apart = -(-len(active) // self._nodes) * x.shape[0]
        rounds_by_rows = len(active) * -(-x.shape[0] // self._nodes)
        if rounds_apart > rounds_by_rows:
            return False
        entries = [cond for index in active for cond in conds[index]]
        if any("timestep_start" in cond or "timestep_end" in cond for cond in entries):
            return not _batched_together(self._model, conds, active, x, timestep)
        key = (tuple(x.shape), tuple(cond.get("uuid") for cond in entries))
        if key not in self._apart:
            self._apart[key] = not _batched_together(self._model, conds, active, x, timestep)
        return self._apart[key]


def _batched_together(model: Any, conds: list[Any], active: list[int], x: torch.Tensor, timestep: torch.Tensor) -> bool:
    """Whether ComfyUI will put all these conditionings into one forward: same shapes, and memory enough."""
    parts = [comfy.samplers.get_area_and_mult(cond, x, timestep) for index in active for cond in conds[index]]
    parts = [part for part in parts if part is not None]
    if len(parts) < 2:
        return True
    if not all(comfy.samplers.can_concat_cond(part, parts[0]) for part in parts):
        return False
    shapes: dict[str, list[Any]] = {}
    for part in parts:
        for name, value in part.conditioning.items():
            shapes.setdefault(name, []).append(value.size())
    first = parts[0].input_x.shape
    required = model.memory_required([len(parts) * first[0], *first[1:]], cond_shapes=shapes)
    return required * 1.5 < _free_memory(model, x.device)


def _free_memory(model: Any, device: torch.device) -> float:
    patcher = model.current_patcher
    if hasattr(patcher, "get_free_memory"):
        return patcher.get_free_memory(device)
    return comfy.model_management.get_free_memory(device)


def _expected_rows(guider: Any, noise: torch.Tensor) -> int:
    """Rows of this sampling's forwards, as far as can be told before it begins; a wrong guess costs only time."""
    conds = {name: len(entries) for name, entries in guider.conds.items()}
    if getattr(guider, "cfg", None) == 1.0 and not guider.model_options.get("disable_cfg1_optimization", False):
        conds.pop("negative", None)
    return noise.shape[0] * sum(conds.values())


class _FileProgress:
    """Shows a progress bar while a model file is sent to a worker."""

    def __init__(self) -> None:
        self._bar: Any = None

    def __call__(self, done: int, total: int) -> None:
        if self._bar is None:
            self._bar = comfy.utils.ProgressBar(total)
        self._bar.update_absolute(done, total)
