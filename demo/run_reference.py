"""The demo without ComfyUI: the engine renders a small reference DiT in this process, with a worker beside it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from ..distributed.addresses import parse_address
from ..distributed.cluster import Cluster
from ..distributed.report import Report
from ..distributed.session import Session
from ..distributed.versions import own_versions
from .comparison import CFG, WARM_UP_STEPS, Comparison, steps_split
from .reference import DEMO, sample, save_picture
from .reference_runtime import FAMILY, load_reference_model, write_reference_model
from .worker_process import WorkerProcess

PIXELS = 512


def run_reference(
    split: str, steps: int, folder: Path, image: Path, say: Callable[[str], None], *, pixels: int = PIXELS
) -> Comparison:
    """Render on one and on two processes and save the picture as `image`; `folder` is for files that are in between.

    Raises RuntimeError when the worker does not start.
    """
    torch.set_num_threads(1)  # as the worker has, so that the two times can be compared
    model_file = folder / "reference.safetensors"
    recipe = write_reference_model(DEMO, model_file)
    model = load_reference_model(model_file)

    def render(count: int, session: Session | None = None) -> tuple[torch.Tensor, float]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return model(*args, **kwargs) if session is None else session.forward(model, args, kwargs)

        began = time.perf_counter()
        ended = [began]
        latent = sample(
            forward,
            DEMO,
            steps=count,
            cfg=CFG,
            seed=0,
            height=pixels,
            width=pixels,
            on_step=lambda step, _: ended.append(time.perf_counter()),
        )
        return latent, ended[-1] - began

    def render_split(count: int) -> tuple[torch.Tensor, float, Report]:
        report = Report(split, steps=count)
        began = time.perf_counter()
        with Session(
            cluster, versions, report, lambda: recipe, check=lambda: None, model=model, family=FAMILY
        ) as session:
            session.start()
            connecting = time.perf_counter() - began
            latent, seconds = render(count, session)
        return latent, connecting + seconds, report

    os.environ["MONARCH_CONFIG_DIR"] = str(folder / "configuration")  # keys for these two processes alone
    with ExitStack() as stack:
        versions, cluster = own_versions(None), Cluster("demo")
        if split != "off":
            say("starting a worker process (CPU, one thread)")
            worker = stack.enter_context(WorkerProcess(cache=folder / "cache", name="the second process"))
            cluster = Cluster("demo", (parse_address(worker.address),))
            say("warming up with a short render, which also sends the model to the worker")
            render_split(WARM_UP_STEPS)  # its first step is computed here alone, too
        else:
            render(1)
        say(f"rendering {steps} steps on one process")
        alone, seconds_one = render(steps)
        if split == "off":
            say("rendering them again, as --split off asks for no second process")
            latent, seconds_all = render(steps)
            report = Report(split, steps=steps)
        else:
            say(f"rendering {steps} steps on two processes")
            latent, seconds_all, report = render_split(steps)
    save_picture(latent, image)
    return Comparison(
        runtime="reference",
        nodes=1 if split == "off" else 2,
        split="off" if split == "off" else report.split or "none",
        steps=steps,
        steps_split=steps_split(report.as_dict(), steps),
        pixels=pixels,
        seconds_one=seconds_one,
        seconds_all=seconds_all,
        max_abs_diff=(alone - latent).abs().max().item(),
        image=image,
        note=report.line(),
    )
