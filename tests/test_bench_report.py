"""What runs come to: medians of those that count, a report and a chart that say so, and a mark on those that do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import save

from monarch_split.bench.chart import chart
from monarch_split.bench.comparison import Comparison
from monarch_split.bench.measurement import finding, write
from monarch_split.bench.record import summary
from monarch_split.bench.report import report
from monarch_split.bench.runs import COLD, MEASURED, Run, problem_of
from monarch_split.distributed.report import Report

SVG = "{http://www.w3.org/2000/svg}"


def run(mode: str, seconds: float, *, kind: str = MEASURED, value: float = 0.0, **reported: Any) -> Run:
    """A run of one sampling, which took all but a second; `reported` of the split, None in `split` for no report."""
    told = Report(mode, steps=4, forwards=4, forwards_split=4, split="rows", waiting=0.25, bytes_sent=2_000_000)
    for name, given in reported.items():
        setattr(told, name, given)
    sampling = {
        "seconds": seconds - 1, "steps": 4, "sampler": "euler", "latent": [[1, 16, 8, 8]], "compute_dtype": "bfloat16",
        "peak_memory": {"main": 3_000_000_000 + round(seconds), "load_ms": 0},
        "model": {"file": "a|b.safetensors", "bytes": 5, "digest": "d" * 40, "format": "bf16", "family": "Flux"},
        "reports": [] if mode == "one" else [told.as_dict()],
    }  # fmt: skip
    made = Run(mode, kind, seconds, [sampling], {}, (value, value))
    made.usage = {} if mode == "one" else {"second": {"main": 4_000_000_000, "load_ms": 1500}}
    made.problem = problem_of(made)
    return made


def failed(mode: str, *, kind: str = MEASURED) -> Run:
    return Run(mode, kind, 3, [], {}, problem="The workflow failed in it. KSampler: out of memory", failed=True)


def recorded(runs: list[Run], modes: tuple[str, ...] = ("one", "rows")) -> dict[str, Any]:
    return {
        "ok": True,
        **summary(runs, modes),
        "runs_asked": 3,
        "cut_short": None,
        "began": "2026-01-01T00:00:00Z",
        "workflow": {
            "file": "w<1>.json", "sha256": "e" * 64, "form": "api", "changes": ["It was changed."], "settings": [],
        },
        "models": [runs[0].samplings[0]["model"]],
        "samplings": [runs[0].samplings[0]],
        "driver": {
            "device": "GPU & co", "python": "3.12", "arguments": [], "system": "Linux",
            "versions": {"comfyui": "0.33.0", "pack": "0.1.0", "torch": "2.13", "kitchen": ""},
        },
        "workers": [],
        "cluster": {},
        "notes": [],
    }  # fmt: skip


@pytest.fixture
def runs() -> list[Run]:
    lost: dict[str, Any] = {"failures": ["second: gone"], "events": ["second: gone"]}
    return [
        run("one", 25, kind=COLD), run("rows", 30, kind=COLD),
        run("one", 10), run("rows", 6, value=0.5), run("rows", 5), run("one", 12), run("one", 11),
        run("rows", 90, **lost),
    ]  # fmt: skip


class TestTheRecord:
    def test_medians_spread_load_and_speed_up(self, runs: list[Run]) -> None:
        found = summary(runs, ("one", "rows"))
        one, rows = found["modes"]["one"], found["modes"]["rows"]
        assert (one["runs"], one["median_s"], one["spread_s"], one["load_s"]) == (3, 11, [10, 12], 14)
        assert one["sampling"] == {"median_s": 10, "spread_s": [9, 11]}
        assert found["speedup"] == {"rows": 2.0}
        assert rows["worker_load_s"] == 1.5
        assert rows["peak_memory"] == {"driver": {"main": 3_000_000_006}, "worker": {"main": 4_000_000_000}}
        assert one["peak_memory"]["worker"] is None
        assert (rows["waiting_s"], rows["bytes_sent"], rows["forwards_split"]) == (0.25, 2_000_000, 4)

    def test_a_run_that_lost_a_worker_is_marked_and_not_averaged_in(self, runs: list[Run]) -> None:
        rows = summary(runs, ("one", "rows"))["modes"]["rows"]
        assert (rows["runs"], rows["median_s"], rows["spread_s"]) == (2, 5.5, [5, 6])
        (marked,) = rows["not_counted"]
        assert marked == {
            "run": "measured", "seconds": 90, "why": "a worker was lost: second: gone", "lost": True, "failed": False,
        }  # fmt: skip

    def test_a_run_that_failed_is_marked_and_not_averaged_in(self, runs: list[Run]) -> None:
        record = recorded([*runs[:-1], failed("rows")])
        rows = record["modes"]["rows"]
        assert (rows["runs"], rows["median_s"], rows["failed"]) == (2, 5.5, False)
        assert [marked["failed"] for marked in rows["not_counted"]] == [True]
        assert "A run of rows failed" in (finding(record) or "")
        assert "by rows, measured run of 3 s that failed: The workflow failed in it" in report(record, "c", "r")

    def test_a_mode_without_a_good_run_has_failed(self, runs: list[Run]) -> None:
        record = recorded([run for run in runs if run.mode == "one"] + [failed("rows", kind=COLD)])
        rows = record["modes"]["rows"]
        assert (rows["failed"], rows["median_s"], rows["load_s"], rows["difference"]) == (True, None, None, None)
        assert "| by rows | failed |" in report(record, "c", "r")
        assert ">failed<" in chart(record)
        assert "out of memory" in (finding(record) or "")

    def test_differences_are_the_largest_of_the_runs_that_count(self, runs: list[Run]) -> None:
        modes = summary(runs, ("one", "rows"))["modes"]
        assert modes["one"]["difference"] == {"max_abs": 0, "relative": 0}
        assert modes["rows"]["difference"]["max_abs"] == pytest.approx(0.5)
        assert modes["rows"]["difference"]["relative"] == pytest.approx(0.5)

    def test_results_of_other_shapes_are_not_compared(self, runs: list[Run]) -> None:
        runs[4].difference = (float("inf"), float("inf"))
        record = recorded(runs)
        assert record["modes"]["rows"]["difference"] == {"max_abs": None, "relative": None}
        assert "cannot be compared" in report(record, "c", "r")
        json.dumps(record, allow_nan=False)

    def test_a_run_that_found_things_loaded_gives_no_load_time(self, runs: list[Run]) -> None:
        runs[0].cached = ["1"]
        assert summary(runs, ("one",))["modes"]["one"]["load_s"] is None

    def test_a_mode_without_a_run_that_counts_has_no_numbers(self) -> None:
        none = {"forwards_split": 0, "split": None, "reasons": ["one row has nothing to split"]}
        record = recorded([run("one", 4), run("rows", 9, kind=COLD, **none)])
        assert record["modes"]["rows"]["median_s"] is None
        assert record["speedup"] == {}
        assert "one row has nothing to split" in report(record, "c", "r")
        assert "no run that counts" in chart(record)


class TestComparing:
    """With the first result of one machine, which is the only one that is kept."""

    @staticmethod
    def made(*values: float, shape: tuple[int, ...] = (2, 3)) -> list[bytes]:
        return [save({"0": torch.full(shape, value)}) for value in values]

    def test_results_are_compared_with_the_first_of_one_machine(self) -> None:
        comparison = Comparison()
        assert comparison.difference("rows", self.made(1)) is None
        assert comparison.difference("one", self.made(1, 2)) == (0, 0)
        assert comparison.difference("rows", self.made(1, 4)) == pytest.approx((2, 1))
        assert comparison.difference("one", self.made(1, 3)) == pytest.approx((1, 0.5))

    def test_other_shapes_and_other_numbers_of_results(self) -> None:
        comparison = Comparison()
        comparison.difference("one", self.made(1))
        for other in (self.made(1, shape=(2, 4)), self.made(1, 1), []):
            assert comparison.difference("rows", other) == (float("inf"), float("inf"))


class TestWhichRunsCount:
    def test_a_choice_of_auto_counts_and_a_hindrance_does_not(self) -> None:
        slow, foreign = "splitting is not faster here", "the model is compiled"
        unsplit: dict[str, Any] = {"forwards_split": 0, "split": None}
        assert run("auto", 3, **unsplit, reasons=[slow], choices=[slow]).problem is None
        assert foreign in (run("auto", 3, **unsplit, reasons=[slow, foreign], choices=[slow]).problem or "")
        assert "one machine" in (run("rows", 3, **unsplit, reasons=[slow], choices=[slow]).problem or "")

    def test_a_render_without_a_split_on_it_does_not_count(self) -> None:
        made = run("rows", 3)
        made.samplings[0]["reports"] = []
        assert problem_of(made)


class TestWhatIsFound:
    def test_a_lost_worker(self, runs: list[Run]) -> None:
        assert "rows" in (finding(recorded(runs)) or "")
        assert finding(recorded(runs[:-1])) is None

    def test_a_measurement_that_was_cut_short(self, runs: list[Run], tmp_path: Path) -> None:
        record = {**recorded(runs[:3]), "cut_short": "it was interrupted"}
        assert "it was interrupted" in (finding(record) or "")
        write(record, tmp_path)
        assert "**The measurement was cut short:** it was interrupted." in (tmp_path / "report.md").read_text()
        assert json.loads((tmp_path / "record.json").read_text())["cut_short"] == "it was interrupted"

    def test_nothing_was_split_though_one_machine_was_not_asked_for(self) -> None:
        none = {"forwards_split": 0, "split": None, "reasons": ["the model is compiled"]}
        assert finding(recorded([run("rows", 9, kind=COLD, **none)], ("rows",)))
        assert finding(recorded([run("rows", 9)], ("rows",))) is None

    def test_nothing_was_split_in_any_mode(self) -> None:
        none = {"forwards_split": 0, "split": None, "reasons": ["the model is compiled"]}
        assert "the model is compiled" in (finding(recorded([run("one", 4), run("rows", 9, kind=COLD, **none)])) or "")
        assert finding(recorded([run("one", 4)], ("one",))) is None


class TestTheReport:
    def test_numbers_marks_and_conditions_are_in_it(self, runs: list[Run]) -> None:
        text = report(recorded(runs), "chart.svg", "record.json")
        assert "| one machine | 11 s (10 to 12) | 10 s (9 to 11) | - | 14 s | none | 3 |" in text
        assert "| by rows | 5.5 s (5 to 6) | 4.5 s (4 to 5) | 2.00x |" in text
        assert "by rows, measured run of 90 s: a worker was lost: second: gone" in text
        assert "![Queue to saved file in each mode](chart.svg)" in text
        assert "It was changed." in text
        assert "4 steps euler, latent 1x16x8x8, bfloat16" in text

    def test_long_times_and_large_sizes_are_no_powers_of_ten(self, runs: list[Run]) -> None:
        for each in runs:
            each.seconds *= 250
            each.samplings[0]["peak_memory"]["main"] = 1_234_000_000_000
        record = recorded(runs)
        written = report(record, "chart.svg", "record.json") + chart(record)
        assert "| 2750 s (2500 to 3000) |" in written
        assert "1234 GB main" in written
        assert "e+" not in written

    def test_names_from_elsewhere_make_no_table_and_no_tag(self, runs: list[Run]) -> None:
        text = report(recorded(runs), "chart.svg", "record.json")
        assert "a\\|b.safetensors" in text
        assert "<1>" not in text

    def test_three_files_are_written(self, runs: list[Run], tmp_path: Path) -> None:
        write(recorded(runs), tmp_path / "new" / "folder")
        written = {path.name for path in (tmp_path / "new" / "folder").iterdir()}
        assert written == {"record.json", "report.md", "chart.svg"}
        assert json.loads((tmp_path / "new" / "folder" / "record.json").read_text())["speedup"] == {"rows": 2.0}


class TestTheChart:
    def test_bars_are_as_long_as_their_times(self, runs: list[Run]) -> None:
        drawn = ElementTree.fromstring(chart(recorded(runs)))
        bars = [rect for rect in drawn.iter(f"{SVG}rect") if rect.get("height") == "26"]
        one, one_rest, rows, rows_rest = (float(bar.get("width", "nan")) for bar in bars)
        assert (rows + rows_rest) / (one + one_rest) == pytest.approx(0.5, abs=0.01)
        assert one_rest == pytest.approx(rows_rest, abs=0.2)  # a second each
        assert len(list(drawn.iter(f"{SVG}circle"))) == 5  # every run that counts

    def test_it_says_what_was_measured_and_nothing_leaves_the_picture(self, runs: list[Run]) -> None:
        drawn = ElementTree.fromstring(chart(recorded(runs)))
        texts = {text.text or "": text for text in drawn.iter(f"{SVG}text")}
        assert {"one", "rows", "11 s", "5.5 s · 2.00x", "1 not counted"} <= set(texts)
        assert any("a|b.safetensors (bf16) · 4 steps euler · GPU & co" in text for text in texts)
        width = float(drawn.get("width", "nan"))
        for text, element in texts.items():
            assert 0 <= float(element.get("x", "nan")) <= width, text
        assert "11 seconds" in (drawn.get("aria-label") or "")

    @pytest.mark.parametrize("scale", [0.002, 0.7, 1.0, 37.0, 4000.0])
    def test_the_axis_has_few_round_steps_for_any_time(self, runs: list[Run], scale: float) -> None:
        for each in runs:
            each.seconds *= scale
        drawn = ElementTree.fromstring(chart(recorded(runs)))
        lines = list(drawn.iter(f"{SVG}line"))
        assert 3 <= len(lines) <= 7
        assert all(float(line.get("x1", "nan")) <= 620 for line in lines)

    def test_nothing_measured_is_still_a_picture(self) -> None:
        none = {"forwards_split": 0, "split": None, "reasons": ["no"]}
        ElementTree.fromstring(chart(recorded([run("rows", 9, **none)], ("rows",))))
