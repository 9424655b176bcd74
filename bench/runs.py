"""The runs of a measurement: in which order, what each took, and which of them do not count."""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..demo.comfy_client import ComfyClient, ComfyError, ComfyRefused, failure
from ..demo.signals import undisturbed
from .comparison import Comparison, Difference
from .errors import BenchError
from .graph import Measurable

COLD, WARM_UP, MEASURED = "cold", "warm-up", "measured"
# Longer than any render that is worth waiting for: a prompt that never ends is for a person to stop.
_PATIENCE = 24 * 3600.0
_FREEING_ATTEMPTS, _FREEING_SECONDS = 3, 0.2
_IDLE_POLL = 0.5
# Of ComfyUI's history, after each run: as many may begin and end within two requests.
_PROMPTS_LOOKED_AT = 8


@dataclass
class Run:
    """One prompt. seconds: from queue to saved file; difference: see Comparison.

    cached: nodes that ComfyUI did not compute anew. usage: by worker, what its process took (see distributed.usage).
    problem: why it does not count, None if it does. failed: it made nothing, and `seconds` is the time until then.
    """

    mode: str
    kind: str
    seconds: float
    samplings: list[dict[str, Any]]
    facts: dict[str, Any]
    difference: Difference | None = None
    cached: list[str] = field(default_factory=list)
    usage: dict[str, dict[str, int]] = field(default_factory=dict)
    problem: str | None = None
    failed: bool = False

    @property
    def reports(self) -> list[dict[str, Any]]:
        return [report for sampling in self.samplings for report in sampling["reports"]]

    @property
    def failures(self) -> list[str]:
        """Why workers were missing, or dropped out."""
        return _once(failure for report in self.reports for failure in report["failures"])

    @property
    def hindrances(self) -> list[str]:
        """Why something could not be split, apart from what `auto` chose not to."""
        return _once(
            reason for report in self.reports for reason in report["reasons"] if reason not in report["choices"]
        )

    @property
    def sampling_seconds(self) -> float:
        return sum(sampling["seconds"] for sampling in self.samplings)

    @property
    def forwards_split(self) -> int:
        return sum(report["forwards_split"] for report in self.reports)


class Watch(Protocol):
    """Looks at the workers around a run."""

    def before(self) -> None: ...

    def after(self) -> dict[str, dict[str, int]]: ...


class Runner:
    """Runs one graph in its modes, one prompt after the other. done: the runs so far, failed ones among them."""

    def __init__(self, client: ComfyClient, graph: Measurable, watch: Watch, say: Callable[[str], None]) -> None:
        self._client = client
        self._graph = graph
        self._watch = watch
        self._say = say
        self._comparison = Comparison()
        self._previous: str | None = None
        self.done: list[Run] = []

    def all(self, modes: Sequence[str], runs: int) -> None:
        """Warm every mode up, then run each `runs` times in alternating order; `done` grows with each.

        A mode that failed or split nothing when it was warmed up has no more runs. Raises BenchError if the very first
        run fails, ComfyError or OSError if ComfyUI does not answer any more.
        """
        # Each begins cold, with ComfyUI's memory and that of the workers freed, so that all load the same. The last is
        # to leave the workers with the model: "one" does not load it there, and "auto" does not wait until it is.
        for mode in sorted(modes, key=["one", "auto", "rows", "tokens"].index):
            self._say(f"{mode}: first run, which loads everything")
            self.done.append(self._cold(mode))
        unfit = {run.mode for run in self.done if run.failed or _has_nothing_to_split(run)}
        fit = [mode for mode in modes if mode not in unfit]
        if "auto" in fit:
            self._say("auto: second run, in which it learns what a split costs")
            self.done.append(self._one("auto", WARM_UP))
        for index in range(runs):
            for mode in fit if index % 2 == 0 else reversed(fit):
                self._say(f"{mode}: run {index + 1} of {runs}")
                self.done.append(self._one(mode, MEASURED))

    def _cold(self, mode: str) -> Run:
        """A run that finds nothing loaded. ComfyUI frees its memory when it comes to it, perhaps after the prompt."""
        attempts = 0
        while True:
            self._client.free()
            time.sleep(_FREEING_SECONDS)
            run = self._one(mode, COLD)
            attempts += 1
            if run.failed or not run.cached or attempts == _FREEING_ATTEMPTS:
                return run

    def _one(self, mode: str, kind: str) -> Run:
        """Run one prompt to its end, once ComfyUI has nothing else to do. Raises BenchError if the first one fails."""
        if not self._is_idle():
            self._say("waiting for what else is queued in ComfyUI")
            while not self._is_idle():
                time.sleep(_IDLE_POLL)
        # Only now: a worker that another prompt uses does not answer, and would not count anew.
        if mode != "one":
            self._watch.before()
        began = time.monotonic()
        try:
            entry = self._prompt(mode)
            crowded = self._client.queue_size() > 0
            preceded = self._follows_another(entry["prompt"][1])
            run = self._read(mode, kind, entry)
        except BenchError as error:
            if not self.done:
                raise
            self._say(str(error))
            return Run(mode, kind, time.monotonic() - began, [], {}, problem=str(error), failed=True)
        run.usage = self._watch.after() if mode != "one" else {}
        if crowded:
            run.problem = "something else was queued meanwhile"
        elif preceded:
            run.problem = "another prompt ran between the run before and this one"
        else:
            run.problem = problem_of(run)
        return run

    def _is_idle(self) -> bool:
        try:
            return self._client.queue_size() == 0
        except TimeoutError:  # too busy to say so
            return False

    def _prompt(self, mode: str) -> dict[str, Any]:
        """The history entry of a prompt that succeeded. Raises BenchError if it does not."""
        prompt = ""
        try:
            with undisturbed():  # there is no cancelling a prompt whose id is not known yet
                prompt = self._client.queue(self._graph.for_run(mode, uuid.uuid4().hex))
            entry = self._client.wait(prompt, _PATIENCE)
        except ComfyRefused as error:
            raise BenchError(f"The workflow does not run: {_refusal(str(error))}") from None
        except KeyboardInterrupt:
            # The ComfyUI that was started for this may have been ended by the same Ctrl-C.
            with contextlib.suppress(ComfyError, OSError):
                self._client.cancel(prompt)
            raise
        if entry["status"].get("status_str") != "success":
            self._previous = prompt
            raise BenchError(f"The workflow failed in {mode!r}. {failure(entry).strip()}")
        return entry

    def _follows_another(self, prompt: str) -> bool:
        """Whether a prompt of somebody else ended between our last one and this one, which ends now."""
        ended = self._client.latest(_PROMPTS_LOOKED_AT)
        before = ended[: ended.index(prompt)] if prompt in ended else ended
        previous, self._previous = self._previous, prompt
        return bool(previous and before and before[-1] != previous)

    def _read(self, mode: str, kind: str, entry: dict[str, Any]) -> Run:
        measured = [output for output in entry["outputs"].values() if "monarch_measured" in output]
        if not measured:
            raise BenchError("ComfyUI's history does not hold what was measured. Is another prompt server in between?")
        # Each of several tells what was sampled before it; the last one knows all.
        facts = max((output["monarch_measured"][0] for output in measured), key=lambda each: len(each["samplings"]))
        files = [file for output in measured for file in output.get("monarch_tensors", [])]
        run = Run(mode, kind, _seconds(entry, kind), facts["samplings"], facts)
        run.difference = self._comparison.difference(mode, map(self._client.view, files))
        run.cached = [node for _, told in entry["status"]["messages"] for node in told.get("nodes") or []]
        if not run.samplings:
            raise BenchError(
                "Nothing was sampled in a run, so there is nothing to measure: ComfyUI answered it from its cache, or "
                "the sampler does not use the MODEL that it is given."
            )
        return run


def require_idle(client: ComfyClient) -> None:
    """Raises BenchError if ComfyUI has anything to do."""
    running, waiting = client.queue_lengths()
    if running or waiting:
        raise BenchError(
            f"ComfyUI at {client.url} is busy: {running} running, {waiting} waiting. Nothing else may run beside a "
            "measurement; start it again when that is done."
        )


def _refusal(text: str) -> str:
    """What ComfyUI said when it did not take a prompt, in a sentence; the text as it is where it has another form."""
    try:
        answer = json.loads(text.partition("/prompt: ")[2])
        problems = [
            f"node {key} ({node['class_type']}): {error['message']}, {error['details']}"
            for key, node in answer["node_errors"].items()
            for error in node["errors"]
        ]
        return "; ".join(problems) or str(answer["error"]["message"])
    except (LookupError, TypeError, ValueError, AttributeError):
        return text


def _seconds(entry: dict[str, Any], kind: str) -> float:
    """From when a prompt was queued until its last file was saved, by ComfyUI's own clock."""
    times = {what: told["timestamp"] for what, told in entry["status"]["messages"] if "timestamp" in told}
    began = times["execution_start"]
    if kind != COLD:  # before which ComfyUI still frees memory
        began = (entry["prompt"][3] or {}).get("create_time") or began
    return (times["execution_success"] - began) / 1000


def _has_nothing_to_split(run: Run) -> bool:
    return run.mode in ("rows", "tokens") and not run.forwards_split and not run.failures and bool(run.hindrances)


def problem_of(run: Run) -> str | None:
    """Why a run does not count, None if it does. Read from the reports of its samplings."""
    if run.mode == "one":
        return None
    if run.failures:
        return f"a worker was lost: {'; '.join(run.failures)}"
    if run.forwards_split or (run.mode == "auto" and run.reports and not run.hindrances):
        return None
    why = run.hindrances or [report["line"] for report in run.reports] or ["nothing that was sampled had a split on it"]
    return f"it ran on one machine: {'; '.join(why)}"


def _once(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))
