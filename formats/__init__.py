"""What a model file is and whether Monarch can use it, from its first bytes and header alone.

Files that cannot work are refused here, before anything is read or sent; loading them is ComfyUI's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from .gguf import MAGIC as GGUF_MAGIC
from .gguf import gguf_refusal, is_gguf_file, is_gguf_model
from .header import Header, TensorInfo, UnreadableFile, display_name, open_regular, read_header
from .registry import find_handler

__all__ = [
    "FileReport",
    "Header",
    "TensorInfo",
    "UnreadableFile",
    "UnsupportedFile",
    "gguf_refusal",
    "inspect_file",
    "is_gguf_file",
    "is_gguf_model",
    "read_header",
    "require_loadable",
]

# ComfyUI opens these with torch.load, whatever they hold, and everything else that it lists with safetensors.
PICKLE_SUFFIXES = frozenset({".bin", ".ckpt", ".pkl", ".pt", ".pt2", ".pth"})
_PICKLE_STARTS = (b"PK\x03\x04", b"\x80")  # torch.save since 1.6, and before


class UnsupportedFile(ValueError):
    """Monarch cannot use a model file. The message names the file, the cause and the next step."""


@dataclass(frozen=True, slots=True)
class FileReport:
    """What `monarch inspect` shows of one file; the fields are those of its JSON.

    format: a handler's name, 'other' (left to ComfyUI), 'gguf', 'pickle' or 'unreadable'; family: architecture,
    None while unknown; parameters: weights, 0 where the content is not looked at; bytes: size on disk;
    layers: weight matrices per format; problems: sentences for a person, also for files that are loadable;
    memory_bytes: estimate for the loaded weights on one node.
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


def _describe(header: Header) -> FileReport:
    handler = find_handler(header)
    findings = handler.examine(header)
    problems = list(findings.problems)
    if not header.tensors:
        problems.append(f"{display_name(header.path)} holds no tensors. Check that it is the right file.")
    return FileReport(
        file=str(header.path),
        format=handler.name,
        family=None,
        parameters=findings.parameters,
        bytes=header.file_size,
        layers=findings.layers,
        loadable=findings.loadable and bool(header.tensors),
        problems=problems,
        memory_bytes=findings.memory_bytes,
    )


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
