"""Properties of headers: whatever a file holds, inspecting it ends soon in a report, and nothing damaged passes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from monarch_split.formats import FileReport, inspect_file, read_header
from monarch_split.formats.header_text import DTYPE_BITS
from monarch_split.tests.model_files import QUANTISED, Tensors, build, lay_out, quantised

Save = Callable[..., Path]
BOUNDED = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NAMES = TEXT.filter(lambda name: name != "__metadata__")
# A multiple of four elements keeps the sub-byte dtypes on whole bytes.
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(lambda shape: [*shape, 4])
TENSORS = st.dictionaries(NAMES, st.tuples(st.sampled_from(sorted(DTYPE_BITS)), SHAPES), max_size=6)
METADATA = st.dictionaries(TEXT, TEXT, max_size=3)

PLAIN = lay_out(
    {"blocks.0.weight": ("BF16", [4, 8]), "blocks.0.bias": ("BF16", [4]), "out.weight": ("F32", [2, 4])},
    {"config": "{}"},
)
# One layer of every format, both ways of marking them; small, because every example is written to the disk.
MARKED = quantised(QUANTISED)
LISTED = quantised(QUANTISED, in_header=True)
HEADER_OF = {id(content): 8 + int.from_bytes(content[:8], "little") for content in (PLAIN, MARKED, LISTED)}


def library_accepts(content: bytes) -> bool:
    """Whether the safetensors library, which ComfyUI loads with, takes the file."""
    safetensors = pytest.importorskip("safetensors")
    try:
        safetensors.deserialize(content)
    except safetensors.SafetensorError:
        return False
    return True


@BOUNDED
@given(tensors=TENSORS, metadata=METADATA)
def test_random_valid_headers_round_trip(save: Save, tensors: Any, metadata: dict[str, str]) -> None:
    content = lay_out(tensors, metadata)
    header = read_header(save(content))
    assert header.metadata == metadata
    assert {name: (info.dtype, list(info.shape)) for name, info in header.tensors.items()} == tensors
    assert header.data_start + sum(info.nbytes for info in header.tensors.values()) == len(content)


@BOUNDED
@given(which=st.sampled_from([PLAIN, MARKED, LISTED]), part=st.floats(0, 1, exclude_max=True), data=st.booleans())
def test_a_truncated_file_never_passes(save: Save, which: bytes, part: float, data: bool) -> None:
    end = int(part * (len(which) if data else HEADER_OF[id(which)]))
    assert not inspect_file(save(which[:end])).loadable


@settings(BOUNDED, max_examples=1000)
@given(
    which=st.sampled_from([PLAIN, MARKED, LISTED]),
    edits=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4),
)
def test_a_mutated_header_never_crashes_nor_passes_where_the_library_fails(
    save: Save, which: bytes, edits: list[tuple[float, int]]
) -> None:
    content = bytearray(which)
    for part, value in edits:
        content[int(part * HEADER_OF[id(which)])] = value
    report = inspect_file(save(bytes(content)))
    assert report.loadable or report.problems
    if report.loadable:
        assert library_accepts(bytes(content))


# JSON tokens in any order reach the parser's corners far sooner than random bytes do.
TOKENS = st.sampled_from(
    ["{", "}", "[", "]", ":", ",", '"a"', '"b"', '"dtype"', '"shape"', '"data_offsets"', '"__metadata__"', '"U8"', "0",
     "1", "-1", "-0", "1.0", "1e0", "01", "null", "true", "NaN", "[0,1]", "[1]", " ", '"\\u0061"', '"\\ud800"',
     '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}', '{"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}',
     '{"dtype":"U8","shape":[01],"data_offsets":[0,1]}', '{"k":"v"}']
)  # fmt: skip
VALUES = st.one_of(TOKENS, st.lists(TOKENS, max_size=6).map("".join))


@settings(BOUNDED, max_examples=600)
@given(members=st.lists(st.tuples(VALUES, VALUES), max_size=3), junk=VALUES, data_bytes=st.integers(0, 2))
@example(members=[('"a"', '{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}')], junk="", data_bytes=0)
def test_no_json_passes_that_the_library_refuses(
    save: Save, members: list[tuple[str, str]], junk: str, data_bytes: int
) -> None:
    text = "{" + ",".join(f"{key}:{value}" for key, value in members) + "}" + junk
    content = build(text, data_bytes)
    if inspect_file(save(content)).loadable:
        assert library_accepts(content)


@BOUNDED
@given(content=st.binary(max_size=200))
def test_random_bytes_never_crash(save: Save, content: bytes) -> None:
    for name in ("random.safetensors", "random.ckpt", "random"):
        assert isinstance(inspect_file(save(content, name)), FileReport)


# --- quantised layers -------------------------------------------------------------------------------------------------

# The weight's own size is free where it has one scale for all of it.
SIZED = [
    (name, part)
    for name, (parts, _) in QUANTISED.items()
    for part in parts
    if part != "weight" or not (name.startswith("fp8") or name == "int8_tensorwise")
]
# Sizes that nothing in QUANTISED has; the four keeps the sub-byte dtypes on whole bytes.
WRONG_SHAPES = st.lists(st.sampled_from([0, 3, 5, 7]), max_size=3).map(lambda shape: [*shape, 4])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
SETTINGS = ["format", "params", "convrot", "convrot_groupsize", "group_size", "linear_dtype"]


@settings(BOUNDED, max_examples=600)
@given(
    case=st.sampled_from(SIZED),
    dtype=st.sampled_from(sorted(DTYPE_BITS)),
    shape=WRONG_SHAPES,
    in_header=st.booleans(),
)
def test_a_tensor_of_a_shape_that_does_not_fit_its_layer_never_passes(
    save: Save, case: tuple[str, str], dtype: str, shape: list[int], in_header: bool
) -> None:
    name, part = case
    parts, marker = QUANTISED[name]
    changed: Tensors = {**parts, part: (dtype, shape)}
    report = inspect_file(save(quantised({"a": (changed, marker)}, in_header=in_header)))
    assert not report.loadable
    assert "layer 'a'" in report.problems[0]


@settings(BOUNDED, max_examples=600)
@given(name=st.sampled_from(sorted(QUANTISED)), key=st.sampled_from(SETTINGS), value=JSON, in_header=st.booleans())
@example(name="int8_convrot", key="convrot_groupsize", value=True, in_header=False)
@example(name="asym_w4a8_int8", key="group_size", value=0, in_header=False)
@example(name="convrot_w4a4", key="convrot_groupsize", value=-4, in_header=True)
def test_any_setting_of_any_value_ends_in_a_report(
    save: Save, name: str, key: str, value: Any, in_header: bool
) -> None:
    parts, marker = QUANTISED[name]
    report = inspect_file(save(quantised({"a": (parts, {**marker, key: value})}, in_header=in_header)))
    assert report.loadable or report.problems
    assert all(problem.isprintable() and len(problem) < 600 for problem in report.problems)
    if key == "format":
        assert not report.loadable


@settings(BOUNDED, max_examples=300)
@given(value=JSON, text=st.booleans())
def test_any_metadata_and_any_marker_end_in_a_report(save: Save, value: Any, text: bool) -> None:
    parts, _ = QUANTISED["nvfp4"]
    assert not inspect_file(save(quantised({"a": (parts, json.dumps(value))}))).loadable
    tensors: Tensors = {f"a.{part}": tensor for part, tensor in parts.items()}
    metadata = {"_quantization_metadata": str(value) if text else json.dumps({"layers": value})}
    assert not inspect_file(save(lay_out(tensors, metadata))).loadable
