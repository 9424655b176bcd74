"""Reads a workflow from a file, in API format or as ComfyUI's page saves it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..demo.graphs import Graph
from .errors import BenchError
from .ui_graph import CannotConvert, ObjectInfo, to_api


@dataclass(frozen=True)
class Workflow:
    """A graph in API format, and where it came from. form: "api", or "ui" for one that had to be converted.

    changes: where it is not what the page would send, in sentences.
    """

    path: Path
    digest: str
    form: str
    graph: Graph
    changes: tuple[str, ...] = ()


def read_json(path: Path) -> tuple[Any, str]:
    """(what a JSON file holds, digest of its bytes). Raises BenchError if it is none."""
    try:
        data = path.read_bytes()
        return json.loads(data), hashlib.sha256(data).hexdigest()
    except OSError as error:
        raise BenchError(f"{path} cannot be read ({error.strerror}). Name a workflow file.", usage=True) from None
    except ValueError as error:
        raise BenchError(f"{path} is not a JSON file ({error}). Save the workflow from ComfyUI again.") from None


def read_workflow(path: Path, info: ObjectInfo) -> Workflow:
    """The workflow in a file; `info` describes ComfyUI's node classes. Raises BenchError."""
    content, digest = read_json(path)
    if isinstance(content, Mapping) and isinstance(content.get("prompt"), Mapping):
        content = content["prompt"]
    if isinstance(content, Mapping) and isinstance(content.get("nodes"), list):
        try:
            graph, changes = to_api(content, info)
            return Workflow(path, digest, "ui", graph, tuple(changes))
        except CannotConvert as error:
            raise BenchError(f"{path.name}: {error}") from None
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise BenchError(f"{path.name}: {CannotConvert(f'It has an unknown form ({error!r})')}") from None
    if not isinstance(content, Mapping) or not content or not all(map(_is_node, content.values())):
        raise BenchError(f"{path} holds no ComfyUI workflow. In ComfyUI choose Workflow > Export (API).")
    graph = {str(key): {**node, "inputs": dict(node["inputs"])} for key, node in content.items()}
    unknown = sorted({str(node["class_type"]) for node in graph.values()} - set(info))
    if unknown:
        raise BenchError(f"{path.name}: this ComfyUI has no node {', '.join(unknown)}. Install what brings it.")
    return Workflow(path, digest, "api", graph)


def _is_node(value: Any) -> bool:
    return isinstance(value, Mapping) and "class_type" in value and isinstance(value.get("inputs"), Mapping)
