"""The demo with ComfyUI: a real server with this pack in its custom_nodes, a worker beside it, a graph over HTTP.

Standard library only, so that it needs no environment but ComfyUI's; that one runs in the processes started here."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .comfy_client import ComfyError
from .comfy_server import ComfyServer
from .comparison import CFG, WARM_UP_STEPS, Comparison, steps_split
from .graphs import LATENT, PICTURE, SAMPLER, Graph, text_to_image
from .latents import max_abs_difference
from .signals import undisturbed
from .worker_process import PACK, WorkerProcess

# Wan, because every ComfyUI since 0.8.0 reads the sizes of a small one from its file.
FAMILY, SCALE = "wan", "heavy"
# One row of this model at this size, as a single frame, takes about half a second on one CPU thread.
PIXELS = 640
# No step of the demo takes so long on any machine that is worth waiting for.
PATIENCE = 600.0


@dataclass(frozen=True)
class _Render:
    """One prompt's result: seconds from its start to its last step, and the bytes of the files it saved."""

    seconds: float
    report: dict[str, Any] | None
    latent: bytes
    picture: bytes


def run_comfyui(
    comfyui: Path,
    python: Path,
    version: str,
    split: str,
    steps: int,
    folder: Path,
    image: Path,
    say: Callable[[str], None],
    *,
    pixels: int = PIXELS,
) -> Comparison:
    """Render on one and on two processes and save the picture as `image`; `folder` is for files that are in between.

    Raises ComfyError, RuntimeError or TimeoutError, with what the process in question said.
    """
    server_folder, configuration, worker_folder = (folder / name for name in ("server", "configuration", "worker"))
    for needed in (configuration, worker_folder):
        needed.mkdir()
    # torch leaves folders in the first; server and worker are of the same user as long as they share the second.
    scratch = {"TMPDIR": str(folder), "MONARCH_CONFIG_DIR": str(configuration)}

    with ExitStack() as stack:
        say(f"starting ComfyUI {version}" + (" and a worker" if split != "off" else "") + " (CPU, one thread each)")
        wait_for_model = stack.enter_context(_writing_model(comfyui, python, server_folder, scratch))
        # All three at once: starting is a good part of the demo's time.
        worker: WorkerProcess | None = None
        if split != "off":
            worker = stack.enter_context(
                WorkerProcess(
                    python=python,
                    runtime="comfyui",
                    cache=worker_folder / "cache",
                    name="the second process",
                    arguments=["--comfyui", str(comfyui), "--", "--cpu", "--base-directory", str(worker_folder)],
                    environment=scratch,
                    wait=False,
                )
            )
        server = stack.enter_context(
            ComfyServer(
                server_folder,
                comfyui=comfyui,
                pack=PACK,
                python=str(python),
                frontend=False,
                environment=scratch,
            )
        )
        if worker is not None:
            worker.wait_until_listening()
            cluster = f"[clusters.default]\nworkers = [{json.dumps(worker.address)}]\n"
            (configuration / "monarch.toml").write_text(cluster, encoding="utf-8")
        model = wait_for_model()

        def one(count: int, name: str) -> _Render:
            return _render(server, _graph(model, "KSampler", None, count, pixels, name), name)

        def all_nodes(count: int, name: str) -> _Render:
            return _render(server, _graph(model, "MonarchSampler", split, count, pixels, name), name)

        say("warming up: one short render each way, which also sends the model to the worker")
        one(1, "warm_up_one")
        all_nodes(WARM_UP_STEPS, "warm_up_all")
        say(f"rendering {steps} steps with KSampler, on one process")
        alone = one(steps, "one")
        say(f"rendering {steps} steps with Monarch Sampler, on {'one' if split == 'off' else 'two'}")
        together = all_nodes(steps, "all")

    report = together.report or {"split": None, "forwards": 0, "forwards_split": 0, "line": ""}
    image.write_bytes(together.picture)
    return Comparison(
        runtime=f"comfyui {version}",
        nodes=1 if split == "off" else 2,
        split="off" if split == "off" else report["split"] or "none",
        steps=steps,
        steps_split=steps_split(report, steps),
        pixels=pixels,
        seconds_one=alone.seconds,
        seconds_all=together.seconds,
        max_abs_diff=max_abs_difference(alone.latent, together.latent),
        image=image,
        note=report["line"],
    )


@contextmanager
def _writing_model(
    comfyui: Path, python: Path, server_folder: Path, environment: dict[str, str]
) -> Iterator[Callable[[], str]]:
    """A process that writes the model while others start. Gives a function that waits for it: the file's name."""
    models = server_folder / "models" / "diffusion_models"
    script = Path(__file__).with_name("write_model.py")
    command = [str(python), str(script), str(comfyui), str(models), FAMILY, SCALE]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        process: subprocess.Popen[bytes] | None = None

        def wait() -> str:
            assert process is not None
            code = process.wait(PATIENCE)
            written = [path.name for path in models.glob("*.safetensors")]
            if code or not written:
                said.seek(0)
                raise ComfyError(f"the demo's model could not be written with {python}:\n{said.read()}")
            return written[0]

        try:
            with undisturbed():
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
                )
            yield wait
        finally:
            if process is not None:
                process.kill()  # does nothing once it has ended
                process.wait(10)


def _graph(model: str, sampler_node: str, split: str | None, steps: int, pixels: int, name: str) -> Graph:
    return text_to_image(
        model,
        family=FAMILY,
        # ComfyUI's own loader would do, but before 0.15 it does not say which file a MODEL came from.
        loader_node="MonarchModelLoader",
        sampler_node=sampler_node,
        split=split,
        steps=steps,
        cfg=CFG,
        width=pixels,
        height=pixels,
        length=1,
        # A name of its own for each prompt also keeps ComfyUI from answering it out of its cache.
        step_log=_step_log(name),
        prefix=name,
    )


def _step_log(name: str) -> str:
    return f"{name}.jsonl"


def _render(server: ComfyServer, graph: Graph, name: str) -> _Render:
    entry = server.run(graph, timeout=PATIENCE)
    outputs = entry["outputs"]
    reports = outputs.get(SAMPLER, {}).get("monarch") or [None]
    last_line = (server.output / _step_log(name)).read_text(encoding="utf-8").splitlines()[-1]
    return _Render(
        seconds=json.loads(last_line)["time"] - _started(entry),
        report=reports[-1],
        latent=server.view(outputs[LATENT]["latents"][0]),
        picture=server.view(outputs[PICTURE]["images"][0]),
    )


def _started(entry: dict[str, Any]) -> float:
    """When ComfyUI began with a prompt, in seconds since the epoch."""
    for kind, detail in entry["status"]["messages"]:
        if kind == "execution_start":
            return detail["timestamp"] / 1000
    raise ComfyError("ComfyUI's history does not say when the prompt started")
