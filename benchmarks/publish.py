"""Writes the numbers of benchmarks/results into the README, between its two `numbers` marks; a test holds them to that.

python benchmarks/publish.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- numbers:begin -->", "<!-- numbers:end -->"


def record(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def numbers() -> str:
    """The README's table and the line below it, in Markdown."""
    gpu, cpu, tokens = record("gpu_row_split"), record("row_split"), record("gpu_token_split")
    rows = [
        f"| {result['model']} | {result['alone_s']:.3g} s | {result['split_s']:.3g} s | {result['ratio']:.2f}x |"
        for result in gpu["results"]
        if result["placement"] == "two GPUs"
    ]
    names = {"nccl": "NCCL", "lanes": "ZeroMQ lanes"}
    by_tokens = [
        f"| {result['model']} | {names[result['engine']]}, {result['link_label']}"
        f"{', overlapped' if result['overlap'] == 'on' else ''} | {result['alone_s']:.3g} s "
        f"| {result['split_s']:.3g} s | {result['ratio']:.2f}x |"
        for result in tokens["results"]
    ]
    engine = " and ".join(
        f"{1000 * result['engine_per_forward']['median_s']:.1f} ms ({result['model'].split(',')[0]})"
        for result in gpu["results"]
        if result["placement"] == "two GPUs"
    )
    return "\n".join(
        [
            "| one forward of two rows (CFG, or batch 2) | one GPU | two GPUs | |",
            "|---|---|---|---|",
            *rows,
            "",
            f"Measured between two processes on two {gpu['gpu']} of one machine with random weights, medians of paired "
            "forwards of the diffusion model alone; text encoder, VAE and sampler are not in it. "
            f"Around a model that does nothing, the engine takes {engine} a step. "
            f"Two processes with one thread each on two CPU cores, a step of {cpu['result']['alone_s']:.1f} s: "
            f"{cpu['result']['ratio']:.2f}x, of which the engine takes {cpu['result']['overhead_ms']:.1f} ms. "
            "Two DGX Sparks have not been measured yet. Records and scripts: [benchmarks](benchmarks).",
            "",
            "| one forward of one row, by tokens | exchange | one GPU | two GPUs | |",
            "|---|---|---|---|---|",
            *by_tokens,
            "",
            f"Between two processes on two {tokens['gpu']} of one machine, with random weights; not overlapped, the "
            "output is that of one GPU bit for bit. Over ZeroMQ two GPUs of this speed lose: `auto` does not begin "
            "such a split.",
        ]
    )


def published(readme: str) -> str:
    """`readme` with the current numbers between its marks."""
    before, rest = readme.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{numbers()}\n{END}{after}"


def main() -> None:
    path = ROOT / "README.md"
    path.write_text(published(path.read_text()))


if __name__ == "__main__":
    main()
