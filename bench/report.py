"""The report of a measurement, in Markdown: the numbers first, then every condition they hold under."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .figures import figures

_MODES = {"one": "one machine", "rows": "by rows", "tokens": "by tokens", "auto": "auto"}


def report(record: Mapping[str, Any], chart: str, data: str) -> str:
    """The Markdown text; `chart` and `data` are the names of the chart's and the record's file beside it."""
    return "\n".join(
        [
            f"# {_plain(record['workflow']['file'])}, measured with Monarch",
            "",
            *_cut_short(record),
            f"![Queue to saved file in each mode]({chart})",
            "",
            *_times(record),
            "",
            *_costs(record),
            "",
            *_marked(record),
            *_conditions(record),
            "",
            "## How it was measured",
            "",
            *(f"- {line}" for line in _method(record)),
            "",
            f"All numbers: [{data}]({data}).",
            "",
        ]
    )


def _cut_short(record: Mapping[str, Any]) -> list[str]:
    why = record["cut_short"]
    return (
        [f"**The measurement was cut short:** {_plain(why)}. What is here was measured until then.", ""] if why else []
    )


def _times(record: Mapping[str, Any]) -> list[str]:
    rows = []
    for name, mode in record["modes"].items():
        sampling = mode["sampling"]
        rows.append(
            [
                _MODES[name],
                "failed" if mode["failed"] else _with_spread(mode["median_s"], mode["spread_s"]),
                _with_spread(sampling["median_s"], sampling["spread_s"]),
                f"{record['speedup'][name]:.2f}x" if name in record["speedup"] else "-",
                _seconds(mode["load_s"]),
                _difference(mode["difference"]),
                str(mode["runs"]),
            ]
        )
    head = ["mode", "queue to saved file", "sampling", "speed-up", "load", "difference", "runs"]
    return _table(head, rows)


def _costs(record: Mapping[str, Any]) -> list[str]:
    rows = [
        [
            _MODES[name],
            _memory(mode["peak_memory"]["driver"]),
            _memory(mode["peak_memory"]["worker"]),
            f"{mode['forwards_split']} of {mode['forwards']}" if mode["forwards"] else "-",
            _bytes(mode["bytes_sent"]) if mode["forwards_split"] else "-",
            _bytes(mode["bytes_received"]) if mode["forwards_split"] else "-",
            _seconds(mode["waiting_s"]),
        ]
        for name, mode in record["modes"].items()
    ]
    head = ["mode", "peak memory here", "peak memory of a worker", "forwards split", "sent", "received", "waiting"]
    return _table(head, rows)


def _marked(record: Mapping[str, Any]) -> list[str]:
    lines = [
        f"- {_MODES[name]}, {run['run']} run of {_seconds(run['seconds'])}{' that failed' if run['failed'] else ''}: "
        f"{_plain(run['why'])}"
        for name, mode in record["modes"].items()
        for run in mode["not_counted"]
    ]
    return ["## Runs that do not count", "", *lines, ""] if lines else []


def _conditions(record: Mapping[str, Any]) -> list[str]:
    workflow, driver = record["workflow"], record["driver"]
    versions = driver["versions"]
    rows = [
        ["workflow", f"{workflow['file']}, SHA-256 {workflow['sha256'][:16]}…"],
        *[
            [
                "model",
                f"{model['file']}, {model['format']}, {_bytes(model['bytes'])}, digest {model['digest'][:16]}…",
            ]
            for model in record["models"]
        ],
        *[
            [
                "sampling",
                f"{each['steps']} steps {each['sampler']}, latent {_shapes(each['latent'])}, {each['compute_dtype']}",
            ]
            for each in record["samplings"]
        ],
        ["this machine", f"{driver['device']}, {driver['system']}"],
        ["ComfyUI", f"{versions['comfyui']}, Monarch {versions['pack']}"],
        ["torch", f"{versions['torch']}, comfy-kitchen {versions['kitchen'] or 'none'}, Python {driver['python']}"],
        ["ComfyUI's flags", " ".join(driver["arguments"]) or "none"],
    ]
    for worker in record["workers"]:
        link = worker["link"]
        tcp = f", plain TCP {figures(link['tcp_gb_per_s'])} GB/s" if link["tcp_gb_per_s"] else ""
        theirs = f"torch {worker['versions']['torch']}, comfy-kitchen {worker['versions']['kitchen'] or 'none'}"
        rows.append([f"worker {worker['name']}", f"{worker['device'].get('device', 'unknown')}, {theirs}"])
        rows.append(
            [
                f"link to {worker['name']}",
                f"{figures(link['rtt_ms'])} ms, {figures(link['gb_per_s'])} GB/s, {link['lanes']} lanes{tcp}",
            ]
        )
    if record["cluster"]:
        rows.append(["cluster", ", ".join(f"{name} = {value}" for name, value in record["cluster"].items())])
    rows += [[f"node {each['node']}", _set(each)] for each in workflow["settings"]]
    return ["## Conditions", "", *_table(["what", "value"], rows)]


def _method(record: Mapping[str, Any]) -> list[str]:
    return [
        f"{record['runs_asked']} runs of each mode in alternating order, after one that loads everything (and one more "
        f"of auto, in which it learns). Begun {record['began']}. Medians; in brackets the least and the most.",
        "Seeds are those of the file. Loaders, text encoders and whatever else comes before the MODEL is sampled come "
        "from ComfyUI's cache, as if only the seed had been changed; sampling and what follows is computed every time.",
        "Queue to saved file is by ComfyUI's own clock. Sampling is what the sampler nodes spend in it.",
        "Load is what a run from cold takes longer than the median: models are unloaded here and on the workers, while "
        "files may be in the system's cache. Where a worker has to be sent the model, that is in it, too.",
        "Peak memory is that of the process while it sampled: main memory, and what torch had on the GPU.",
        "The difference is the largest one between the tensors that were sampled (latents, before they are decoded) "
        "and those of one machine's first run; in the row of one machine, between its own runs.",
        *map(_plain, record["workflow"]["changes"]),
        *record["notes"],
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(map(_plain, row)) + " |" for row in rows]
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *lines]


def _plain(text: str) -> str:
    """Text from elsewhere, which is not to make a table of its own."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{figures(value)} s"


def _with_spread(median: float | None, spread: Sequence[float] | None) -> str:
    if median is None or spread is None:
        return "-"
    return f"{figures(median)} s ({figures(spread[0])} to {figures(spread[1])})"


def _difference(difference: Mapping[str, float | None] | None) -> str:
    if difference is None:
        return "-"
    if difference["max_abs"] is None or difference["relative"] is None:
        return "cannot be compared"
    if not difference["max_abs"]:
        return "none"
    return f"{difference['max_abs']:.1e} (relative {difference['relative']:.1e})"


def _memory(peak: Mapping[str, int] | None) -> str:
    if not peak:
        return "-"
    names = {"main": "main", "gpu": "GPU"}
    return ", ".join(f"{_bytes(size)} {names[kind]}" for kind, size in peak.items())


def _bytes(size: int) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{figures(size / unit)} {name}"
    return f"{size} B"


def _shapes(shapes: Sequence[Sequence[int]]) -> str:
    return " and ".join("x".join(map(str, shape)) for shape in shapes)


def _set(settings: Mapping[str, Any]) -> str:
    given = ", ".join(f"{name} {value}" for name, value in settings.items() if name not in ("node", "class"))
    return f"{settings['class']}: {given}"
