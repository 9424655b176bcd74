"""One measurement from beginning to end: conditions, runs, and the files that say what came of it."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..demo.comfy_client import ComfyClient, ComfyError
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
    """Measure a workflow file in `modes`, each `runs` times.

    What ends it early leaves the runs that were done until then in the record, with the reason in `cut_short`. Raises
    BenchError, ComfyError, OSError or KeyboardInterrupt if there was none.
    """
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
    system = client.system_stats().get("system", {})
    runner = Runner(client, graph, workers, say)
    cut_short = None
    try:
        runner.all(modes, runs)
    except (KeyboardInterrupt, ComfyError, OSError) as error:
        if not runner.done:
            raise
        cut_short = "it was interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
    done = runner.done
    record = {
        **summary(done, modes),
        "runs_asked": runs,
        "cut_short": cut_short,
        "began": began,
        **_conditions(workflow, graph, done),
        "driver": _driver(client, system, done),
        "workers": examined,
        "cluster": workers.settings,
        "notes": [_REMOTE] if not is_local(client) else [],
    }
    return {"ok": finding(record) is None, **record}


def finding(record: Record) -> str | None:
    """What is wrong with a measurement, in a sentence; None if nothing is."""
    modes = record["modes"]
    if record["cut_short"]:
        return f"The measurement was cut short, and holds what was done until then: {record['cut_short']}"
    failed = {mode: why for mode, each in modes.items() if (why := _why_failed(each)) is not None}
    if failed:
        return f"A run of {', '.join(failed)} failed, is marked and not in the medians: {next(iter(failed.values()))}"
    lost = [mode for mode, each in modes.items() if any(run["lost"] for run in each["not_counted"])]
    if lost:
        return f"A worker was lost in runs of {', '.join(lost)}; those runs are marked and not in the medians."
    split = [each for mode, each in modes.items() if mode != "one"]
    if split and not any(each["runs"] for each in split):
        why = next((run["why"] for each in modes.values() for run in each["not_counted"]), "")
        return f"No split was measured: {why}."
    return None


def _why_failed(mode: Record) -> str | None:
    return next((run["why"] for run in mode["not_counted"] if run["failed"]), None)


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
            "changes": [*workflow.changes, *graph.changes],
            "settings": graph.settings(),
        },
        "models": models(runs),
        "samplings": samplings(runs),
    }


def _driver(client: ComfyClient, system: Mapping[str, Any], runs: Sequence[Run]) -> dict[str, Any]:
    facts = runs[0].facts
    return {
        "device": facts["device"],
        "versions": facts["versions"],
        "python": str(system.get("python_version", "")).split(" ")[0],
        "arguments": list(system.get("argv", []))[1:],
        "system": platform.platform() if is_local(client) else str(system.get("os", "")),
    }
