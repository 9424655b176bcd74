"""Nodes with links, laid out in columns, as JSON in the form that ComfyUI's browser page saves and loads.

Which nodes there are is node_types' business, and what stands in the note notes'."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .files import ModelFile
from .node_types import NODE_TYPES, TITLE, NodeType, socket

_ID = uuid.UUID("6d6f6e61-7263-4820-a000-000000000000")
_TOP, _GAP, _NOTE = 60, 30, (480, 620)
_COLUMN_GAP, _GROUP_MARGIN, _GROUP_TITLE = 60, 20, 50
_COLOURS = ("#3f789e", "#b58b2a", "#a1309b", "#88a06b", "#8a8a8a")


@dataclass(frozen=True)
class Output:
    """One output of a node."""

    node: Node
    index: int


class Node:
    """A node of the graph: its widgets' values in their order, and by keyword what each socket is linked to.

    A ModelFile stands for its name. A Node given for a socket is its first output; `node[1]` is its second.
    """

    def __init__(self, kind: str, *values: Any, title: str | None = None, **links: Node | Output) -> None:
        self.kind, self.title = kind, title
        self.files = [value for value in values if isinstance(value, ModelFile)]
        self.values = [value.name if isinstance(value, ModelFile) else value for value in values]
        self.links = {name: link if isinstance(link, Output) else Output(link, 0) for name, link in links.items()}
        sockets = [socket(entry)[0] for entry in self.type.sockets]
        if not set(self.links) <= set(sockets) or len(self.values) != len(self.type.widgets):
            raise ValueError(f"{kind} takes the sockets {sockets} and {len(self.type.widgets)} values")

    def __getitem__(self, index: int) -> Output:
        return Output(self, index)

    @property
    def type(self) -> NodeType:
        return NODE_TYPES[self.kind]


@dataclass(frozen=True)
class Space:
    """Pixels that a column leaves free, for a link to pass."""

    height: int


class Column:
    """Nodes below each other, in a titled group."""

    def __init__(self, title: str, *entries: Node | Space) -> None:
        self.title, self.entries = title, entries

    @property
    def nodes(self) -> list[Node]:
        return [entry for entry in self.entries if isinstance(entry, Node)]

    @property
    def width(self) -> int:
        return max(node.type.width for node in self.nodes)


@dataclass(frozen=True)
class Workflow:
    """A template: its name is the file's, `note` the text (Markdown) at its left, columns from left to right."""

    name: str
    note: str
    columns: Sequence[Column]

    @property
    def nodes(self) -> list[Node]:
        return [node for column in self.columns for node in column.nodes]

    def as_json(self) -> dict[str, Any]:
        """The graph as the page saves it (schema version 0.4)."""
        numbers = {id(node): number for number, node in enumerate(self.nodes, 2)}
        links = self._links(numbers)
        boxes, groups = self._layout()
        nodes = [_note(self.note)]
        nodes += [_node(node, numbers[id(node)], boxes[id(node)], links) for node in self.nodes]
        return {
            "id": str(uuid.uuid5(_ID, self.name)),
            "revision": 0,
            "last_node_id": len(nodes),
            "last_link_id": len(links),
            "nodes": nodes,
            "links": links,
            "groups": groups,
            "config": {},
            "extra": {"ds": {"scale": 0.6, "offset": [140, 160]}},
            "version": 0.4,
        }

    def _links(self, numbers: dict[int, int]) -> list[list[Any]]:
        """[link, source node, its output, target node, its input, type], as the format has it."""
        links: list[list[Any]] = []
        for node in self.nodes:
            for slot, entry in enumerate(node.type.sockets):
                name, kind, optional = socket(entry)
                if name in node.links:
                    source = node.links[name]
                    ends = [numbers[id(source.node)], source.index, numbers[id(node)], slot]
                    links.append([len(links) + 1, *ends, kind])
                elif not optional:
                    raise ValueError(f"{self.name}: nothing is linked to {name} of {node.kind}")
        return links

    def _layout(self) -> tuple[dict[int, tuple[int, int, int, int]], list[dict[str, Any]]]:
        """(left, top, width, bottom) of each node by id(), and the groups around the columns."""
        boxes: dict[int, tuple[int, int, int, int]] = {}
        groups: list[dict[str, Any]] = []
        left = _NOTE[0] + _COLUMN_GAP + _GROUP_MARGIN
        for number, column in enumerate(self.columns):
            top = _TOP
            for entry in column.entries:
                if isinstance(entry, Space):
                    top += entry.height
                    continue
                boxes[id(entry)] = (left, top, column.width, top + entry.type.height)
                top += entry.type.height + TITLE + _GAP
            upper = _TOP - TITLE - _GROUP_TITLE
            box = [left - _GROUP_MARGIN, upper, column.width + 2 * _GROUP_MARGIN, top - TITLE - upper]
            colour = _COLOURS[number % len(_COLOURS)]
            groups.append({"id": number + 1, "title": column.title, "bounding": box, "color": colour, "flags": {}})
            left += column.width + _GROUP_MARGIN + _COLUMN_GAP
        return boxes, groups


def _note(text: str) -> dict[str, Any]:
    return {
        "id": 1,
        "type": "MarkdownNote",
        "pos": [0, _TOP],
        "size": list(_NOTE),
        "flags": {},
        "order": 0,
        "mode": 0,
        "inputs": [],
        "outputs": [],
        "title": "Read me first",
        "properties": {},
        "widgets_values": [text],
        "color": "#432",
        "bgcolor": "#653",
    }


def _node(node: Node, number: int, box: tuple[int, int, int, int], links: list[list[Any]]) -> dict[str, Any]:
    left, top, width, bottom = box
    into = {link[4]: link[0] for link in links if link[3] == number}
    inputs = [
        {"name": name, "type": kind, **({"shape": 7} if optional else {}), "link": into.get(slot)}
        for slot, (name, kind, optional) in enumerate(map(socket, node.type.sockets))
    ]
    outputs = []
    for slot, (name, kind, _) in enumerate(map(socket, node.type.outputs)):
        outgoing = [link[0] for link in links if link[1:3] == [number, slot]]
        outputs.append({"name": name, "type": kind, "links": outgoing or None})
    pack = "monarch-split" if node.kind.startswith("Monarch") else "comfy-core"
    properties: dict[str, Any] = {"Node name for S&R": node.kind, "cnr_id": pack}
    if node.files:
        # The page offers the download of a missing file from these.
        properties["models"] = [{"name": file.name, "url": file.url, "directory": file.folder} for file in node.files]
    return {
        "id": number,
        "type": node.kind,
        "pos": [left, top],
        "size": [width, bottom - top],
        "flags": {},
        "order": number - 1,
        "mode": 0,
        "inputs": inputs,
        "outputs": outputs,
        **({"title": node.title} if node.title else {}),
        "properties": properties,
        "widgets_values": node.values,
    }
