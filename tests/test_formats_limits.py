"""Headers made to exhaust memory or time: as large as a header may be, and refused within bounds."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from monarch_split.formats import inspect_file
from monarch_split.formats.header import MAX_HEADER_BYTES
from monarch_split.formats.header_text import MAX_MEMBERS
from monarch_split.tests.model_files import build, entry

resource = pytest.importorskip("resource", reason="this system has no limits for a process")

PACK = Path(__file__).parent.parent
Save = Callable[..., Path]
# Python and the pack take a sixth of it; without bounds, the headers below take one to ten times as much.
ADDRESS_SPACE = 300 * 2**20
_SIZE = MAX_HEADER_BYTES - 99
_ENTRY = '"%06d.weight":{"dtype":"U8","shape":[1,0],"data_offsets":[0,0]},'


def many(unit: str, size: int = _SIZE) -> str:
    return unit * (size // len(unit.encode()))


def entries(count: int, entry: str = _ENTRY) -> str:
    return "{" + "".join(entry % index for index in range(count))[:-1] + "}"


HOSTILE: dict[str, Callable[[], str]] = {
    "brackets": lambda: '{"a":' + many("["),
    "numbers": lambda: '{"a":{"dtype":"U8","shape":[' + many("0,"),
    "escapes": lambda: '{"a":"' + many('\\"'),
    "spaces": lambda: many(" "),
    "metadata": lambda: '{"__metadata__":{' + ",".join(f'"{index}":""' for index in range(1_200_000)) + "}}",
    "more_tensors_than_any_model": lambda: entries(200_000),
    "as_many_tensors_as_may_be": lambda: entries(MAX_MEMBERS - 1),
    "names_that_take_four_bytes_a_character": lambda: entries(
        MAX_MEMBERS - 1, _ENTRY.replace("weight", "\N{GRINNING FACE}")
    ),
    "in_the_quantisation_metadata": lambda: json.dumps(
        {"__metadata__": {"_quantization_metadata": '{"layers":{"a":[' + many("[],", 2**21 - 99) + "0]}}"}}
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_refused_within_a_bound_of_memory_and_time(save: Save, name: str) -> None:
    content = build(HOSTILE[name]())
    assert len(content) < MAX_HEADER_BYTES
    path = save(content)
    del content
    done = subprocess.run(
        [sys.executable, PACK, "inspect", "--json", path],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE)),
    )
    (report,) = json.loads(done.stdout or "[]")
    assert (done.returncode, report["loadable"]) == (1, False)


def test_a_header_above_the_limit_is_refused_unread(save: Save) -> None:
    path = save((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
    with path.open("ab") as file:
        file.truncate(2 * MAX_HEADER_BYTES)
    assert f"above the limit of {MAX_HEADER_BYTES}" in inspect_file(path).problems[0]


def test_a_header_with_a_large_workflow_and_picture_is_read(save: Save) -> None:
    metadata = {"workflow": "{" * 2_000_000, "modelspec.thumbnail": "data:image/png;base64," + "A" * 8_000_000}
    path = save(build({"__metadata__": metadata, "a.weight": entry("BF16", [4, 4], 0, 32)}, 32))
    assert inspect_file(path).loadable


def test_markers_that_claim_gigabytes_are_not_read(save: Save) -> None:
    size = 2**20
    header = {f"{index}.comfy_quant": entry("U8", [size], index * size, (index + 1) * size) for index in range(3000)}
    path = save(build(header))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + 3000 * size)
    report = inspect_file(path)
    assert "comfy_quant tensors have" in report.problems[0]
    assert not report.loadable
