"""From the form in which ComfyUI's page saves a workflow to the one that ComfyUI runs (API format).

What a page does when it queues: links through reroutes and bypassed nodes, values of widgets by their order. Whatever
is not known for sure is refused, with "Export (API)" as the way out. Seeds stay as they stand in the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..demo.graphs import Graph

ObjectInfo = Mapping[str, Mapping[str, Any]]

_MUTED, _BYPASSED = 2, 4
_NOTES = ("Note", "MarkdownNote")
_REROUTE, _PRIMITIVE = "Reroute", "PrimitiveNode"
# A choice that decides which inputs follow it.
_CHOICE_WIDGET = "COMFY_DYNAMICCOMBO_V3"
_WIDGETS = {
    "INT": (int, float),
    "FLOAT": (int, float),
    "STRING": (str,),
    "BOOLEAN": (bool,),
    "COMBO": (),
    _CHOICE_WIDGET: (str,),
}
_NOTHING = object()
_CONTROLS = ("fixed", "increment", "decrement", "randomize")
_CONTROLLED = ("seed", "noise_seed")
# The page shows more than one widget for such an input, and saves a value for each.
_UPLOADS = ("image_upload", "video_upload", "audio_upload", "animated_image_upload")
_COMMENTS = re.compile(r"/\*[\s\S]*?\*/|//.*$", re.MULTILINE)
_CHOICE = re.compile(r"(?<!\\)\{([^{}|]*)\|[^{}]*\}")


class CannotConvert(Exception):
    """A workflow that cannot be turned into API format for sure; the message says what to do."""

    def __init__(self, why: str) -> None:
        super().__init__(f"{why}. In ComfyUI choose Workflow > Export (API) and give bench that file.")


@dataclass(frozen=True)
class _Link:
    origin: str
    slot: int


def to_api(workflow: Mapping[str, Any], info: ObjectInfo) -> tuple[Graph, list[str]]:
    """The graph of a saved workflow, and where it is not what the page would send, in sentences.

    `info` describes the node classes, as ComfyUI's /object_info does. Raises CannotConvert.
    """
    converter = _Workflow(workflow, info)
    return converter.graph(), converter.changes


class _Workflow:
    def __init__(self, workflow: Mapping[str, Any], info: ObjectInfo) -> None:
        self._info = info
        self.changes: list[str] = []
        self._nodes = {str(node["id"]): node for node in workflow["nodes"]}
        self._links = dict(map(_link, workflow.get("links") or []))
        subgraphs = (workflow.get("definitions") or {}).get("subgraphs") or []
        self._subgraphs = {str(subgraph.get("id")): str(subgraph.get("name") or "") for subgraph in subgraphs}

    def graph(self) -> Graph:
        running = [node for node in self._nodes.values() if self._runs(node)]
        self._refuse_unknown(running)
        return {str(node["id"]): self._converted(node) for node in running}

    def _runs(self, node: Mapping[str, Any]) -> bool:
        return node.get("mode", 0) not in (_MUTED, _BYPASSED) and node["type"] not in (*_NOTES, _REROUTE, _PRIMITIVE)

    def _refuse_unknown(self, nodes: list[Mapping[str, Any]]) -> None:
        for node in nodes:
            kind = str(node["type"])
            if kind in self._subgraphs or kind.startswith(("workflow>", "workflow/")):
                name = self._subgraphs.get(kind) or kind
                raise CannotConvert(f"The workflow holds the subgraph {name!r}, which bench does not take apart")
        unknown = sorted({str(node["type"]) for node in nodes} - set(self._info))
        if unknown:
            raise CannotConvert(
                f"This ComfyUI has no node {', '.join(unknown)}: install what brings it, or it exists only in the page"
            )

    def _converted(self, node: Mapping[str, Any]) -> dict[str, Any]:
        inputs = self._widget_values(node)
        for entry in node.get("inputs") or []:
            if entry.get("link") is None:
                continue
            name = str(entry["name"])
            source = self._source(entry["link"], str(entry.get("type", "*")))
            if source is None:
                if "widget" not in entry:
                    inputs.pop(name, None)
            elif self._nodes[source.origin]["type"] == _PRIMITIVE:
                values = self._nodes[source.origin].get("widgets_values") or []
                if not values:
                    raise CannotConvert(f"{_name(node)}: the primitive for {name} holds no value")
                inputs[name] = values[0]
            else:
                inputs[name] = [source.origin, source.slot]
        return {"class_type": node["type"], "inputs": inputs, "_meta": {"title": node.get("title") or node["type"]}}

    # --- links ----------------------------------------------------------------------------------------------------

    def _source(self, link: Any, wanted: str) -> _Link | None:
        """Where what comes over a link is made: a node that runs or a primitive; None if nowhere."""
        seen = set()
        while True:
            found = self._links.get(link)
            if found is None or link in seen:
                return None
            seen.add(link)
            origin = self._nodes.get(found.origin)
            if origin is None:
                return None
            if origin.get("mode", 0) == _MUTED:
                return None
            if origin["type"] == _REROUTE:
                link = _first_link(origin)
            elif origin.get("mode", 0) == _BYPASSED:
                link = _through_bypass(origin, found.slot, wanted)
            else:
                return found

    # --- widgets --------------------------------------------------------------------------------------------------

    def _widget_values(self, node: Mapping[str, Any]) -> dict[str, Any]:
        saved = node.get("widgets_values")
        named = node.get("widgets_values_named")
        if not isinstance(named, Mapping) and isinstance(saved, Mapping):
            named = saved
        values = _Named(named) if isinstance(named, Mapping) else _Ordered(list(saved or []))
        inputs = _read(node, self._info[node["type"]], "", values, self.changes)
        left = values.left
        if left:
            raise CannotConvert(
                f"{_name(node)} was saved with {left} values more than this ComfyUI knows: it is of another version, "
                "or shows widgets that are not known here"
            )
        return inputs


class _Named:
    """Saved values by name."""

    left = 0

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def take(self, name: str) -> Any:
        # What depends on a choice was saved by its own name alone before choices came.
        return self._values.get(name, self._values.get(name.rpartition(".")[2], _NOTHING))

    def skip(self, values: Sequence[Any] | None) -> None:
        pass


class _Ordered:
    """Saved values in the order of the widgets."""

    def __init__(self, values: list[Any]) -> None:
        self._values = values
        self._next = 0

    @property
    def left(self) -> int:
        rest = self._values[self._next :]
        return len(rest) if any(value is not None for value in rest) else 0

    def take(self, name: str) -> Any:
        if self._next >= len(self._values):
            return _NOTHING
        self._next += 1
        return self._values[self._next - 1]

    def skip(self, values: Sequence[Any] | None) -> None:
        """Leave out the next one if it is one of `values`, or whatever it is."""
        if self._next < len(self._values) and (values is None or self._values[self._next] in values):
            self._next += 1


def _read(
    node: Mapping[str, Any],
    described: Mapping[str, Any],
    prefix: str,
    values: _Named | _Ordered,
    changes: list[str],
) -> dict[str, Any]:
    """Values of the inputs that have a widget, in the page's order; one that was not saved has its default.

    What the page would send otherwise is added to `changes`.
    """
    inputs: dict[str, Any] = {}
    groups = described.get("input") or {}
    order = described.get("input_order") or {}
    for group in ("required", "optional"):
        entries = groups.get(group) or {}
        for short in order.get(group) or entries:
            name, (kind, settings) = prefix + short, _type_of(entries[short])
            if kind not in _WIDGETS or settings.get("forceInput") or settings.get("hidden"):
                continue
            value = values.take(name)
            if value is _NOTHING:
                value = _default(kind, settings)
            if value is _NOTHING:
                continue
            inputs[name] = _checked(node, name, kind, settings, value)
            if isinstance(value, str) and settings.get("dynamicPrompts"):
                inputs[name], drawn = _plain_prompt(value)
                if drawn:
                    changes.append(f"{_name(node)}: the first of each {{one|two}} in {name}, where a page draws one.")
            if kind == _CHOICE_WIDGET:
                chosen = {"input": _chosen(node, name, settings, value)}
                inputs.update(_read(node, chosen, f"{name}.", values, changes))
            if settings.get("control_after_generate") or (kind == "INT" and short in _CONTROLLED):
                values.skip(_CONTROLS)
            if any(settings.get(flag) for flag in _UPLOADS):
                values.skip(None)
    return inputs


def _type_of(entry: Sequence[Any]) -> tuple[str, Mapping[str, Any]]:
    """(type, settings) of an input, as /object_info gives it."""
    settings = entry[1] if len(entry) > 1 and isinstance(entry[1], Mapping) else {}
    kind = "COMBO" if isinstance(entry[0], list) else str(settings.get("widgetType") or entry[0])
    return kind, settings


def _default(kind: str, settings: Mapping[str, Any]) -> Any:
    if kind == _CHOICE_WIDGET:
        return next((option["key"] for option in settings.get("options") or []), _NOTHING)
    return settings.get("default", _NOTHING)


def _chosen(node: Mapping[str, Any], name: str, settings: Mapping[str, Any], value: Any) -> Mapping[str, Any]:
    """The inputs that come with a choice."""
    for option in settings.get("options") or []:
        if option.get("key") == value:
            return option.get("inputs") or {}
    raise CannotConvert(f"{_name(node)}: this ComfyUI does not offer {value!r} for {name}")


def _link(entry: Any) -> tuple[Any, _Link]:
    if isinstance(entry, Mapping):
        return entry["id"], _Link(str(entry["origin_id"]), int(entry["origin_slot"]))
    return entry[0], _Link(str(entry[1]), int(entry[2]))


def _first_link(node: Mapping[str, Any]) -> Any:
    inputs = node.get("inputs") or []
    return inputs[0].get("link") if inputs else None


def _through_bypass(node: Mapping[str, Any], slot: int, wanted: str) -> Any:
    """The link into a bypassed node that takes the place of its output `slot`: same type, same position first."""
    inputs = node.get("inputs") or []
    outputs = node.get("outputs") or []
    kind = str(outputs[slot].get("type", wanted)) if slot < len(outputs) else wanted
    candidates = [*inputs[slot : slot + 1], *inputs]
    return next((entry.get("link") for entry in candidates if str(entry.get("type")) == kind), None)


def _name(node: Mapping[str, Any]) -> str:
    title = node.get("title")
    return f"Node {node['id']} ({node['type']}{f', {title!r}' if title else ''})"


def _checked(node: Mapping[str, Any], name: str, kind: str, settings: Mapping[str, Any], value: Any) -> Any:
    """A widget's value. A value of another type than the widget's means that the order is not what it seems."""
    expected = _WIDGETS[kind]
    if expected and (not isinstance(value, expected) or (isinstance(value, bool) and bool not in expected)):
        raise CannotConvert(f"{_name(node)}: {value!r} was saved for {name}, which is of type {kind}")
    # A bare list would be taken for a link.
    return {"__value__": value} if isinstance(value, list) else value


def _plain_prompt(text: str) -> tuple[str, bool]:
    """A prompt as the page sends it, but with the first of each {one|two}; and whether there was any to draw."""
    text = _COMMENTS.sub("", text)
    drawn = False
    while True:
        plain = _CHOICE.sub(r"\1", text)
        if plain == text:
            return text.replace("\\{", "{").replace("\\}", "}"), drawn
        text, drawn = plain, True
