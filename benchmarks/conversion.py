"""How much a weight changes when `monarch convert` writes it in another format. Normal random weights, on the CPU.

python benchmarks/conversion.py     in ComfyUI's Python; writes benchmarks/results/conversion.json
"""

from __future__ import annotations

import json
import platform
import runpy
import statistics
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    runpy.run_path(str(Path(__file__).resolve().parent.parent / "__main__.py"))["load_pack"]()
    from monarch_split.benchmarks.conversion import main

    main()
    sys.exit()

import torch
from safetensors.torch import save_file

from ..formats.convert import TARGETS, convert

LAYERS, WIDTH = 6, 1024


def measure(folder: Path, to: str) -> dict[str, Any]:
    """Convert a file of square layers in BF16 and give the errors of its weights (norm of the change over the norm)."""
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"blocks.{index}.linear.weight": torch.randn(WIDTH, WIDTH, generator=generator).to(torch.bfloat16)
        for index in range(LAYERS)
    }
    save_file(weights, folder / "source.safetensors")
    converted = convert(folder / "source.safetensors", folder / f"{to}.safetensors", to, layers=["blocks.*"])
    errors = [layer.error for layer in converted.layers]
    return {"to": to, "layers": len(errors), "error_median": statistics.median(errors), "error_largest": max(errors)}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        results = [measure(Path(folder), to) for to in TARGETS]
    record = {
        "what": f"change of {LAYERS} weights [{WIDTH}, {WIDTH}] of normal random numbers in BF16 by monarch convert: "
        "norm of the change over the norm",
        "date": time.strftime("%Y-%m-%d"),
        "machine": {"architecture": platform.machine(), "system": platform.system()},
        "torch": torch.__version__,
        "comfy_kitchen": metadata.version("comfy-kitchen"),
        "results": results,
    }
    path = Path(__file__).parent / "results" / "conversion.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))
