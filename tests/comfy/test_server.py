"""The whole pack in a real ComfyUI server, driven as the browser drives it: prompts, history, progress, interrupt."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.comfyui, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def server(comfy: Any, comfyui_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A ComfyUI server with the pack under test and tiny models; its configuration names no worker yet."""
    from monarch_split.demo.comfy_server import ComfyServer
    from monarch_split.demo.tiny_models import write_model
    from monarch_split.demo.worker_process import PACK
    from monarch_split.tests.driving import share_identity

    base = tmp_path_factory.mktemp("server")
    configuration = base / "configuration"
    configuration.mkdir()
    share_identity(configuration)
    with ComfyServer(
        base, comfyui=comfyui_path, pack=PACK, pack_name="monarch-split",
        environment={"MONARCH_CONFIG_DIR": str(configuration)}, arguments=["--preview-method", "latent2rgb"],
    ) as running:  # fmt: skip
        write_model("flux_schnell", running.models_folder("diffusion_models"))
        write_model("flux_schnell", running.models_folder("diffusion_models"), scale="deep")
        running.configuration = configuration / "monarch.toml"
        yield running


def graph(sampler: str = "MonarchSampler", **more: Any) -> Any:
    from monarch_split.demo.graphs import text_to_image

    settings: dict[str, Any] = {"family": "flux_schnell", "steps": 4, "cfg": 4.0, "seed": 5}
    if sampler == "MonarchSampler":
        settings["split"] = "rows"
    model = more.pop("model", "flux_schnell.safetensors")
    return text_to_image(model, sampler_node=sampler, **{**settings, **more})


def latent_of(server: Any, entry: Any) -> bytes:
    return server.view(entry["outputs"]["latent"]["latents"][0])


def difference(server: Any, one: Any, other: Any) -> float:
    from monarch_split.demo.latents import max_abs_difference

    return max_abs_difference(latent_of(server, one), latent_of(server, other))


def report_of(entry: Any) -> dict[str, Any]:
    return next(output["monarch"][-1] for output in entry["outputs"].values() if "monarch" in output)


def join(server: Any, worker: Any) -> None:
    server.configuration.write_text(f'[clusters.default]\nworkers = ["{worker.address}"]\n')


def test_the_nodes_are_there_with_ksamplers_inputs_in_ksamplers_order(server: Any) -> None:
    stock = server.object_info("KSampler")["input"]["required"]
    ours = server.object_info("MonarchSampler")["input"]["required"]
    assert list(ours) == [*stock, "split"]
    for name, (kind, *_) in stock.items():
        theirs = ours[name][0]
        assert theirs == kind or (theirs == "COMBO" and ours[name][1]["options"] == kind), name
    assert ours["split"][1]["options"] == ["auto", "rows", "off", "tokens"]
    loader = server.object_info("MonarchModelLoader")["input"]["required"]
    assert list(loader) == list(server.object_info("UNETLoader")["input"]["required"])
    for node in ("MonarchSampler", "MonarchSplit", "MonarchModelLoader"):
        for name, (_, settings) in server.object_info(node)["input"]["required"].items():
            assert settings.get("tooltip"), f"{node}.{name} has no tooltip"


def test_the_loader_node_has_the_worker_load_before_anything_is_sampled(
    server: Any, start_worker: Callable[..., Any]
) -> None:
    with start_worker(name="second") as worker:
        join(server, worker)
        loader = {"unet_name": "flux_schnell.safetensors", "weight_dtype": "fp8_e5m2"}
        shown = {"class_type": "PreviewAny", "inputs": {"source": ["1", 0]}}
        # Not connected to an output, so that it is in the prompt and is not run.
        sampler = {"class_type": "MonarchSampler", "inputs": {"model": ["1", 0], "split": "auto"}}
        nodes = {"1": {"class_type": "MonarchModelLoader", "inputs": loader}, "2": shown, "3": sampler}
        server.run(nodes, timeout=60)
        wait_for(lambda: "is ready after" in worker.output, 30)


def test_help_pages_and_templates_are_served(server: Any) -> None:
    import urllib.request

    for node in ("MonarchSampler", "MonarchSplit", "MonarchModelLoader"):
        with urllib.request.urlopen(f"{server.url}/extensions/monarch-split/docs/{node}.md", timeout=10) as page:
            assert page.status == 200
            assert page.read().startswith(b"# Monarch")
    with urllib.request.urlopen(f"{server.url}/workflow_templates", timeout=10) as answer:
        assert len(json.load(answer)["monarch-split"]) >= 3


def test_same_picture_through_the_api_by_sampler_and_by_split_node(
    server: Any, start_worker: Callable[..., Any]
) -> None:
    stock = server.run(graph("KSampler"), timeout=60)
    with start_worker(name="second") as worker:
        join(server, worker)
        split = server.run(graph(), timeout=90)
        by_node = server.run(graph("KSampler", split_node="rows"), timeout=60)
    assert report_of(split)["forwards_split"] >= 3, report_of(split)["line"]
    assert "second" in report_of(split)["line"]
    assert difference(server, split, stock) <= 1e-5
    assert difference(server, by_node, stock) <= 1e-5
    assert "on 2 machines by rows" in server.log()
    assert len(server.view(split["outputs"]["picture"]["images"][0])) > 100


def steps_of(server: Any, name: str) -> int:
    log = server.output / name
    return len(log.read_text().splitlines()) if log.exists() else 0


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def test_worker_killed_half_way_and_restarted(server: Any, start_worker: Callable[..., Any]) -> None:
    settings: dict[str, Any] = {"model": "flux_schnell_deep.safetensors", "steps": 8, "seed": 11}
    stock = server.run(graph("KSampler", **settings), timeout=90)
    watched = {**settings, "step_log": "killed.jsonl", "step_delay": 0.2}
    with start_worker(name="mortal") as worker:
        join(server, worker)
        prompt = server.queue(graph(**watched))
        wait_for(lambda: steps_of(server, "killed.jsonl") >= 4)
        worker.kill()
        entry = server.wait(prompt, timeout=60)
        assert difference(server, entry, stock) <= 1e-5
        assert 1 <= report_of(entry)["forwards_split"] < 8
        assert "mortal" in report_of(entry)["line"]
        port = int(worker.address.rsplit(":", 1)[1])
    server.free()
    # The same graph again, with nothing restarted but the worker.
    with start_worker(name="mortal", port=port):
        entry = server.run(graph(**watched), timeout=90)
        assert report_of(entry)["forwards_split"] >= 7, report_of(entry)["line"]
        assert difference(server, entry, stock) <= 1e-5


def test_freeing_memory_here_frees_it_on_the_worker(server: Any, start_worker: Callable[..., Any]) -> None:
    settings = {"model": "flux_schnell_deep.safetensors", "seed": 41}
    size = (server.models_folder("diffusion_models") / "flux_schnell_deep.safetensors").stat().st_size
    with start_worker(name="second") as worker:
        join(server, worker)
        # Everything that a first render leaves in memory for good.
        server.run(graph(seed=41), timeout=90)
        server.free()
        wait_for(lambda: "Let go of 1 model" in worker.output)
        baseline = resident(worker.pid)
        first = server.run(graph(**settings), timeout=90)
        assert report_of(first)["forwards_split"] >= 3, report_of(first)["line"]
        assert resident(worker.pid) > baseline + 0.5 * size
        server.free()
        wait_for(lambda: worker.output.count("Let go of 1 model") == 2)
        wait_for(lambda: resident(worker.pid) < baseline + 0.25 * size)
        again = server.run(graph(**settings), timeout=90)
        assert report_of(again)["forwards_split"] >= 3, report_of(again)["line"]
        assert difference(server, again, first) <= 1e-5


def resident(pid: int) -> int:
    """Bytes of main memory that a process has for itself."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return int(fields["RssAnon"].split()[0]) * 1024


def test_interrupt_through_the_api(server: Any, start_worker: Callable[..., Any]) -> None:
    stock = server.run(graph("KSampler", seed=21), timeout=60)
    with start_worker(name="second") as worker:
        join(server, worker)
        log = "interrupted.jsonl"
        prompt = server.queue(graph(model="flux_schnell_deep.safetensors", steps=50, step_log=log, step_delay=0.1))
        wait_for(lambda: steps_of(server, log) >= 3)
        at = steps_of(server, log)
        began = time.monotonic()
        server.interrupt()
        wait_for(lambda: server.queue_size() == 0, seconds=10)
        assert time.monotonic() - began < 10
        assert steps_of(server, log) <= at + 2
        entry = server.wait(prompt, timeout=10)
        assert entry["status"]["status_str"] == "error"
        following = server.run(graph(seed=21), timeout=60)
        assert report_of(following)["forwards_split"] >= 3, report_of(following)["line"]
        assert difference(server, following, stock) <= 1e-5


def test_progress_previews_and_the_line_reach_the_browser(server: Any, start_worker: Callable[..., Any]) -> None:
    import aiohttp

    async def listen(prompt_graph: Any) -> tuple[list[dict[str, Any]], list[bytes]]:
        events: list[dict[str, Any]] = []
        binary: list[bytes] = []
        async with aiohttp.ClientSession() as client, client.ws_connect(f"{server.url}/ws?clientId=test") as socket:
            async with client.post(
                f"{server.url}/prompt", json={"prompt": prompt_graph, "client_id": "test"}
            ) as answer:
                assert answer.status == 200, await answer.text()
            async for message in socket:
                if message.type is aiohttp.WSMsgType.BINARY:
                    binary.append(message.data)
                    continue
                events.append(json.loads(message.data))
                if events[-1]["type"] in ("execution_success", "execution_error"):
                    return events, binary
        raise AssertionError("the connection was closed")

    with start_worker(name="second") as worker:
        join(server, worker)
        events, binary = asyncio.run(asyncio.wait_for(listen(graph(seed=31, steps=6)), timeout=60))
    assert events[-1]["type"] == "execution_success"
    steps = [event["data"] for event in events if event["type"] == "progress"]
    # A file that is sent to the worker has a bar of its own.
    progress = [step["value"] for step in steps if step["max"] == 6]
    assert progress == sorted(progress)
    assert progress[-1] == 6
    kinds = [int.from_bytes(data[:4], "big") for data in binary]
    assert any(kind in (1, 4) for kind in kinds), "no preview came"
    (run,) = [event["data"] for event in events if event["type"] == "monarch.run"]
    assert run["node"] == "sampler"
    assert run["forwards_split"] >= 5
    assert "on 2 machines by rows" in run["line"]
