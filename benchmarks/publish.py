"""Writes the numbers of benchmarks/results into documents: between their `numbers` marks, and into sentences of them.

A test holds documents to that, and finds numbers in them that come from no record.
python benchmarks/publish.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ENCRYPTED, CLEAR = "encrypted", "clear"
# What each side sends at once in the exchange that is quoted, of the sizes that were measured.
LANES_MIB = 32
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
    shared = " and ".join(
        f"{result['ratio']:.2f}x ({result['model'].split(',')[0]})"
        for result in gpu["results"]
        if result["placement"] != "two GPUs"
    )
    return "\n".join(
        [
            "| one forward of two rows (CFG, or batch 2) | one GPU | two GPUs | |",
            "|---|---|---|---|",
            *rows,
            "",
            f"Measured between two processes on two {gpu['gpu']} of one machine with random weights, medians of paired "
            "forwards of the diffusion model alone; text encoder, VAE and sampler are not in it. "
            f"Two processes that share one GPU lose: {shared}. "
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
    (exchange,) = [each for each in result["exchange"]["sizes"] if round(each["bytes"] / 2**20) == LANES_MIB]
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


@dataclass(frozen=True)
class Sentence:
    """A part of a document with a {} for each number that comes from a record."""

    document: str
    text: str
    numbers: Callable[[], Sequence[str]]

    def pattern(self) -> re.Pattern[str]:
        """Finds it in the document, however its lines are broken, with a group for each number."""
        parts = [r"\s+".join(map(re.escape, part.split(" "))) for part in self.text.split("{}")]
        return re.compile(r"(\S(?:[^|\n]*?\S)??)".join(parts))


def _swapped() -> list[str]:
    """What each of two machines sends of a forward that is split by tokens."""
    results = record("gpu_token_split")["results"]
    each = {result["model"].split(" ")[0]: result["exchanged_bytes"] / 2e9 for result in results}
    return [f"{each['Flux']:.1f} GB", f"{each['Wan']:.0f} GB"]


def _batch_difference() -> list[str]:
    results = record("gpu_row_split")["results"]
    (flux,) = [each for each in results if each["model"].startswith("Flux") and each["placement"] == "two GPUs"]
    return [f"{100 * flux['difference_split_to_batch_2']:.1f} %"]


def _weights_changed() -> list[str]:
    error = {result["to"]: result["error_median"] for result in record("conversion")["results"]}
    return [f"{100 * error[name]:.2g} %" for name in ("fp8", "int8", "nvfp4")]


def _rows_of_formats() -> list[str]:
    results = record("format_rows")["results"]
    apart = {result["format"]: result["rows_vs_batch"] for result in results if not result["inference_mode"]}
    return [f"{100 * apart[name]:.2f} %" for name in ("int8", "convrot_w4a4")]


def _slower_than_alone() -> list[str]:
    results = record("planning")["results"]
    refused = [each["auto_over_off"] for each in results.values() if not each["forwards_split_after"]]
    return [f"{100 * (max(refused) - 1):.1f} %"]


def _half_as_fast() -> list[str]:
    results = record("planning")["results"]
    return [f"{results[f'half_as_fast_{split}']['speedup']:.2f}x" for split in ("rows", "tokens")]


SENTENCES = (
    Sentence("FAQ.md", "forwards took at most {} longer than without Monarch", _slower_than_alone),
    Sentence("FAQ.md", "forwards {} (a batch of six, by rows) and {} (one image, by tokens) as fast", _half_as_fast),
    Sentence(
        "FAQ.md",
        "A token split moves about {} each way in a step of Flux at 1024x1024 and {} in one of Wan 14B at 480p",
        _swapped,
    ),
    Sentence("FAQ.md", "in BF16 Flux with random weights differed by {} between split and batch 2", _batch_difference),
    Sentence("FAQ.md", "a weight changes by {} in FP8, {} in INT8 and {} in NVFP4", _weights_changed),
    Sentence(
        "FAQ.md",
        "the batch of two differed from both by {} (INT8, `asym_w4a8_int8`) and {} (`convrot_w4a4`)",
        _rows_of_formats,
    ),
)


def with_sentences(name: str, text: str) -> str:
    """A document with the numbers of its sentences as the records have them. Raises LookupError if one is gone."""
    for sentence in SENTENCES:
        if sentence.document != name:
            continue
        found = sentence.pattern().search(text)
        if found is None:
            raise LookupError(f"{name} does not say {sentence.text!r}")
        for group, number in reversed(list(enumerate(sentence.numbers(), 1))):
            text = text[: found.start(group)] + number + text[found.end(group) :]
    return text


def published(text: str, made: Callable[[], str] = numbers) -> str:
    """A document with what is `made` now between its marks."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{made()}\n{END}{after}"


def main() -> None:
    for name, made in DOCUMENTS.items():
        path = ROOT / name
        path.write_text(published(path.read_text(), made))
    for name in sorted({sentence.document for sentence in SENTENCES}):
        path = ROOT / name
        path.write_text(with_sentences(name, path.read_text()))


if __name__ == "__main__":
    main()
