"""Error and bytes of a compressed exchange: of its format alone, and of a forward by tokens between two processes.

python benchmarks/compressed_exchange.py     writes benchmarks/results/compressed_exchange.json; needs no ComfyUI
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    os.environ["OMP_NUM_THREADS"] = "1"
    runpy.run_path(str(Path(__file__).resolve().parent.parent / "__main__.py"))["load_pack"]()
    from monarch_split.benchmarks.compressed_exchange import main

    sys.exit(main())

import torch

from ..demo.reference import DEMO
from ..demo.reference_runtime import FAMILY, load_reference_model, write_reference_model
from ..demo.worker_process import WorkerProcess
from ..distributed.addresses import parse_address
from ..distributed.cluster import COMPRESSIONS, Cluster
from ..distributed.compressed import Packing
from ..distributed.outputs import relative_difference
from ..distributed.recipe import Recipe
from ..distributed.report import Report
from ..distributed.session import Session
from ..distributed.versions import own_versions
from ..distributed.volume import measure
from .machine import machine
from .row_split import inputs

# The heads of Flux and Wan have this size.
HEADS, SIZE = 24, 128


def of_the_format(group: int) -> dict[str, float]:
    """Relative error of values whose scales are shared by so many, by what the values are like."""
    generator = torch.Generator().manual_seed(2)
    normal = torch.randn(1024, HEADS, SIZE, generator=generator)
    large = torch.where(torch.rand(HEADS, SIZE, generator=generator) < 0.01, 50.0, 1.0)
    heads = torch.randn(HEADS, 1, generator=generator).mul(2).exp()
    found = {}
    for name, values in (("normal", normal), ("1 % of channels 50x", normal * large), ("heads unlike", normal * heads)):
        packing = Packing.of(normal, values, group)
        packed = torch.empty(len(values), packing.width, dtype=torch.uint8)
        keys, got = torch.empty_like(normal), torch.empty_like(values)
        packing.pack(normal, values, packed)
        packing.unpack(packed, keys, got)
        found[name] = relative_difference(got, values)
    return {"bytes_per_value": (packing.width - 2 * HEADS * SIZE) / (HEADS * SIZE), **found}


def of_a_forward(address: str, recipe: Recipe, compress: str) -> dict[str, Any]:
    """One row of the reference model at 512 x 512 pixels, half of its tokens on each process."""
    model = load_reference_model(recipe.path)
    args, kwargs = inputs(1)
    report = Report("tokens")
    cluster = Cluster("benchmark", (parse_address(address),), exchange="lanes", overlap="off", compress=compress)
    with (
        torch.inference_mode(),
        Session(
            cluster, own_versions(None), report, lambda: recipe, check=lambda: None, model=model, family=FAMILY
        ) as session,
    ):
        session.forward(model, args, kwargs)
        output = session.forward(model, args, kwargs)
        whole, volume = measure(FAMILY, model, model, args, kwargs, compress=compress != "off")
    return {
        "compress": compress,
        "exchanged_bytes": volume.bytes,
        "relative_difference": relative_difference(output, whole),
        "forwards_split": report.forwards_split,
        "line": report.line(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "compressed_exchange.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MONARCH_CONFIG_DIR"] = str(Path(folder) / "configuration")  # keys for these two processes alone
        recipe = write_reference_model(DEMO, Path(folder) / "reference.safetensors")
        with WorkerProcess(cache=Path(folder) / "cache") as worker:
            forwards = [of_a_forward(worker.address, recipe, compress) for compress in COMPRESSIONS]
    record = {
        "what": "compressed exchange of tokens: relative error (norm of the difference over norm) and bytes",
        "values": "FP8 E4M3 values [1024, 24, 128] by how many share a scale; 128 is a head, 3072 a token",
        "forward": "reference model in FP32 with random weights, 1024 tokens, against the stock forward",
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "torch": torch.__version__,
        "values_by_group": {str(group): of_the_format(group) for group in (32, 64, SIZE, HEADS * SIZE)},
        "forwards": forwards,
    }
    arguments.out.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))
    return 0
