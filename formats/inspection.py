"""What a model file is and whether Monarch can use it, from its first bytes and header alone.

Puts together what the handlers say about its layers; the reports are for programs and people alike.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from .contents import CONTENTS, content_of
from .families import family_of
from .floats import OTHER
from .gguf import MAGIC as GGUF_MAGIC
from .gguf import gguf_refusal
from .header import Header, UnreadableFile, display_name, open_regular, read_header
from .header_text import quote
from .layers import Layer, read_layers
from .markers import LEGACY_MARK
from .registry import ComputePath, Fault, FormatHandler, Kind, Node, Unknown, find_handler, handlers

# ComfyUI opens these with torch.load, whatever they hold, and everything else that it lists with safetensors.
PICKLE_SUFFIXES = frozenset({".bin", ".ckpt", ".pkl", ".pt", ".pt2", ".pth"})
_PICKLE_STARTS = (b"PK\x03\x04", b"\x80")  # torch.save since 1.6, and before
_PROBLEMS_NAMED = 5
# What tensors outside of layers (norms, biases, tables) count as when a file is named after most of its parameters.
_PLAIN_DTYPES = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F8_E4M3": "fp8_e4m3fn", "F8_E5M2": "fp8_e5m2"}


class UnsupportedFile(ValueError):
    """Monarch cannot use a model file. The message names the file, the cause and the next step."""


@dataclass(frozen=True, slots=True)
class FileReport:
    """What `monarch inspect` shows of one file; the fields are those of its JSON.

    format: a handler's name (of most parameters; formats_of has all), 'other' (floats that ComfyUI casts), 'unknown',
    'gguf', 'pickle' or 'unreadable';
    family: architecture, None while unknown; parameters: of the model, 0 where the content is not looked at;
    bytes: size on disk; layers: weight matrices per format; loadable: as a diffusion model; problems: sentences for a
    person, also for files that are loadable; memory_bytes: estimate for the loaded weights on one node, as stored;
    content: 'diffusion_model', a name of contents.CONTENTS, None while unknown.
    """

    file: str
    format: str
    family: str | None
    parameters: int
    bytes: int
    layers: Mapping[str, int]
    loadable: bool
    problems: list[str]
    memory_bytes: int
    content: str | None = None

    @property
    def refused(self) -> bool:
        """Whether something is wrong with it, as a diffusion model or as what nobody knows."""
        return not self.loadable and self.content not in CONTENTS


def inspect_file(path: str | os.PathLike[str]) -> FileReport:
    """Describe a model file without reading any weights. A bad or missing file gives a report, not an exception."""
    path = Path(path)
    size = 0
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(len(GGUF_MAGIC))
        if start == GGUF_MAGIC:
            return _brief(path, "gguf", size, gguf_refusal(path))
        pickle_suffix = path.suffix.lower() in PICKLE_SUFFIXES
        if pickle_suffix and start.startswith(_PICKLE_STARTS):
            return _brief(path, "pickle", size, _pickle_problem(path), loadable=True)
        report = _describe(read_header(path))
    except UnreadableFile as error:
        return _brief(path, "unreadable", size, str(error))
    except OSError as error:
        return _brief(path, "unreadable", size, str(UnreadableFile(path, str(error), "Check the disk it is on.")))
    return _misnamed(report) if pickle_suffix else report


def require_loadable(path: str | os.PathLike[str]) -> FileReport:
    """The file's report, if Monarch can use the file. Raises UnsupportedFile with a message for a person if not."""
    report = inspect_file(path)
    if not report.loadable:
        raise UnsupportedFile(" ".join(report.problems))
    return report


def require_splittable(path: str | os.PathLike[str]) -> FileReport:
    """The file's report, if a worker can load the file. Raises UnsupportedFile for whatever is not safetensors, too."""
    report = require_loadable(path)
    if report.format == "pickle":
        raise UnsupportedFile(" ".join(report.problems))
    return report


def compute_paths(report: FileReport, node: Node) -> dict[str, ComputePath]:
    """How ComfyUI multiplies with the layers of each format in a report on a machine, with its default options."""
    by_name = {handler.name: handler for handler in handlers()}
    return {name: by_name[name].compute_path(node) if name in by_name else "unavailable" for name in report.layers}


def formats_of(report: FileReport) -> list[str]:
    """The format that the file is called by, and behind it all others that its layers are quantised in."""
    quantised = {handler.name for handler in handlers() if handler.kind is Kind.QUANTISED}
    others = [name for name in report.layers if name in quantised and name != report.format]
    return [report.format, *sorted(others, key=lambda name: -report.layers[name])]


@dataclass(slots=True)
class _Tally:
    """What is counted over the layers of one format."""

    layers: int = 0
    parameters: int = 0


def _describe(header: Header) -> FileReport:
    layers = read_layers(header)
    tallies: dict[FormatHandler | Unknown, _Tally] = {}
    faults: list[tuple[Layer, Fault]] = []
    loose: Counter[str] = Counter()
    for layer in layers:
        handler = find_handler(layer)
        if handler is None:
            for part, info in layer.parts.items():
                if part != LEGACY_MARK:
                    loose[info.dtype] += info.elements
            continue
        tally = tallies.setdefault(handler, _Tally())
        tally.layers += 1
        tally.parameters += handler.parameters(layer)
        fault = handler.fault(layer)
        if fault is not None:
            faults.append((layer, fault))
    family = family_of(header.tensors)
    content = content_of(header.tensors, family)
    problems = [content.problem(display_name(header.path))] if content else _problems(header, faults)
    return FileReport(
        file=str(header.path),
        format=_name(tallies, loose),
        family=None if content else family,
        parameters=sum(tally.parameters for tally in tallies.values()) + sum(loose.values()),
        bytes=header.file_size,
        layers={handler.name: tally.layers for handler, tally in tallies.items()},
        loadable=not problems,
        problems=problems,
        memory_bytes=sum(info.nbytes for info in header.tensors.values()),
        content=content.name if content else "diffusion_model" if family else None,
    )


def _name(tallies: Mapping[FormatHandler | Unknown, _Tally], loose: Mapping[str, int]) -> str:
    """The format that a file is called by: that of most parameters, plain ones only where there are no others."""
    sizes: Counter[str] = Counter()
    last = max((handler.kind.value for handler in tallies), default=Kind.PLAIN.value)
    for handler, tally in tallies.items():
        if handler.kind.value == last:
            sizes[handler.name] += tally.parameters
    if last == Kind.PLAIN.value:
        for dtype, elements in loose.items():
            if dtype in _PLAIN_DTYPES:
                sizes[_PLAIN_DTYPES[dtype]] += elements
    return max(sizes, key=lambda name: sizes[name], default=OTHER)


def _problems(header: Header, faults: Iterable[tuple[Layer, Fault]]) -> list[str]:
    """One sentence for each cause, with the first layer that it was found in; a few of them."""
    if not header.tensors:
        return [f"{display_name(header.path)} holds no tensors. Check that it is the right file."]
    by_fault: dict[Fault, list[str]] = {}
    for layer, fault in faults:
        by_fault.setdefault(fault, []).append(layer.name)
    problems = []
    for fault, names in list(by_fault.items())[:_PROBLEMS_NAMED]:
        others = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        problems.append(
            f"{display_name(header.path)} cannot be used: layer {quote(names[0])}{others} {fault.cause}. "
            f"{fault.next_step}"
        )
    if len(by_fault) > _PROBLEMS_NAMED:
        problems.append(f"{len(by_fault) - _PROBLEMS_NAMED} more problems of this kind are not listed.")
    return problems


def _misnamed(report: FileReport) -> FileReport:
    """A safetensors file that ComfyUI would hand to torch.load because of its name."""
    problem = f"{display_name(report.file)} is a safetensors file. Rename it to end in .safetensors, so that it loads."
    return replace(report, loadable=False, problems=[*report.problems, problem])


def _brief(path: Path, name: str, size: int, problem: str, loadable: bool = False) -> FileReport:
    """A report on a file whose weights are not looked at."""
    return FileReport(str(path), name, None, 0, size, {}, loadable, [problem], size if loadable else 0)


def _pickle_problem(path: Path) -> str:
    return (
        f"{display_name(path)} is a pickled PyTorch file, which can run code when opened, so it is not sent to a "
        "worker. It renders on this machine alone; use a safetensors file of the same model to split it."
    )
