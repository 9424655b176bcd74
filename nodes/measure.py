"""The two nodes that `monarch bench` puts into a graph: they measure how a MODEL is sampled, and keep the result.

They change nothing of what is computed. A new `run` has everything behind the first one computed anew.
"""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import comfy.model_management
import folder_paths
import torch
from comfy.patcher_extension import WrappersMP
from comfy_api.latest import io
from safetensors.torch import save_file

from ..distributed.outputs import synchronize
from ..distributed.report import Report
from ..distributed.usage import Usage
from .notify import followed

_KEY = "monarch_measure"
_RUNS_KEPT = 4
# One entry for each sampling, by run; of the last few runs.
_samplings: OrderedDict[str, list[dict[str, Any]]] = OrderedDict()
_usage = Usage()
# The menu is not the place for them, as far as this ComfyUI can leave something out of it.
_HIDDEN: dict[str, Any] = (
    {"is_dev_only": True} if "is_dev_only" in io.Schema.__dataclass_fields__ else {"is_experimental": True}
)
_RUN_TOOLTIP = "The run that is measured; another one is computed anew."


class MonarchMeasure(io.ComfyNode):
    """Has every sampling of this MODEL measured."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="MonarchMeasure",
            display_name="Monarch Measure",
            category="monarch/bench",
            description="Measures how this model is sampled, for monarch bench.",
            inputs=[
                io.Model.Input("model", tooltip="The model to measure; what samples it is not changed."),
                io.String.Input("run", tooltip=_RUN_TOOLTIP),
            ],
            outputs=[io.Model.Output(tooltip="The same model.")],
            **_HIDDEN,
        )

    @classmethod
    def execute(cls, model: Any, run: str) -> io.NodeOutput:
        clone = model.clone()
        clone.remove_wrappers_with_key(WrappersMP.OUTER_SAMPLE, _KEY)
        # Before a split is attached, so that this wrapper is around that one.
        clone.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, _KEY, _MeasuredSampling(run))
        return io.NodeOutput(clone)


class _MeasuredSampling:
    """OUTER_SAMPLE wrapper. Holds the name of its run only."""

    def __init__(self, run: str) -> None:
        self._run = run

    def __call__(
        self, executor: Any, noise: torch.Tensor, latent: Any, sampler: Any, sigmas: Any, *args: Any, **kwargs: Any
    ) -> Any:
        from ..distributed.replica import loaded_file

        reports: list[Report] = []
        _usage.begin()
        began = time.perf_counter()
        with followed(reports.append):
            output = executor(noise, latent, sampler, sigmas, *args, **kwargs)
        synchronize(_parts(output))
        seconds = time.perf_counter() - began
        patcher = executor.class_obj.model_patcher
        function = getattr(sampler, "sampler_function", None)
        _note(
            self._run,
            {
                "seconds": seconds,
                "steps": max(0, len(sigmas) - 1),
                "sampler": getattr(function, "__name__", type(sampler).__name__).removeprefix("sample_"),
                "latent": [list(part.shape) for part in _parts(output)],
                "compute_dtype": str(patcher.model.get_dtype()).removeprefix("torch."),
                "peak_memory": _usage.taken(),
                "model": _described(loaded_file(patcher)),
                "reports": [report.as_dict() for report in reports],
            },
        )
        return output


class MonarchMeasured(io.ComfyNode):
    """Ends a measured run: what was measured goes into the prompt's history, the sampled tensors into a file."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="MonarchMeasured",
            display_name="Monarch Measured",
            category="monarch/bench",
            description="Keeps what monarch bench measures: times, memory and the sampled tensors.",
            inputs=[
                io.AnyType.Input("samples", tooltip="What a sampler gives: latents or images."),
                io.String.Input("run", tooltip=_RUN_TOOLTIP),
            ],
            outputs=[],
            is_output_node=True,
            **_HIDDEN,
        )

    @classmethod
    def execute(cls, samples: Any, run: str) -> io.NodeOutput:
        from .attach import versions

        device = comfy.model_management.get_torch_device()
        measured = {
            "samplings": _samplings.get(run, []),
            "versions": asdict(versions()),
            "device": comfy.model_management.get_torch_device_name(device),
        }
        return io.NodeOutput(ui={"monarch_measured": [measured], "monarch_tensors": _saved(samples)})


def _note(run: str, sampling: dict[str, Any]) -> None:
    _samplings.setdefault(run, []).append(sampling)
    while len(_samplings) > _RUNS_KEPT:
        _samplings.popitem(last=False)


def _parts(output: Any) -> list[torch.Tensor]:
    """The tensors of a latent: itself, or those of ComfyUI's NestedTensor."""
    return [output] if isinstance(output, torch.Tensor) else list(output.unbind())


def _described(path: Path | None) -> dict[str, Any] | None:
    """The file of a MODEL, as far as it is known."""
    if path is None:
        return None
    from ..distributed.files import file_digest
    from ..formats import inspect_file

    report = inspect_file(path)
    return {
        "file": path.name,
        "bytes": report.bytes,
        "digest": file_digest(path),
        "format": report.format,
        "family": report.family,
    }


def _saved(samples: Any) -> list[dict[str, str]]:
    """Save tensors in ComfyUI's folder for temporary files, and name the file as its history names files."""
    if isinstance(samples, dict):
        samples = samples.get("samples")
    if not isinstance(samples, torch.Tensor) and not hasattr(samples, "unbind"):
        return []
    tensors = {str(index): part.detach().to("cpu").contiguous() for index, part in enumerate(_parts(samples))}
    folder = Path(folder_paths.get_temp_directory())
    folder.mkdir(parents=True, exist_ok=True)
    name = f"monarch_{uuid.uuid4().hex}.safetensors"
    save_file(tensors, folder / name)
    return [{"filename": name, "subfolder": "", "type": "temp"}]
