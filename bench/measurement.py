"""One measurement from beginning to end: conditions, runs, and the files that say what came of it."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..demo.comfy_client import ComfyClient
from .chart import chart
from .graph import Measurable, measurable
from .record import Record, models, samplings, summary
from .report import report
from .runs import Run, Runner, require_idle
from .server import is_local
from .workers import NoWorkers, Workers
from .workflow import Workflow, read_workflow

RECORD, REPORT, CHART = "record.json", "report.md", "chart.svg"
_REMOTE = (
    "ComfyUI runs on another machine, whose workers cannot be asked from here: their memory, devices and links are not "
    "in this record."
)


def measure(path: Path, client: ComfyClient, modes: Sequence[str], runs: int, say: Callable[[str], None]) -> Record:
    """Measure a workflow file in `modes`, each `runs` times. Raises BenchError, ComfyError and OSError."""
    require_idle(client)
    info = client.all_object_info()
    workflow = read_workflow(path, info)
    graph = measurable(workflow.graph, info)
    workers: Workers | NoWorkers = NoWorkers()
    if set(modes) != {"one"} and is_local(client):
        workers = Workers.configured()
        say("measuring the link to each worker")
    examined = workers.examine()
    began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    done = Runner(client, graph, workers, say).all(modes, runs)
    record = {
        **summary(done, modes),
        "runs_asked": runs,
        "began": began,
        **_conditions(workflow, graph, done),
        "driver": _driver(client, done),
        "workers": examined,
        "cluster": workers.settings,
        "notes": [_REMOTE] if not is_local(client) else [],
    }
    return {"ok": finding(record) is None, **record}


def finding(record: Record) -> str | None:
    """What is wrong with a measurement, in a sentence; None if nothing is."""
    modes = record["modes"]
    lost = [mode for mode, each in modes.items() if any(run["lost"] for run in each["not_counted"])]
    if lost:
        return f"A worker was lost in runs of {', '.join(lost)}; those runs are marked and not in the medians."
    split = [each for mode, each in modes.items() if mode != "one"]
    if split and not any(each["runs"] for each in split):
        why = next((run["why"] for each in modes.values() for run in each["not_counted"]), "")
        return f"No split was measured: {why}."
    return None


def write(record: Record, folder: Path) -> None:
    """Write the record, the report and the chart into a folder, which is made if it is missing. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    (folder / REPORT).write_text(report(record, CHART, RECORD), encoding="utf-8")
    (folder / CHART).write_text(chart(record), encoding="utf-8")


def _conditions(workflow: Workflow, graph: Measurable, runs: Sequence[Run]) -> dict[str, Any]:
    return {
        "workflow": {
            "file": workflow.path.name,
            "sha256": workflow.digest,
            "form": workflow.form,
            "changes": list(graph.changes),
            "settings": graph.settings(),
        },
        "models": models(runs),
        "samplings": samplings(runs),
    }


def _driver(client: ComfyClient, runs: Sequence[Run]) -> dict[str, Any]:
    system = client.system_stats().get("system", {})
    facts = runs[0].facts
    return {
        "device": facts["device"],
        "versions": facts["versions"],
        "python": str(system.get("python_version", "")).split(" ")[0],
        "arguments": list(system.get("argv", []))[1:],
        "system": platform.platform() if is_local(client) else str(system.get("os", "")),
    }
