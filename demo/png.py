"""Write an 8-bit RGB PNG with the standard library alone, so that a picture needs no imaging package."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

SIGNATURE = b"\x89PNG\r\n\x1a\n"


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def write_png(path: Path, rgb: bytes, width: int, height: int) -> Path:
    """Write `rgb` (height * width * 3 bytes, rows from the top) to `path` and return it.

    Raises ValueError when the number of bytes does not fit the size. Format: PNG specification, colour type 2.
    """
    stride = width * 3
    if width < 1 or height < 1 or len(rgb) != stride * height:
        raise ValueError(f"{len(rgb)} bytes do not make a {width} x {height} RGB picture")
    # Every row starts with its filter type; 0 is "none".
    rows = b"".join(b"\x00" + rgb[start : start + stride] for start in range(0, len(rgb), stride))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(rows, 6)) + _chunk(b"IEND", b"")
    )
    return path
