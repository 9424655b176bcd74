"""`monarch bench WORKFLOW.json` against a real ComfyUI with tiny models, and with all that comes between."""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

pytestmark = [pytest.mark.comfyui, pytest.mark.timeout(240)]

# Every ComfyUI since 0.8.0 reads the sizes of a small Wan from its file; before 0.15 only our loader says which it was.
FAMILY, MODEL, DEEP, LOADER = "wan", "wan.safetensors", "wan_deep.safetensors", "MonarchModelLoader"
TEMPLATES = sorted((Path(__file__).parents[2] / "example_workflows").glob("*.json"))


@pytest.fixture(scope="module")
def configuration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from monarch_split.tests.driving import share_identity

    folder = tmp_path_factory.mktemp("configuration")
    share_identity(folder)
    return folder


@pytest.fixture(scope="module")
def base(comfy: Any, comfyui_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ComfyUI's base folder, with the pack and tiny models."""
    from monarch_split.demo.comfy_server import ComfyServer
    from monarch_split.demo.tiny_models import write_model
    from monarch_split.demo.worker_process import PACK

    folder = tmp_path_factory.mktemp("base")
    server = ComfyServer(folder, comfyui=comfyui_path, pack=PACK, pack_name="monarch-split")
    server._make_folders()
    for scale in ("tiny", "deep"):
        write_model(FAMILY, server.models_folder(), scale=scale)
    return folder


@pytest.fixture(scope="module")
def server(base: Path, configuration: Path, comfyui_path: Path) -> Iterator[Any]:
    from monarch_split.demo.comfy_server import ComfyServer
    from monarch_split.demo.worker_process import PACK

    with ComfyServer(
        base, comfyui=comfyui_path, pack=PACK, pack_name="monarch-split",
        environment={"MONARCH_CONFIG_DIR": str(configuration)},
    ) as running:  # fmt: skip
        yield running


@pytest.fixture
def join(configuration: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """join(worker, …): the configuration of ComfyUI and of bench names these workers."""
    monkeypatch.setenv("MONARCH_CONFIG_DIR", str(configuration))

    def write(*workers: Any) -> None:
        listed = ", ".join(f'"{worker.address}"' for worker in workers)
        (configuration / "monarch.toml").write_text(f"[clusters.default]\nworkers = [{listed}]\n")

    write()
    return write


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str], tmp_path: Path, server: Any) -> Callable[..., tuple[int, Any, str]]:
    """bench(graph, *arguments) -> (exit code, what --json printed, what went to stderr)."""
    from monarch_split import cli

    def run(graph: Any, *arguments: str) -> tuple[int, Any, str]:
        path = tmp_path / "workflow.json"
        path.write_text(json.dumps(graph))
        where = ["--server", server.url, "--out", str(tmp_path / "out"), "--json"]
        code = cli.main(["bench", str(path), *where, *arguments])
        printed = capsys.readouterr()
        return code, json.loads(printed.out), printed.err

    return run


def graph(**settings: Any) -> Any:
    from monarch_split.demo.graphs import text_to_image

    given = {
        "family": FAMILY,
        "loader_node": LOADER,
        "steps": 4,
        "cfg": 4.0,
        "seed": 5,
        "sampler_node": "KSampler",
        **settings,
    }
    return text_to_image(given.pop("model", MODEL), **given)


def as_saved(graph: Any, info: Any) -> Any:
    """The graph as ComfyUI's page saves it, with a control after each seed."""
    keys = {key: number for number, key in enumerate(graph, 1)}
    nodes, links = [], []
    for key, node in graph.items():
        values, slots = [], []
        for group in ("required", "optional"):
            for name in info[node["class_type"]]["input_order"].get(group, []):
                value = node["inputs"].get(name)
                if isinstance(value, list):
                    kind = info[graph[value[0]]["class_type"]]["output"][value[1]]
                    links.append([len(links) + 1, keys[value[0]], value[1], keys[key], len(slots), kind])
                    slots.append({"name": name, "type": kind, "link": len(links)})
                elif value is not None:
                    values.append(value)
                    values += ["randomize"] if name == "seed" else []
        outputs = [{"name": kind, "type": kind} for kind in info[node["class_type"]]["output"]]
        nodes.append(
            {"id": keys[key], "type": node["class_type"], "mode": 0, "inputs": slots, "outputs": outputs,
             "widgets_values": values}
        )  # fmt: skip
    return {"nodes": nodes, "links": links, "version": 0.4}


def runner_of(server: Any, graph: Any, say: Callable[[str], None]) -> Any:
    from monarch_split.bench.graph import measurable
    from monarch_split.bench.runs import Runner
    from monarch_split.bench.workers import NoWorkers

    return Runner(server, measurable(graph, server.all_object_info()), NoWorkers(), say)


def steps_of(server: Any, name: str) -> int:
    log = server.output / name
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_every_mode_of_a_saved_workflow_is_measured_and_compared(
    server: Any, bench: Any, join: Any, start_worker: Any, tmp_path: Path
) -> None:
    log = "success.jsonl"
    saved = as_saved(graph(step_log=log), server.all_object_info())
    with start_worker(name="second") as worker:
        join(worker)
        code, record, said = bench(saved, "--runs", "2")
    assert code == 0, said
    assert list(record["modes"]) == ["one", "rows", "tokens", "auto"]
    assert set(record["speedup"]) == {"rows", "tokens", "auto"}
    for name, mode in record["modes"].items():
        assert mode["runs"] == 2, (name, mode["not_counted"])
        assert 0 < mode["sampling"]["median_s"] < mode["median_s"] < mode["spread_s"][1] + 1e-3
        assert mode["load_s"] is not None
        assert mode["peak_memory"]["driver"]["main"] > 100e6
        assert mode["difference"]["max_abs"] <= 1e-5
    for name in ("rows", "tokens"):
        mode = record["modes"][name]
        assert (mode["forwards_split"], mode["forwards"]) == (4, 4), mode["lines"]
        assert mode["bytes_sent"] > 0
        assert mode["waiting_s"] > 0
        assert mode["peak_memory"]["worker"]["main"] > 100e6
        assert mode["worker_load_s"] is not None
    assert record["modes"]["one"]["forwards"] == 0
    assert record["workflow"]["form"] == "ui"
    assert record["models"][0]["file"] == MODEL
    assert record["models"][0]["format"] == "fp32"
    assert record["workers"][0]["name"] == "second"
    assert record["workers"][0]["link"]["gb_per_s"] > 0
    assert record["driver"]["versions"]["comfyui"]
    assert {"seed": 5, "steps": 4}.items() <= next(
        each for each in record["workflow"]["settings"] if each["class"] == "KSampler"
    ).items()
    # A first run of each, a second one of auto, and two of each: none came out of ComfyUI's cache.
    assert steps_of(server, log) == 4 * (4 + 1 + 4 * 2)
    written = json.loads((tmp_path / "out" / "record.json").read_text())
    assert written["speedup"] == record["speedup"]
    assert "![" in (tmp_path / "out" / "report.md").read_text()
    assert (tmp_path / "out" / "chart.svg").read_text().startswith("<svg")


def test_only_what_samples_is_computed_anew(server: Any, join: Any) -> None:
    from monarch_split.bench.runs import COLD

    runner = runner_of(server, graph(sampler_node="MonarchSampler", split="auto"), lambda text: None)
    runner.all(("one",), 2)
    cold, *later = runner.done
    assert cold.kind == COLD
    assert cold.cached == []
    for run in later:
        assert {"model", "positive", "negative", "empty"} <= set(run.cached)
        assert not {"sampler", "decode", "picture"} & set(run.cached)
        assert len(run.samplings) == 1


def test_a_mode_that_has_nothing_to_split_is_named_and_not_run_again(bench: Any, join: Any, start_worker: Any) -> None:
    with start_worker(name="second") as worker:
        join(worker)
        code, record, said = bench(graph(cfg=1.0), "--runs", "1", "--modes", "one,rows,tokens")
    assert code == 0, said
    assert record["ok"]
    assert record["modes"]["rows"]["runs"] == 0
    assert record["modes"]["rows"]["median_s"] is None
    assert "one row" in record["modes"]["rows"]["not_counted"][0]["why"]
    assert "run 1 of 1" in said
    assert "rows: run" not in said
    assert record["modes"]["tokens"]["forwards_split"] == 4


def test_a_run_that_loses_its_worker_is_marked_and_the_others_count(
    server: Any, join: Any, start_worker: Any, tmp_path: Path
) -> None:
    from monarch_split.bench.measurement import finding, measure

    log = "lost.jsonl"
    path = tmp_path / "workflow.json"
    path.write_text(json.dumps(graph(steps=8, step_log=log, step_delay=0.1)))
    killers: list[threading.Thread] = []
    with start_worker(name="mortal") as worker:
        port = int(worker.address.rsplit(":", 1)[1])
        replaced: list[Any] = []

        def kill_half_way(began_at: int) -> None:
            deadline = time.monotonic() + 60
            while steps_of(server, log) < began_at + 4 and time.monotonic() < deadline:
                time.sleep(0.02)
            worker.kill()

        def say(text: str) -> None:
            if killers and not replaced:
                killers[0].join(60)
                replaced.append(start_worker(name="mortal", port=port))
            if text == "rows: run 1 of 2":
                killers.append(threading.Thread(target=kill_half_way, args=[steps_of(server, log)]))
                killers[0].start()

        join(worker)
        try:
            record = measure(path, server, ("one", "rows"), 2, say)
        finally:
            for each in replaced:
                each.close()
    rows = record["modes"]["rows"]
    assert rows["runs"] == 1
    (marked,) = rows["not_counted"]
    assert marked["lost"]
    assert "mortal" in marked["why"]
    assert rows["seconds"] == [rows["median_s"]]
    assert rows["forwards_split"] >= 7, rows["lines"]
    assert record["modes"]["one"]["runs"] == 2
    assert "lost in runs of rows" in (finding(record) or "")


def test_a_workflow_that_fails_ends_with_its_nodes_error(bench: Any, join: Any, tmp_path: Path) -> None:
    code, record, said = bench(graph(step_log="../outside.jsonl"), "--modes", "one")
    assert code == 1
    assert "MonarchDemoStepLog: ValueError" in record["error"]
    assert "not a plain file name" in said
    assert not (tmp_path / "out").exists()


def test_a_workflow_that_comfyui_refuses_ends_with_its_reason(bench: Any, join: Any) -> None:
    code, record, _ = bench(graph(model="absent.safetensors"), "--modes", "one")
    assert code == 1
    assert f"node model ({LOADER})" in record["error"]
    assert "absent.safetensors" in record["error"]


def test_nothing_is_measured_beside_another_prompt(server: Any, bench: Any, join: Any) -> None:
    prompt = server.queue(graph(model=DEEP, steps=20, step_log="busy.jsonl", step_delay=0.2))
    try:
        code, record, _ = bench(graph(), "--modes", "one")
        assert code == 1
        assert f"ComfyUI at {server.url} is busy: 1 running, 0 waiting" in record["error"]
    finally:
        server.interrupt()
        server.wait(prompt, timeout=30)


def test_arguments_for_a_comfyui_that_runs_already_are_refused(server: Any, bench: Any, join: Any) -> None:
    code, record, _ = bench(graph(), "--modes", "one", "--", "--lowvram")
    assert code == 2
    assert f"{server.url} already" in record["error"]


def test_a_prompt_that_comes_in_between_marks_the_run(server: Any, join: Any, tmp_path: Path) -> None:
    from monarch_split.bench.measurement import measure

    path = tmp_path / "workflow.json"
    path.write_text(json.dumps(graph(step_log="between.jsonl", step_delay=0.1)))
    strangers: list[threading.Thread] = []

    def disturb(began_at: int) -> None:
        deadline = time.monotonic() + 30
        while steps_of(server, "between.jsonl") <= began_at and time.monotonic() < deadline:
            time.sleep(0.02)
        for seed in (98, 99):
            server.queue(graph(seed=seed, step_log="stranger.jsonl", step_delay=0.2))

    def say(text: str) -> None:
        if text == "one: run 1 of 3":
            strangers.append(threading.Thread(target=disturb, args=[steps_of(server, "between.jsonl")]))
            strangers[0].start()

    record = measure(path, server, ("one",), 3, say)
    strangers[0].join(30)
    beside, behind = record["modes"]["one"]["not_counted"]
    assert "something else was queued" in beside["why"]
    assert "another prompt ran" in behind["why"]
    assert record["modes"]["one"]["runs"] == 1


def test_a_prompt_between_two_runs_marks_the_second(server: Any, join: Any) -> None:
    """It is gone when that is queued, but ComfyUI may have dropped what runs are to find in its cache."""

    def say(text: str) -> None:
        if text == "one: run 2 of 3":
            server.run(graph(seed=98))

    runner = runner_of(server, graph(), say)
    runner.all(("one",), 3)
    assert [run.problem is None for run in runner.done] == [True, True, False, True]
    assert "another prompt ran" in (runner.done[2].problem or "")


def test_a_run_that_fails_is_marked_and_a_mode_that_only_fails_is_left_out(server: Any, join: Any) -> None:
    from monarch_split.bench.record import summary

    log = server.output / "fails.jsonl"

    def say(text: str) -> None:
        """A folder in the place of the file that a node appends to."""
        broken = text.startswith(("rows: first run", "one: run 2 of 3"))
        if broken and not log.is_dir():
            log.unlink()
            log.mkdir()
        elif ":" in text and not text.startswith("The workflow") and not broken and log.is_dir():
            log.rmdir()

    runner = runner_of(server, graph(step_log=log.name), say)
    runner.all(("one", "rows"), 3)
    assert [(run.mode, run.kind, run.failed) for run in runner.done] == [
        ("one", "cold", False), ("rows", "cold", True),
        ("one", "measured", False), ("one", "measured", True), ("one", "measured", False),
    ]  # fmt: skip
    modes = summary(runner.done, ("one", "rows"))["modes"]
    assert modes["one"]["runs"] == 2
    assert "IsADirectoryError" in modes["one"]["not_counted"][0]["why"]
    assert modes["rows"]["failed"]


def test_ctrl_c_keeps_what_was_measured_and_other_peoples_prompts(server: Any, join: Any, tmp_path: Path) -> None:
    from monarch_split.demo.worker_process import PACK

    log = "stopped.jsonl"
    path = tmp_path / "workflow.json"
    path.write_text(json.dumps(graph(steps=20, step_log=log, step_delay=0.05)))
    command = [
        sys.executable, str(PACK / "__main__.py"), "bench", str(path), "--modes", "one", "--runs", "9", "--json",
        "--server", server.url, "--out", str(tmp_path / "out"),
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert any("run 2 of 9" in line for line in process.stderr)
            began_at, deadline = steps_of(server, log), time.monotonic() + 60
            while steps_of(server, log) < began_at + 3 and time.monotonic() < deadline:
                time.sleep(0.02)
            stranger = server.queue(graph(seed=77))
            process.send_signal(signal.SIGINT)
            printed, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 1
    record = json.loads(printed)
    assert record["cut_short"] == "it was interrupted"
    assert record["modes"]["one"]["runs"] == 1
    assert "cut short" in (tmp_path / "out" / "report.md").read_text()
    assert server.wait(stranger, timeout=60)["status"]["status_str"] == "success"
    assert steps_of(server, log) < 3 * 20, "the run that was stopped went on to its end"


def test_a_comfyui_that_ends_leaves_what_was_measured(
    base: Path, comfyui_path: Path, tmp_path: Path, join: Any
) -> None:
    from monarch_split.bench.measurement import finding, measure
    from monarch_split.bench.server import started

    path = tmp_path / "workflow.json"
    path.write_text(json.dumps(graph()))
    arguments = ["--cpu", "--base-directory", str(base)]
    with started(comfyui_path, Path(sys.executable), arguments, lambda text: None) as comfyui:
        process = cast(Any, comfyui)

        def say(text: str) -> None:
            if text == "one: run 2 of 2":
                os.kill(process.pid, signal.SIGKILL)

        if os.path.isdir("/proc"):
            assert os.path.samefile(f"/proc/{process.pid}/cwd", comfyui_path)
        record = measure(path, comfyui, ("one",), 2, say)
    assert record["modes"]["one"]["runs"] == 1
    assert "ComfyUI has ended" in record["cut_short"]
    assert "cut short" in (finding(record) or "")


def test_a_prompt_is_cancelled_and_no_other(server: Any) -> None:
    def slow(seed: int) -> Any:
        return graph(seed=seed, steps=60, step_log="cancelled.jsonl", step_delay=0.1)

    first, second, third = server.queue(slow(1)), server.queue(slow(2)), server.queue(graph(seed=3))
    server.cancel(second)
    assert server.queue_size() == 2
    deadline = time.monotonic() + 30
    while not steps_of(server, "cancelled.jsonl") and time.monotonic() < deadline:
        time.sleep(0.02)
    server.cancel(first)
    assert server.wait(first, timeout=30)["status"]["status_str"] == "error"
    assert server.wait(third, timeout=30)["status"]["status_str"] == "success"
    server.cancel(third)
    assert server.latest(2) == [first, third]


def test_a_busy_or_a_missing_worker_is_named(bench: Any, join: Any, start_worker: Any) -> None:
    from monarch_split.distributed.addresses import parse_address
    from monarch_split.distributed.peer import Peer
    from monarch_split.distributed.versions import own_versions

    code, record, _ = bench(graph())
    assert code == 1
    assert "No worker is configured" in record["error"]
    with start_worker(name="second") as worker:
        join(worker)
        holder = Peer(parse_address(worker.address), lambda: None)
        holder.connect(own_versions(None), allow_mismatch=True)
        try:
            code, record, _ = bench(graph())
        finally:
            holder.close(cancel=True)
        assert code == 1
        assert "busy with" in record["error"]
    code, record, _ = bench(graph())
    assert code == 1
    assert worker.address in record["error"]


def test_a_comfyui_is_started_where_none_runs_and_ended_again(
    base: Path, comfyui_path: Path, join: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from monarch_split import cli

    servers = importlib.import_module("monarch_split.bench.server")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setattr(servers, "DEFAULT_ADDRESS", f"127.0.0.1:{probe.getsockname()[1]}")
    path = tmp_path / "workflow.json"
    path.write_text(json.dumps(graph()))
    measuring = ["bench", str(path), "--modes", "one", "--runs", "1", "--out", str(tmp_path / "out"), "--json"]
    monkeypatch.chdir(base.parent)
    code = cli.main([*measuring, "--comfyui", str(comfyui_path), "--", "--cpu", "--base-directory", base.name])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    record = json.loads(printed.out)
    assert record["modes"]["one"]["runs"] == 1
    flags = record["driver"]["arguments"]
    port = flags[flags.index("--port") + 1]
    with socket.socket() as probe, pytest.raises(OSError, match="refused"):
        probe.connect(("127.0.0.1", int(port)))


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_templates_become_what_a_second_converter_makes_of_them(server: Any, path: Path) -> None:
    from monarch_split.bench.ui_graph import to_api
    from monarch_split.tests.comfy.template_prompts import as_prompt

    saved = json.loads(path.read_text(encoding="utf-8"))
    info = server.all_object_info()
    converted, _ = to_api(saved, info)
    expected = as_prompt(saved, info.__getitem__)
    assert set(converted) == set(expected)
    for key, node in expected.items():
        if node["class_type"] == "SaveVideo":
            del node["inputs"]["codec"]  # the name that it had before it depended on the format
        assert node["class_type"] == converted[key]["class_type"]
        assert node["inputs"].items() <= converted[key]["inputs"].items(), node["class_type"]
