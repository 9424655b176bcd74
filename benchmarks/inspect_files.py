"""What `monarch inspect` takes in time and memory: one file of 20 GB, a folder of 100 of them, and the worst header.

python benchmarks/inspect_files.py [--runs 10]     writes benchmarks/results/inspect_files.json; the files are sparse
"""

from __future__ import annotations

import argparse
import json
import platform
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    runpy.run_path(str(Path(__file__).resolve().parent.parent / "__main__.py"))["load_pack"]()
    from monarch_split.benchmarks.inspect_files import main

    sys.exit(main())

from ..formats.header import MAX_HEADER_BYTES
from ..formats.header_text import MAX_MEMBERS
from .machine import machine

PACK = Path(__file__).resolve().parent.parent
LAYERS, ROWS, COLUMNS = 400, 9216, 9728  # of 4-bit weights: 20 GB with their scales
MARKER = b'{"format": "nvfp4"}'
BITS = {"U8": 8, "F8_E4M3": 8, "F32": 32, "BF16": 16}


def write_model(path: Path) -> int:
    """A sparse NVFP4 file with a marker for each layer. Returns its number of tensors."""
    header: dict[str, Any] = {}
    markers: list[int] = []
    end = 0
    for layer in range(LAYERS):
        for part, dtype, shape in (
            ("weight", "U8", [ROWS, COLUMNS // 2]),
            ("weight_scale", "F8_E4M3", [ROWS, COLUMNS // 16]),
            ("weight_scale_2", "F32", []),
            ("comfy_quant", "U8", [len(MARKER)]),
            ("bias", "BF16", [ROWS]),
        ):
            begin, size = end, BITS[dtype] // 8
            for length in shape:
                size *= length
            end = begin + size
            header[f"blocks.{layer}.qkv.{part}"] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
            if part == "comfy_quant":
                markers.append(begin)
    raw = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        start = file.tell()
        file.truncate(start + end)
        for begin in markers:
            file.seek(start + begin)
            file.write(MARKER)
    return len(header)


def write_worst_header(path: Path) -> None:
    """As many tensors as a header may have, padded to the size that it may have."""
    entry = '"%06d.weight":{"dtype":"U8","shape":[1,0],"data_offsets":[0,0]}'
    text = "{" + ",".join(entry % index for index in range(MAX_MEMBERS - 1)) + "}"
    raw = text.ljust(MAX_HEADER_BYTES).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw)


# A new process inherits its starter's peak of resident memory, so a small one starts it.
STARTER = """
import os, sys, time
began = time.perf_counter()
to_nowhere = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
pid = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, file_actions=to_nowhere)
_, status, usage = os.wait4(pid, 0)
seconds = time.perf_counter() - began
print(os.waitstatus_to_exitcode(status), seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)
"""


def run(arguments: Sequence[str], expected: int) -> tuple[float, float, float]:
    """(seconds, CPU seconds, peak resident MB) of `arguments` in this Python."""
    command = [sys.executable, "-I", "-S", "-c", STARTER, sys.executable, *arguments]
    code, *result = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    if int(code) != expected:
        raise RuntimeError(f"{arguments} ended with {code}")
    seconds, cpu, megabytes = map(float, result)
    return seconds, cpu, megabytes


def measure(runs: int, *arguments: str, expected: int = 0) -> dict[str, float]:
    results = [run(arguments, expected) for _ in range(runs)]
    seconds, cpu, megabytes = zip(*results, strict=True)
    return {
        "seconds": round(statistics.median(seconds), 4),
        "seconds_min": round(min(seconds), 4),
        "cpu_seconds": round(statistics.median(cpu), 4),
        "peak_mb": round(max(megabytes), 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "inspect_files.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        one, many, worst = Path(folder, "one.safetensors"), Path(folder, "many"), Path(folder, "worst.safetensors")
        tensors = write_model(one)
        many.mkdir()
        for index in range(100):
            write_model(many / f"{index}.safetensors")
        write_worst_header(worst)
        inspect = (str(PACK), "inspect", "--json")
        result = {
            "python": measure(arguments.runs, "-c", "pass"),
            "one_file": measure(arguments.runs, *inspect, str(one)),
            "folder_of_100": measure(max(1, arguments.runs // 3), *inspect, str(many)),
            "worst_header": measure(max(1, arguments.runs // 3), *inspect, str(worst), expected=1),
        }
        size = one.stat().st_size
    record = {
        "what": "the whole command `monarch inspect --json`, with the start of Python; medians, and the largest memory",
        "python": "a Python that does nothing, for comparison",
        "one_file": f"one NVFP4 file of {size / 1e9:.1f} GB with {tensors} tensors, {LAYERS} of them markers",
        "folder_of_100": "a folder of 100 such files",
        "worst_header": f"a header of {MAX_HEADER_BYTES} bytes with {MAX_MEMBERS - 1} tensors, which is refused",
        "files": "sparse, on a warm page cache",
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "python_version": platform.python_version(),
        "result": result,
    }
    arguments.out.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return 0
