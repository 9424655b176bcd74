"""Writes the numbers of benchmarks/results into documents, between their `numbers` marks; a test holds them to that.

python benchmarks/publish.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ENCRYPTED, CLEAR = "encrypted", "clear"
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
            f"{cpu['result']['ratio']:.2f}x, of which the engine takes {cpu['in_the_clear']['overhead_ms']:.1f} ms and "
            f"encryption {cpu['result']['overhead_ms'] - cpu['in_the_clear']['overhead_ms']:.1f} ms. "
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


def encryption() -> str:
    """What keys cost, in Markdown."""
    result = record("encryption")["result"]
    rows, short, channel = result["row_split"], result["short_row_split"], result["channel"]
    exchange = result["exchange"]["sizes"][-2]
    rates = [f"{channel[name]['gb_per_s']:.1f} GB/s" for name in (ENCRYPTED, CLEAR)]
    lanes = [f"{exchange[name]['gb_per_s']:.1f} GB/s" for name in (ENCRYPTED, CLEAR)]
    return (
        f"Measured between two processes on two CPU cores: a step of {rows['alone_s']:.1f} s that is split by rows is "
        f"{rows[ENCRYPTED]['ratio']:.2f}x as fast with keys and {rows[CLEAR]['ratio']:.2f}x in the clear; keys cost "
        f"{short['price_ms']:.1f} ms of each step, in which {short['bytes_per_step'] / 2048:.0f} KiB go each way. The "
        f"channel carries {rates[0]} with keys and {rates[1]} without, the lanes of a token split {lanes[0]} and "
        f"{lanes[1]} each way ([record](../benchmarks/results/encryption.json))."
    )


DOCUMENTS: dict[str, Callable[[], str]] = {"README.md": numbers, "docs/network.md": encryption}


def published(text: str, made: Callable[[], str] = numbers) -> str:
    """A document with what is `made` now between its marks."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{made()}\n{END}{after}"


def main() -> None:
    for name, made in DOCUMENTS.items():
        path = ROOT / name
        path.write_text(published(path.read_text(), made))


if __name__ == "__main__":
    main()
