"""Frames for the codec that are led by which of its code they reach (atheris); adds to benchmarks/results/fuzz.json.

python benchmarks/fuzz_coverage.py [--seconds 120]     needs `pip install atheris`
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import runpy
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

atheris: Any = importlib.import_module("atheris")
runpy.run_path(str(Path(__file__).resolve().parent.parent / "__main__.py"))["load_pack"]()
with atheris.instrument_imports(include=["monarch_split.distributed", "json"]):
    from monarch_split.benchmarks.fuzz import take_apart
    from monarch_split.benchmarks.hostile import PREFIX, valid_messages
    from monarch_split.demo.reference import TINY
    from monarch_split.demo.reference_runtime import write_reference_model
    from monarch_split.distributed import limits
    from monarch_split.distributed.channel import Assembler
    from monarch_split.distributed.codec import ProtocolError, encode
    from monarch_split.distributed.messages import FROM_DRIVER, Message

# In front of each frame of an input: its length, and whether it came over the control lane or a data lane.
_FRAME = struct.Struct("<HB")


def read(data: bytes) -> None:
    """Take an input as the frames of a session. Raises for a finding."""
    assembler = Assembler(FROM_DRIVER)
    frames: list[memoryview] = []
    at = 0
    try:
        while at + _FRAME.size <= len(data):
            length, lane = _FRAME.unpack_from(data, at)
            at += _FRAME.size
            frames.append(memoryview(_with_length(data[at : at + length], first=not frames)))
            at += length
            if lane & 1:
                continue
            (assembler.data if lane & 2 else assembler.control)(frames)
            frames = []
            for message in assembler.take():
                take_apart(message)
    except ProtocolError:
        pass


def _with_length(frame: bytes, *, first: bool) -> bytes:
    """A length that is right lets everything else through to what is behind it."""
    if not first or len(frame) < PREFIX.size:
        return frame
    return frame[:8] + struct.pack("<I", len(frame) - PREFIX.size) + frame[12:]


def seeds(folder: Path) -> None:
    """Valid messages, one an input."""
    recipe = write_reference_model(TINY, folder / "tiny.safetensors")
    (folder / "seeds").mkdir()
    for index, (kind, body) in enumerate(valid_messages(recipe)):
        *more, last = [bytes(frame) for frame in encode(Message(kind, 1, body)).control]
        if all(len(frame) < 1 << 16 for frame in (*more, last)):
            parts = [_FRAME.pack(len(frame), 1) + frame for frame in more] + [_FRAME.pack(len(last), 0) + last]
            (folder / "seeds" / str(index)).write_bytes(b"".join(parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=120)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "fuzz.json")
    arguments = parser.parse_args()
    record = json.loads(arguments.out.read_text())
    folder = Path(tempfile.mkdtemp())
    seeds(folder)
    runs, began = 0, time.monotonic()

    def once(data: bytes) -> None:
        nonlocal runs
        read(data)
        runs += 1
        if time.monotonic() - began > arguments.seconds:
            version = importlib.metadata.version("atheris")
            record["codec_by_coverage"] = {"inputs": runs, "seconds": arguments.seconds, "atheris": version}
            arguments.out.write_text(json.dumps(record, indent=2) + "\n")
            print(record["codec_by_coverage"])
            os._exit(0)

    options = [f"-max_len={1 << 16}", f"-rss_limit_mb={2 * limits.GIB // limits.MIB}", "-timeout=10"]
    atheris.Setup([sys.argv[0], *options, str(folder / "seeds")], once)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
