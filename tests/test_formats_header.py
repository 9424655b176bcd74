"""The header of a safetensors file: read without data, and refused with a sentence where it is damaged."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from monarch_split.formats import UnreadableFile, UnsupportedFile, inspect_file, read_header, require_loadable
from monarch_split.formats.header import MAX_HEADER_BYTES
from monarch_split.formats.header_text import DTYPE_BITS
from monarch_split.tests.model_files import build, entry, lay_out

Save = Callable[..., Path]
VALID = lay_out(
    {"blocks.0.weight": ("BF16", [4, 8]), "blocks.0.bias": ("BF16", [4]), "out.weight": ("F32", [2, 4])},
    {"config": "{}"},
)


def test_header_gives_dtypes_shapes_offsets_and_metadata(save: Save) -> None:
    header = read_header(save(VALID))
    assert header.metadata == {"config": "{}"}
    assert header.file_size == len(VALID)
    assert header.data_start == len(VALID) - header.tensors["out.weight"].end
    info = header.tensors["blocks.0.bias"]
    assert (info.dtype, info.shape, info.begin, info.end) == ("BF16", (4,), 64, 72)
    assert (info.elements, info.nbytes) == (4, 8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        header.file_size = 0  # type: ignore[misc]


def test_scalars_and_empty_tensors_are_fine(save: Save) -> None:
    header = read_header(save(lay_out({"scale": ("F32", []), "empty": ("F8_E4M3", [0]), "w": ("F16", [2, 2])})))
    assert header.tensors["scale"].elements == 1
    assert header.tensors["empty"].nbytes == 0


def test_every_safetensors_dtype_is_known_including_those_below_one_byte(save: Save) -> None:
    header = read_header(save(lay_out({dtype: (dtype, [4, 2]) for dtype in DTYPE_BITS})))
    assert header.tensors["F4"].nbytes == 4
    assert header.tensors["F6_E2M3"].nbytes == 6


def test_padding_behind_the_header_text_is_allowed(save: Save) -> None:
    assert read_header(save(build(json.dumps({"a": entry("U8", [1], 0, 1)}) + "   ", 1))).tensors["a"].nbytes == 1


A = '"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}'
DAMAGED = {
    "empty": (b"", "empty"),
    "shorter_than_a_length": (b"\x10\0\0", "shorter than any safetensors"),
    "cut_in_header": (VALID[:40], "cut off inside its header"),
    "cut_in_data": (VALID[:-1], "cut off: its tensors need"),
    "trailing_bytes": (VALID + b"xy", "2 bytes that belong to no tensor"),
    "header_above_the_limit": ((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{}", "above the limit"),
    "length_of_all_ones": (b"\xff" * 8 + b"{}", "above the limit"),
    "web_page": (b"<!DOCTYPE html><html>", "web page"),
    "text": (b"# Monarch\n\nsplits", "a text file"),
    "git_lfs_pointer": (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
    "torch_archive_named_safetensors": (b"PK\x03\x04\0\0\x08\x08" + bytes(90), "PyTorch"),
    "not_utf8": (build("")[:0] + (4).to_bytes(8, "little") + b'{"\xff"', "UTF-8"),
    "no_text": (build(""), "not a JSON object"),
    "not_json": (build("{not json}"), "not valid JSON"),
    "not_an_object": (build("[1]"), "not a JSON object"),
    "text_after_the_object": (build("{} {}"), "after the closing brace"),
    "trailing_comma": (build("{" + A + ",}", 2), "not valid JSON"),
    "duplicate_tensor": (build("{" + A + "," + A + "}", 2), "twice"),
    "duplicate_metadata": (build('{"__metadata__": {}, "__metadata__": {}}'), "twice"),
    "duplicate_metadata_key": (build('{"__metadata__": {"k": "1", "k": "2"}}'), "twice"),
    "duplicate_entry_key": (build("{" + A[:-1] + ', "dtype": "I8"}}', 2), "names a key twice"),
    "metadata_not_strings": (build({"__metadata__": {"k": 1}}), "a string was expected"),
    "metadata_not_an_object": (build({"__metadata__": []}), "not a JSON object"),
    "lone_surrogate": (build('{"\\ud800": {}}'), "not valid JSON"),
    "entry_not_an_object": (build({"a": 3}), "not a JSON object"),
    "entry_without_dtype": (build({"a": {"shape": [2], "data_offsets": [0, 2]}}, 2), "lacks a dtype"),
    "entry_without_offsets": (build({"a": {"dtype": "U8", "shape": [2]}}, 2), "lacks a dtype"),
    "dtype_not_a_string": (build({"a": {"dtype": 8, "shape": [2], "data_offsets": [0, 2]}}, 2), "lacks a dtype"),
    "unknown_dtype": (build({"a": entry("Q4_K", [2], 0, 2)}, 2), "unknown dtype 'Q4_K'"),
    "fractional_shape": (build('{"a": {"dtype": "U8", "shape": [2.0], "data_offsets": [0, 2]}}', 2), "whole numbers"),
    "boolean_shape": (build('{"a": {"dtype": "U8", "shape": [true], "data_offsets": [0, 1]}}', 1), "whole numbers"),
    "three_offsets": (build('{"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 1, 2]}}', 2), "whole numbers"),
    "negative_shape": (build({"a": entry("U8", [-2, -1], 0, 2)}, 2), "negative"),
    "negative_offset": (build({"a": entry("U8", [4], -2, 2)}, 2), "negative"),
    "offsets_backwards": (build({"a": entry("U8", [2], 2, 0)}, 2), "end before they begin"),
    "offset_beyond_the_file": (build({"a": entry("U8", [100], 0, 100)}, 2), "cut off"),
    "overlap": (build({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, 3), "'b' overlaps"),
    "hole": (build({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 4, 6)}, 6), "'b' begins 2 bytes too late"),
    "first_tensor_late": (build({"a": entry("U8", [2], 1, 3)}, 3), "too late"),
    "size_not_dtype_times_shape": (build({"a": entry("BF16", [2], 0, 2)}, 2), "not dtype BF16 times its shape"),
    "half_a_byte": (build({"a": entry("F4", [3], 0, 1)}, 1), "not dtype F4 times its shape"),
    "shape_overflows_64_bits": (build({"a": entry("U8", [2**40, 2**40, 0], 0, 0)}), "too large"),
    "deep_nesting": (build('{"a": {"shape": ' + "[" * 3000 + "]" * 3000 + "}}"), "4096 characters"),
    "nesting_within_the_entry_limit": (build('{"a": {"shape": ' + "[" * 2000 + "]" * 2000 + "}}"), "not valid JSON"),
    "endless_entry": (build('{"a": {"shape": [' + "0," * 5000), "4096 characters"),
}


@pytest.mark.parametrize(("content", "cause"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_file_is_refused_with_its_name_and_cause(save: Save, content: bytes, cause: str) -> None:
    path = save(content, "flux-broken.safetensors")
    with pytest.raises(UnreadableFile) as caught:
        read_header(path)
    message = str(caught.value)
    assert message.startswith("flux-broken.safetensors cannot be read: ")
    assert cause in message
    assert message.count(". ") <= 2
    assert message.endswith(".")
    assert str(path.parent) not in message
    with pytest.raises(UnsupportedFile):
        require_loadable(path)


def test_missing_file_and_folder_are_named_and_not_a_crash(tmp_path: Path) -> None:
    for path, cause in ((tmp_path / "gone.safetensors", "no such file"), (tmp_path, "not a file")):
        with pytest.raises(UnreadableFile, match=cause):
            read_header(path)
        report = inspect_file(path)
        assert (report.format, report.loadable, report.bytes) == ("unreadable", False, 0)
    assert inspect_file("bad\0name").loadable is False


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_named_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    assert "not a file" in inspect_file(tmp_path / "pipe.safetensors").problems[0]


def test_control_characters_from_a_file_never_reach_the_terminal(save: Save) -> None:
    hostile = "\x1b[31m\n"
    path = save(build({hostile * 200: entry("nope" + hostile, [1], 0, 1)}, 1), "a\nb.safetensors")
    message = inspect_file(path).problems[0]
    assert message.isprintable()
    assert len(message) < 400
