"""What is changed in a graph to measure it: `split` widgets, a split where there is none, and the measuring nodes."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..demo.graphs import Graph
from .errors import BenchError
from .ui_graph import ObjectInfo

MODES = ("one", "rows", "tokens", "auto")
_WIDGET = {"one": "off"}
_SPLITTERS = ("MonarchSampler", "MonarchSplit")
_MEASURE, _MEASURED = "MonarchMeasure", "MonarchMeasured"
_NODES = (*_SPLITTERS, _MEASURE, _MEASURED)
# What a person sets that says how much there is to compute.
_SETTINGS = (
    *("seed", "noise_seed", "steps", "cfg", "guidance", "sampler_name", "scheduler", "denoise", "shift"),
    *("width", "height", "length", "batch_size"),
)


@dataclass(frozen=True)
class Measurable:
    """A graph with all that is needed to measure it. changes: what was added, in sentences."""

    graph: Graph
    changes: tuple[str, ...]

    def for_run(self, mode: str, run: str) -> Graph:
        """The graph that computes in a mode; `run` is a name that no run had before."""
        graph = copy.deepcopy(self.graph)
        for node in graph.values():
            if node["class_type"] in _SPLITTERS:
                node["inputs"]["split"] = _WIDGET.get(mode, mode)
            if node["class_type"] in (_MEASURE, _MEASURED):
                node["inputs"]["run"] = run
        return graph

    def settings(self) -> list[dict[str, Any]]:
        """What is set in the nodes that decide how much there is to compute."""
        found = []
        for key, node in self.graph.items():
            named = {
                name: value
                for name, value in node["inputs"].items()
                if name in _SETTINGS and isinstance(value, (int, float, str))
            }
            if named:
                found.append({"node": key, "class": node["class_type"], **named})
        return found


def _is_link(value: Any) -> bool:
    """As ComfyUI's graph_utils tells links from lists."""
    return (
        isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], (int, float))
    )


def measurable(graph: Graph, info: ObjectInfo) -> Measurable:
    """Add to a graph what measuring it takes. Raises BenchError if there is nothing to measure in it."""
    missing = [name for name in _NODES if name not in info]
    if missing:
        raise BenchError(
            f"This ComfyUI has no node {', '.join(missing)}. Install this version of Monarch in its custom_nodes and "
            "start it again."
        )
    return _Editor(graph, info).result()


class _Editor:
    def __init__(self, graph: Graph, info: ObjectInfo) -> None:
        self._graph = copy.deepcopy(graph)
        self._info = info
        self._changes: list[str] = []
        self._count = 0

    def result(self) -> Measurable:
        living = self._living()
        samplers = [key for key in living if self._samples(key)]
        if not samplers:
            raise BenchError(
                "Nothing that this workflow saves is made by sampling a MODEL, so there is nothing to split."
            )
        entries = [key for key in living if self._is(key, *_SPLITTERS) and not self._behind_split(key)]
        sampled = [key for key in living if self._enters(key)]
        if entries:
            entries += [key for key in sampled if key not in entries and not self._behind_split(key)]
        else:
            for key in sampled:
                entries += self._before(key, "MonarchSplit", split="auto")
                self._changes.append(f"Monarch Split was put before {self._title(key)}: there was no node of Monarch.")
        for key in entries:
            self._before(key, _MEASURE, run="")
        for key in samplers:
            self._add(_MEASURED, samples=[key, self._output(key)], run="")
        self._changes.append(
            "Monarch Measure was put before what samples, and Monarch Measured behind it, in every mode alike."
        )
        return Measurable(self._graph, tuple(self._changes))

    # --- what nodes are -------------------------------------------------------------------------------------------

    def _described(self, key: str) -> Any:
        return self._info[self._graph[key]["class_type"]]

    def _is(self, key: str, *classes: str) -> bool:
        return self._graph[key]["class_type"] in classes

    def _title(self, key: str) -> str:
        node = self._graph[key]
        title = (node.get("_meta") or {}).get("title") or node["class_type"]
        return f"node {key} ({title})"

    def _links(self, key: str, kind: str | None = None) -> Iterator[tuple[str, str]]:
        """(input, node that it is linked to), of one type or of all."""
        for name, value in self._graph[key]["inputs"].items():
            if _is_link(value) and value[0] in self._graph:
                origin, slot = value[0], int(value[1])
                outputs = self._described(origin).get("output") or []
                # What a switch gives out says nothing of its type; what is taken does.
                kinds = (self._input_type(key, name), outputs[slot] if slot < len(outputs) else None)
                if kind is None or kind in kinds:
                    yield name, origin

    def _input_type(self, key: str, name: str) -> Any:
        groups = (self._described(key).get("input") or {}).values()
        return next((group[name][0] for group in groups if isinstance(group, Mapping) and name in group), None)

    def _output(self, key: str) -> int | None:
        """Which output of a node holds what it sampled; None if none does."""
        outputs = list(self._described(key).get("output") or [])
        return next((outputs.index(kind) for kind in ("LATENT", "IMAGE") if kind in outputs), None)

    def _takes(self, key: str, *kinds: str) -> bool:
        return any(True for kind in kinds for _ in self._links(key, kind))

    def _samples(self, key: str) -> bool:
        outputs = self._described(key).get("output") or []
        return self._output(key) is not None and "MODEL" not in outputs and self._takes(key, "MODEL", "GUIDER")

    def _enters(self, key: str) -> bool:
        """Whether a MODEL ends in this node, to be sampled by it or by whom it hands it to."""
        outputs = self._described(key).get("output") or []
        return self._takes(key, "MODEL") and (self._samples(key) or "GUIDER" in outputs)

    def _behind_split(self, key: str) -> bool:
        origins = [origin for _, origin in self._links(key, "MODEL")]
        return any(self._is(origin, "MonarchSplit") or self._behind_split(origin) for origin in origins)

    def _living(self) -> list[str]:
        """Nodes that something which is saved or shown depends on, in the graph's order."""
        found: set[str] = set()
        ahead = [key for key in self._graph if self._described(key).get("output_node")]
        while ahead:
            key = ahead.pop()
            if key not in found:
                found.add(key)
                ahead += [origin for _, origin in self._links(key)]
        return [key for key in self._graph if key in found]

    # --- what is added --------------------------------------------------------------------------------------------

    def _add(self, kind: str, **inputs: Any) -> str:
        self._count += 1
        key = f"monarch_bench_{self._count}"
        self._graph[key] = {"class_type": kind, "inputs": inputs}
        return key

    def _before(self, key: str, kind: str, **inputs: Any) -> list[str]:
        """Put a node that takes and gives a MODEL before each MODEL that another one takes; those that were added."""
        added = []
        for name, _ in list(self._links(key, "MODEL")):
            taken = self._graph[key]["inputs"][name]
            added.append(self._add(kind, model=taken, **inputs))
            self._graph[key]["inputs"][name] = [added[-1], 0]
        return added
