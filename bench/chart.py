"""The chart of a measurement, as SVG: one bar per mode, from queue to saved file, with the spread and every run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any
from xml.sax.saxutils import escape

from .figures import figures

_WIDTH, _LEFT, _RIGHT = 760, 92, 168
_TOP, _ROW, _BAR, _BOTTOM = 92, 52, 26, 64
_FONT = "font-family=\"system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif\""
_INK, _QUIET, _GRID = "#1f2328", "#656d76", "#e4e7eb"
_ONE, _ONE_REST = "#8b95a1", "#c9ced5"
_SPLIT, _SPLIT_REST = "#d9730d", "#f3c99b"
_TICKS = 5
# About what a character of the chart's small text takes.
_CHARACTER = 6.3


def chart(record: Mapping[str, Any]) -> str:
    """The SVG text. `record` is what measurement.measure gives; a mode without a run that counts has no bar."""
    modes = record["modes"]
    most = max((time for mode in modes.values() for time in mode["seconds"]), default=0.0) or 1.0
    step = _tick(most)
    end = step * math.ceil(most / step)
    height = _TOP + _ROW * len(modes) + _BOTTOM
    scale = (_WIDTH - _LEFT - _RIGHT) / end

    def x(seconds: float) -> float:
        return round(_LEFT + seconds * scale, 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'role="img" aria-label="{escape(_spoken(record), {chr(34): "&quot;"})}" {_FONT}>',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(24, 34, "Queue to saved file", size=17, weight=600),
        _text(24, 55, _clipped(_subtitle(record), _WIDTH - 48), fill=_QUIET),
        *_legend(24, 76),
    ]
    bottom = _TOP + _ROW * len(modes)
    for index in range(round(end / step) + 1):
        at = x(index * step)
        parts.append(f'<line x1="{at}" x2="{at}" y1="{_TOP}" y2="{bottom}" stroke="{_GRID}"/>')
        parts.append(_text(at, bottom + 18, figures(index * step), fill=_QUIET, anchor="middle"))
    parts.append(_text(_LEFT, bottom + 38, "seconds, median of the runs that count; shorter is faster", fill=_QUIET))
    for row, (name, mode) in enumerate(modes.items()):
        parts += _row(_TOP + _ROW * row + _ROW / 2, name, mode, record["speedup"].get(name), x)
    return "\n".join([*parts, "</svg>\n"])


def _row(y: float, name: str, mode: Mapping[str, Any], speedup: float | None, x: Any) -> list[str]:
    parts = [_text(_LEFT - 14, y + 5, name, size=14, weight=600, anchor="end")]
    if mode["median_s"] is None:
        why = "failed" if mode["failed"] else "no run that counts"
        return [*parts, _text(_LEFT + 8, y + 4, why, fill=_QUIET)]
    dark, light = (_SPLIT, _SPLIT_REST) if mode["forwards_split"] else (_ONE, _ONE_REST)
    top = y - _BAR / 2
    sampling = min(mode["sampling"]["median_s"], mode["median_s"])
    for begin, end, colour in ((0.0, sampling, dark), (sampling, mode["median_s"], light)):
        width = round(x(end) - x(begin), 1)
        parts.append(f'<rect x="{x(begin)}" y="{top}" width="{width}" height="{_BAR}" fill="{colour}"/>')
    low, high = (x(seconds) for seconds in mode["spread_s"])
    parts.append(
        f'<path d="M{low} {y}H{high}M{low} {y - 6}V{y + 6}M{high} {y - 6}V{y + 6}" stroke="{_INK}" fill="none"/>'
    )
    parts += [f'<circle cx="{x(seconds)}" cy="{y}" r="2.4" fill="{_INK}"/>' for seconds in mode["seconds"]]
    label = f"{figures(mode['median_s'])} s" + (f" · {speedup:.2f}x" if speedup else "")
    right = max(high, x(mode["median_s"])) + 12
    parts.append(_text(right, y + 5, label, size=14, weight=600))
    marked = len(mode["not_counted"])
    if marked:
        parts.append(_text(right, y + 20, f"{marked} not counted", fill=_QUIET, size=11))
    return parts


def _legend(left: float, y: float) -> list[str]:
    parts = []
    for dark, light, words in ((_ONE, _ONE_REST, "one machine"), (_SPLIT, _SPLIT_REST, "split")):
        for colour, what in ((dark, f"{words}, sampling"), (light, "the rest")):
            parts.append(f'<rect x="{left}" y="{y - 9}" width="10" height="10" fill="{colour}"/>')
            parts.append(_text(left + 15, y, what, fill=_QUIET))
            left += 15 + _CHARACTER * len(what) + 22
    return parts


def _subtitle(record: Mapping[str, Any]) -> str:
    """What was rendered, on what."""
    models = ", ".join(f"{model['file']} ({model['format']})" for model in record["models"])
    sizes = ", ".join(f"{each['steps']} steps {each['sampler']}" for each in record["samplings"])
    devices = " + ".join(
        [record["driver"]["device"], *(worker["device"].get("device", "") for worker in record["workers"])]
    )
    return " · ".join(part for part in (models or record["workflow"]["file"], sizes, devices) if part)


def _spoken(record: Mapping[str, Any]) -> str:
    told = [
        f"{name} {figures(mode['median_s'])} seconds"
        for name, mode in record["modes"].items()
        if mode["median_s"] is not None
    ]
    return f"From queue to saved file: {', '.join(told) or 'nothing was measured'}"


def _clipped(text: str, width: float) -> str:
    room = int(width / _CHARACTER)
    return text if len(text) <= room else f"{text[: room - 1]}…"


def _tick(most: float) -> float:
    """A round step of the axis, of which `most` takes about _TICKS."""
    magnitude = 10.0 ** math.floor(math.log10(most / _TICKS))
    return next(magnitude * step for step in (1, 2, 5, 10) if magnitude * step * _TICKS >= most)


def _text(
    x: float, y: float, text: str, *, size: int = 12, weight: int = 400, fill: str = _INK, anchor: str = "start"
) -> str:
    return (
        f'<text x="{round(x, 1)}" y="{round(y, 1)}" font-size="{size}" font-weight="{weight}" fill="{fill}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )
