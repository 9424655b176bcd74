"""A long day of a real ComfyUI server and a worker, in minutes: prompts of changing model, size, LoRA and split, with
interrupts, worker restarts and freezes, and memory that is freed. What both processes hold is recorded along the way.

PYTHON-OF-COMFYUI benchmarks/soak.py COMFYUI [--prompts 200]     writes benchmarks/results/soak.json; CPU, tiny models
"""

from __future__ import annotations

import argparse
import json
import os
import random
import runpy
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    runpy.run_path(str(Path(__file__).resolve().parent.parent / "__main__.py"))["load_pack"]()
    from monarch_split.benchmarks.soak import main

    sys.exit(main())

from ..demo.comfy_server import ComfyServer
from ..demo.graphs import Graph, text_to_image
from ..demo.latents import max_abs_difference
from ..demo.worker_process import PACK, WorkerProcess
from .machine import machine

RESULT = Path(__file__).parent / "results" / "soak.json"
FAMILY = "flux_schnell"
MODELS = ("flux_schnell.safetensors", "flux_schnell_deep.safetensors", "second.safetensors")
LORA = "soak.safetensors"
# From this part of the prompts on the worker is not restarted any more, so that its growth can be seen.
STEADY_FROM = 0.4
# After so many prompts all memory is freed, and what is held then can be compared: other prompts leave other models.
REST = 20
# Growth is what is more at the end than at the beginning of the steady part: medians of this many samples at rest.
COMPARED = 3
# glibc gives freed memory back at once, so that what it keeps for itself is not taken for something that grows.
ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"}
KINDS = ("open_files", "sockets", "threads", "memory_mb")


def held(pid: int) -> dict[str, float]:
    """What a process holds: open files, sockets among them, threads, and main memory for itself alone in MB."""
    folder = Path(f"/proc/{pid}")
    links = []
    for entry in (folder / "fd").iterdir():
        try:
            links.append(os.readlink(entry))
        except OSError:
            continue  # closed meanwhile
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line)
    return {
        "open_files": len(links),
        "sockets": sum(link.startswith("socket:") for link in links),
        "threads": int(status["Threads"]),
        "memory_mb": round(int(status["RssAnon"].split()[0]) / 1024, 1),
    }


class Soak:
    """One soak: a server, its worker, and what happened."""

    def __init__(self, comfyui: Path, folder: Path, prompts: int) -> None:
        self._comfyui, self._folder, self._prompts = comfyui, folder, prompts
        self._dice = random.Random(1)
        self._stack = ExitStack()
        self._environment = {"MONARCH_CONFIG_DIR": str(folder / "configuration"), **ALLOCATOR}
        self.samples: list[dict[str, Any]] = []
        self.happened: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.worst = 0.0

    def run(self) -> None:
        (self._folder / "configuration").mkdir()
        with self._stack:
            self.worker = self._start_worker(0)
            self.port = int(self.worker.address.rpartition(":")[2])
            cluster = f"[clusters.default]\nworkers = [{json.dumps(self.worker.address)}]\n"
            (self._folder / "configuration" / "monarch.toml").write_text(cluster)
            self.server = self._stack.enter_context(
                ComfyServer(
                    self._folder / "server",
                    comfyui=self._comfyui,
                    pack=PACK,
                    pack_name="monarch-split",
                    environment=self._environment,
                )
            )
            self._write_models()
            for number in range(self._prompts):
                self._one(number)
                if number % REST == REST - 1:
                    self.server.free()
                    self.happened["memory freed"] += 1
                if number % 5 == 4:
                    self._sample(number + 1)

    def _start_worker(self, port: int) -> WorkerProcess:
        return self._stack.enter_context(
            WorkerProcess(
                runtime="comfyui",
                cache=self._folder / "cache",
                name="worker",
                port=port,
                arguments=["--comfyui", str(self._comfyui), "--", "--cpu", "--base-directory", str(self._folder)],
                environment=self._environment,
            )
        )

    def _write_models(self) -> None:
        from ..demo.tiny_loras import write_lora
        from ..demo.tiny_models import write_model

        models = self.server.models_folder("diffusion_models")
        write_model(FAMILY, models)
        write_model(FAMILY, models, scale="deep")
        write_model(FAMILY, self._folder, seed=5).rename(models / MODELS[2])
        write_lora(FAMILY, self._folder).rename(self.server.models_folder("loras") / LORA)

    def _one(self, number: int) -> None:
        """One prompt, and what befalls it."""
        dice = self._dice
        split = dice.choice(("auto", "rows", "rows", "tokens"))
        how: dict[str, Any] = {
            "model_file": dice.choice(MODELS),
            "seed": number,
            "steps": dice.randint(2, 6),
            "cfg": dice.choice((1.0, 4.0)),
            "batch": dice.choice((1, 1, 2, 3)),
            "width": dice.choice((64, 96, 128)),
            "height": dice.choice((64, 80, 128)),
            "lora": [(LORA, dice.choice((0.5, 1.0)))] if dice.random() < 0.4 else None,
        }
        restarts = number < STEADY_FROM * self._prompts and number % 16 == 7
        if restarts:
            self._restart_worker_in(how, split)
        elif number % 9 == 5:
            self._interrupt(how, split, number)
        elif number % 25 == 12:
            self._freeze_worker_in(how, split)
        else:
            entry = self._render(how, split)
            if number % 20 == 1:
                self._compare(how, entry)

    def _graph(self, how: dict[str, Any], split: str | None, **more: Any) -> Graph:
        sampler: dict[str, Any] = {"sampler_node": "KSampler"}
        if split is not None:
            sampler = {"sampler_node": "MonarchSampler", "split": split}
        return text_to_image(family=FAMILY, **how, **sampler, **more)

    def _render(self, how: dict[str, Any], split: str, **more: Any) -> dict[str, Any]:
        entry = self.server.run(self._graph(how, split, **more), timeout=120)
        self._note(entry)
        return entry

    def _note(self, entry: dict[str, Any]) -> None:
        report = next(output["monarch"][-1] for output in entry["outputs"].values() if "monarch" in output)
        self.happened[f"prompts split by {report['split']}" if report["split"] else "prompts on one machine"] += 1
        self.reasons.update(report["reasons"] + report["events"])

    def _compare(self, how: dict[str, Any], entry: dict[str, Any]) -> None:
        alone = self.server.run(self._graph(how, None, prefix="alone"), timeout=120)
        latents = [self.server.view(each["outputs"]["latent"]["latents"][0]) for each in (entry, alone)]
        self.worst = max(self.worst, max_abs_difference(*latents))
        self.happened["compared with one machine"] += 1

    def _queue_slowly(self, how: dict[str, Any], split: str, steps: int) -> tuple[str, Any]:
        """Queue a prompt that takes its time; give its id and a function that waits for some steps of it."""
        log = f"steps-{how['seed']}.jsonl"
        prompt = self.server.queue(self._graph({**how, "steps": steps}, split, step_log=log, step_delay=0.1))

        def wait_for(done: int) -> None:
            deadline = time.monotonic() + 60
            path = self.server.output / log
            while not path.exists() or len(path.read_text().splitlines()) < done:
                if time.monotonic() > deadline:
                    raise TimeoutError("a prompt did not get on")
                time.sleep(0.02)

        return prompt, wait_for

    def _interrupt(self, how: dict[str, Any], split: str, number: int) -> None:
        prompt, wait_for = self._queue_slowly(how, split, 30)
        wait_for(number % 4)
        self.server.interrupt()
        self.server.wait(prompt, timeout=30)
        self.happened["interrupted"] += 1

    def _restart_worker_in(self, how: dict[str, Any], split: str) -> None:
        prompt, wait_for = self._queue_slowly(how, split, 12)
        wait_for(2)
        self.worker.kill()
        self.worker = self._start_worker(self.port)
        self._note(self.server.wait(prompt, timeout=120))
        self.happened["worker killed and restarted"] += 1

    def _freeze_worker_in(self, how: dict[str, Any], split: str) -> None:
        prompt, wait_for = self._queue_slowly(how, split, 12)
        wait_for(2)
        self.worker.freeze()
        try:
            time.sleep(3)
        finally:
            self.worker.thaw()
        self._note(self.server.wait(prompt, timeout=120))
        self.happened["worker frozen for 3 s"] += 1

    def _sample(self, prompts: int) -> None:
        # What ends in the background has time to do so; ComfyUI collects garbage at intervals of seconds.
        at_rest = prompts % REST == 0
        time.sleep(3.0 if at_rest else 0.5)
        sample = {"prompts": prompts, "at_rest": at_rest}
        sample |= {"driver": held(self.server.pid), "worker": held(self.worker.pid)}
        self.samples.append(sample)
        print(json.dumps(sample), flush=True)


def growth(samples: Sequence[dict[str, Any]], prompts: int) -> dict[str, dict[str, dict[str, float]]]:
    """{process: {kind: {"then", "now"}}}: medians at the beginning and at the end of the steady part."""
    steady = [sample for sample in samples if sample["at_rest"] and sample["prompts"] > (STEADY_FROM + 0.05) * prompts]

    def medians(process: str, kind: str) -> dict[str, float]:
        values = [sample[process][kind] for sample in steady]
        return {"then": statistics.median(values[:COMPARED]), "now": statistics.median(values[-COMPARED:])}

    return {process: {kind: medians(process, kind) for kind in KINDS} for process in ("driver", "worker")}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("comfyui", type=Path)
    parser.add_argument("--prompts", type=int, default=200)
    args = parser.parse_args()
    sys.path.insert(0, str(args.comfyui.resolve()))
    import_module("comfy.cli_args").args.cpu = True  # here it only writes models
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(args.comfyui.resolve(), Path(folder), args.prompts)
        soak.run()
    record = {
        "what": "a ComfyUI server and a worker of this machine (CPU, one thread each, tiny models) over many prompts",
        "growth_of": "medians, after memory was freed, at the beginning and the end of the part without restarts",
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "allocator": ALLOCATOR,
        "prompts": args.prompts,
        "seconds": round(time.monotonic() - began),
        "happened": dict(sorted(soak.happened.items())),
        "max_abs_diff": soak.worst,
        "growth": growth(soak.samples, args.prompts),
        "reasons": dict(soak.reasons.most_common()),
        "samples": soak.samples,
    }
    RESULT.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps({key: value for key, value in record.items() if key != "samples"}, indent=2))
    return 0
