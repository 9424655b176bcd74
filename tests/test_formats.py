"""Model files: headers read without data, damaged and GGUF files refused with a sentence, floats counted.

Whether ComfyUI then loads what is let through is tested with ComfyUI itself.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from monarch_split.formats import (
    FileReport,
    Header,
    UnreadableFile,
    UnsupportedFile,
    gguf_refusal,
    header_text,
    inspect_file,
    is_gguf_file,
    is_gguf_model,
    read_header,
    require_loadable,
)
from monarch_split.formats.header import MAX_HEADER_BYTES
from monarch_split.formats.header_text import DTYPE_BITS
from monarch_split.formats.registry import find_handler, handlers

GGUF_V3 = b"GGUF" + (3).to_bytes(4, "little") + bytes(64)


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def build(header: object, data_bytes: int = 0) -> bytes:
    """A safetensors file: `header` is JSON text or something to dump as JSON."""
    text = header if isinstance(header, str) else json.dumps(header)
    raw = text.encode()
    return len(raw).to_bytes(8, "little") + raw + bytes(data_bytes)


def lay_out(tensors: list[tuple[str, str, list[int]]], metadata: dict[str, str] | None = None) -> bytes:
    """A valid file with the given (name, dtype, shape), one after the other."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    position = 0
    for name, dtype, shape in tensors:
        bits = DTYPE_BITS[dtype]
        for size in shape:
            bits *= size
        header[name] = entry(dtype, shape, position, position + bits // 8)
        position += bits // 8
    return build(header, position)


@pytest.fixture
def save(tmp_path: Path):
    def write(content: bytes, name: str = "model.safetensors") -> Path:
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return write


VALID = lay_out(
    [("blocks.0.weight", "BF16", [4, 8]), ("blocks.0.bias", "BF16", [4]), ("out.weight", "F32", [2, 4])],
    {"config": "{}"},
)

# --- the header -----------------------------------------------------------------------------------------------


def test_header_gives_dtypes_shapes_offsets_and_metadata(save):
    header = read_header(save(VALID))
    assert header.metadata == {"config": "{}"}
    assert header.file_size == len(VALID)
    assert header.data_start == len(VALID) - header.tensors["out.weight"].end
    info = header.tensors["blocks.0.bias"]
    assert (info.dtype, info.shape, info.begin, info.end) == ("BF16", (4,), 64, 72)
    assert (info.elements, info.nbytes) == (4, 8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        header.file_size = 0  # type: ignore[misc]


def test_scalars_and_empty_tensors_are_fine(save):
    header = read_header(save(lay_out([("scale", "F32", []), ("scaled_fp8", "F8_E4M3", [0]), ("w", "F16", [2, 2])])))
    assert header.tensors["scale"].elements == 1
    assert header.tensors["scaled_fp8"].nbytes == 0


def test_every_safetensors_dtype_is_known_including_those_below_one_byte(save):
    header = read_header(save(lay_out([(dtype, dtype, [4, 2]) for dtype in DTYPE_BITS])))
    assert header.tensors["F4"].nbytes == 4
    assert header.tensors["F6_E2M3"].nbytes == 6


def test_padding_behind_the_header_text_is_allowed(save):
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
def test_damaged_file_is_refused_with_its_name_and_cause(save, content: bytes, cause: str):
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


def test_missing_file_and_folder_are_named_and_not_a_crash(tmp_path: Path):
    for path, cause in ((tmp_path / "gone.safetensors", "no such file"), (tmp_path, "not a file")):
        with pytest.raises(UnreadableFile, match=cause):
            read_header(path)
        report = inspect_file(path)
        assert (report.format, report.loadable, report.bytes) == ("unreadable", False, 0)
    assert inspect_file("bad\0name").loadable is False


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_named_pipe_is_refused_instead_of_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.safetensors")
    assert "not a file" in inspect_file(tmp_path / "pipe.safetensors").problems[0]


def test_control_characters_from_a_file_never_reach_the_terminal(save):
    hostile = "\x1b[31m\n"
    path = save(build({hostile * 200: entry("nope" + hostile, [1], 0, 1)}, 1), "a\nb.safetensors")
    message = inspect_file(path).problems[0]
    assert message.isprintable()
    assert len(message) < 400


def test_twenty_gigabyte_file_is_inspected_from_its_header(tmp_path: Path):
    path = tmp_path / "big.safetensors"
    count, size = 1000, 20 * 2**20
    shape = [size // 2 // 1024, 1024]
    tensors = {f"b.{i}.weight": entry("BF16", shape, i * size, (i + 1) * size) for i in range(count)}
    with path.open("wb") as file:
        file.write(build(tensors))
        file.truncate(file.tell() + count * size)
    tracemalloc.start()
    begin = time.perf_counter()
    report = inspect_file(path)
    seconds = time.perf_counter() - begin
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert report.parameters == count * size // 2
    assert seconds < 2
    assert peak < 10 * 2**20


HOSTILE = {
    "brackets": '{"a":' + "[" * 3_000_000,
    "numbers": '{"a":{"dtype":"U8","shape":[' + "0," * 3_000_000 + "0]}}",
    "escapes": '{"a":"' + '\\"' * 3_000_000,
    "spaces": " " * 5_000_000,
    "metadata": '{"__metadata__":{' + ",".join(f'"{i}":""' for i in range(200_000)) + "}}",
    "tensors": "{" + ",".join(f'"{i}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}' for i in range(50_000)) + "}",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_header_costs_bounded_memory(save, text: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(header_text, "MAX_MEMBERS", 10_000)
    path = save(build(text))
    tracemalloc.start()
    try:
        with pytest.raises(UnreadableFile):
            read_header(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * len(text) + 10 * 2**20


# --- properties -----------------------------------------------------------------------------------------------

BOUNDED = settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NAMES = TEXT.filter(lambda name: name != "__metadata__")
# A multiple of four elements keeps the sub-byte dtypes on whole bytes.
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(lambda shape: [*shape, 4])
TENSORS = st.dictionaries(NAMES, st.tuples(st.sampled_from(sorted(DTYPE_BITS)), SHAPES), max_size=6)
METADATA = st.dictionaries(TEXT, TEXT, max_size=3)


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
def test_random_valid_headers_round_trip(save, tensors, metadata):
    content = lay_out([(name, dtype, shape) for name, (dtype, shape) in tensors.items()], metadata)
    header = read_header(save(content))
    assert header.metadata == metadata
    assert {name: (info.dtype, list(info.shape)) for name, info in header.tensors.items()} == tensors
    assert header.data_start + sum(info.nbytes for info in header.tensors.values()) == len(content)


@BOUNDED
@given(end=st.integers(0, len(VALID) - 1))
def test_truncated_file_never_passes(save, end: int):
    assert not inspect_file(save(VALID[:end])).loadable


@settings(BOUNDED, max_examples=500)
@given(edits=st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 255)), min_size=1, max_size=4))
@example(edits=[(VALID.index(b"[0"), 0x2D)])
def test_mutated_file_never_crashes_nor_passes_where_the_library_fails(save, edits):
    content = bytearray(VALID)
    for position, value in edits:
        content[position] = value
    report = inspect_file(save(bytes(content)))
    assert report.loadable or report.problems
    if report.loadable:
        assert library_accepts(bytes(content))


# JSON tokens in any order reach the parser's corners far sooner than random bytes do.
TOKENS = st.sampled_from(
    ["{", "}", "[", "]", ":", ",", '"a"', '"b"', '"dtype"', '"shape"', '"data_offsets"', '"__metadata__"', '"U8"', "0",
     "1", "-1", "-0", "1.0", "1e0", "01", "null", "true", "NaN", "[0,1]", "[1]", " ", '"\\u0061"', '"\\ud800"',
     '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}', '{"k":"v"}']
)  # fmt: skip
VALUES = st.one_of(TOKENS, st.lists(TOKENS, max_size=6).map("".join))


@settings(BOUNDED, max_examples=500)
@given(members=st.lists(st.tuples(VALUES, VALUES), max_size=3), junk=VALUES, data_bytes=st.integers(0, 2))
@example(members=[('"a"', '{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}')], junk="", data_bytes=0)
def test_no_json_passes_that_the_library_refuses(save, members, junk, data_bytes):
    text = "{" + ",".join(f"{key}:{value}" for key, value in members) + "}" + junk
    content = build(text, data_bytes)
    if inspect_file(save(content)).loadable:
        assert library_accepts(content)


@BOUNDED
@given(content=st.binary(max_size=200))
def test_random_bytes_never_crash(save, content: bytes):
    for name in ("random.safetensors", "random.ckpt", "random"):
        assert isinstance(inspect_file(save(content, name)), FileReport)


# --- GGUF -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.gguf", "model.safetensors", "model.sft", "model.ckpt", "model"])
def test_gguf_is_refused_whatever_it_is_called(save, name: str):
    path = save(GGUF_V3, name)
    assert is_gguf_file(path)
    report = inspect_file(path)
    assert (report.format, report.loadable, report.bytes) == ("gguf", False, len(GGUF_V3))
    with pytest.raises(UnsupportedFile) as caught:
        require_loadable(path)
    message = str(caught.value)
    assert message.startswith(name)
    assert all(word in message for word in ("GGUF", "cannot be split", "BF16", "FP8", "NVFP4", "INT8"))


def test_other_files_are_not_taken_for_gguf(save, tmp_path: Path):
    assert not is_gguf_file(save(VALID, "named.gguf"))
    assert not is_gguf_file(save(b"GGU", "short.gguf"))
    assert not is_gguf_file(tmp_path / "missing.gguf")
    assert not is_gguf_file(tmp_path)


class GGMLLayer: ...


class GGMLTensor: ...


class GGMLOps:
    class Linear(GGMLLayer): ...


class Plain: ...


class Model:
    """As much of a comfy BaseModel as detection looks at; counts how often the weights were walked."""

    def __init__(self, operations: object = None, module: object = None, parameter: object = None) -> None:
        self.model_config = SimpleNamespace(custom_operations=operations)
        self.walks = 0
        self._module, self._parameter = module or Plain(), parameter or Plain()

    def modules(self):
        self.walks += 1
        return iter([Plain(), self._module])

    def parameters(self):
        self.walks += 1
        return iter([Plain(), self._parameter])


class ModelPatcher:
    def __init__(self, model: Any) -> None:
        self.model = model


class GGUFModelPatcher(ModelPatcher): ...


class ForkedPatcher(GGUFModelPatcher): ...


@pytest.mark.parametrize("patcher_class", [GGUFModelPatcher, ForkedPatcher])
def test_model_of_a_gguf_loader_is_recognised_by_its_class_without_walking_weights(patcher_class):
    patcher = patcher_class(Model())
    assert is_gguf_model(patcher)
    assert patcher.model.walks == 0


@pytest.mark.parametrize("operations", [GGMLOps, GGMLOps()])
def test_gguf_operations_are_recognised_in_a_model_wrapped_anew(operations):
    patcher = ModelPatcher(Model(operations))
    assert is_gguf_model(patcher)
    assert patcher.model.walks == 0


@pytest.mark.parametrize("holds", [{"module": GGMLOps.Linear()}, {"parameter": GGMLTensor()}])
def test_gguf_weights_are_recognised_where_nothing_else_tells(holds):
    assert is_gguf_model(ModelPatcher(Model(**holds)))


def test_stock_models_and_odd_objects_are_not_taken_for_gguf():
    for thing in (ModelPatcher(Model()), ModelPatcher(None), None, SimpleNamespace(model=SimpleNamespace(modules=3))):
        assert not is_gguf_model(thing)


def test_function_that_loads_gguf_does_not_mark_the_classes_inside_it():
    class Local: ...

    assert "gguf" in Local.__qualname__
    assert not is_gguf_model(ModelPatcher(Local()))


def test_real_parameters_keep_the_class_that_detection_looks_for():
    torch = pytest.importorskip("torch")

    class GGMLTensor(torch.Tensor): ...

    layer = torch.nn.Linear(2, 2)
    assert not is_gguf_model(ModelPatcher(layer))
    layer.weight = torch.nn.Parameter(torch.zeros(2, 2).as_subclass(GGMLTensor), requires_grad=False)
    assert is_gguf_model(ModelPatcher(layer))


def test_refusal_of_a_gguf_model_names_its_classes_where_no_file_is_known():
    message = gguf_refusal(patcher=GGUFModelPatcher(Model()))
    assert "Model model (GGUFModelPatcher)" in message
    assert "cannot be split" in message


# --- formats --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "name", "size"), [("BF16", "bf16", 2), ("F16", "fp16", 2), ("F32", "fp32", 4)])
def test_float_files_are_named_and_counted(save, dtype: str, name: str, size: int):
    content = lay_out([("a.weight", dtype, [4, 8]), ("a.bias", dtype, [4]), ("norm.weight", dtype, [8])])
    report = require_loadable(save(content))
    assert (report.format, report.parameters, report.layers) == (name, 44, {name: 1})
    assert (report.bytes, report.memory_bytes) == (len(content), 44 * size)
    assert (report.problems, report.family) == ([], None)


def test_mixed_floats_are_named_after_most_of_their_weights(save):
    report = inspect_file(save(VALID))
    assert (report.format, report.layers) == ("bf16", {"bf16": 1, "fp32": 1})


def test_integer_buffers_do_not_make_a_float_file_something_else(save):
    content = lay_out([("a.weight", "F16", [4, 4]), ("position_ids", "I64", [1, 77]), ("mask", "BOOL", [8])])
    assert inspect_file(save(content)).format == "fp16"


QUANTISED = {
    "fp8": [("a.weight", "F8_E4M3", [4, 4]), ("a.bias", "BF16", [4])],
    "old_scaled_fp8": [("a.weight", "F8_E4M3", [4, 4]), ("a.scale_weight", "F32", []), ("b.weight", "BF16", [99, 9])],
    "nvfp4": [("a.weight", "U8", [4, 2]), ("a.weight_scale", "F8_E4M3", [128, 4]), ("a.comfy_quant", "U8", [19])],
    "int8": [("a.weight", "I8", [4, 4]), ("a.weight_scale", "F32", [4, 1]), ("b.weight", "BF16", [99, 9])],
    "gptq": [("a.qweight", "I32", [4, 4]), ("a.scales", "F16", [4, 4])],
}


@pytest.mark.parametrize("tensors", QUANTISED.values(), ids=QUANTISED)
def test_quantised_file_is_never_called_a_float_file(save, tensors):
    assert require_loadable(save(lay_out(tensors))).format not in {"bf16", "fp16", "fp32"}


def test_float_weights_marked_as_quantised_are_not_called_a_float_file(save):
    content = lay_out([("a.weight", "BF16", [4, 4])], {"_quantization_metadata": "{}"})
    assert inspect_file(save(content)).format not in {"bf16", "fp16", "fp32"}


@pytest.mark.parametrize("dtype", ["I64", "F64", "BOOL"])
def test_weights_of_a_buffer_dtype_are_not_called_floats(save, dtype: str):
    content = lay_out([("a.weight", dtype, [4, 4]), ("a.bias", "F32", [4])])
    assert inspect_file(save(content)).format == "other"


def test_format_without_a_handler_is_passed_on_to_comfyui(save):
    report = require_loadable(save(lay_out([("a.weight", "C64", [4, 4]), ("b.weight", "BF16", [4, 4])])))
    assert (report.format, report.layers, report.problems) == ("other", {"other": 1, "bf16": 1}, [])


def test_file_without_tensors_is_refused(save):
    with pytest.raises(UnsupportedFile, match="holds no tensors"):
        require_loadable(save(build("{}")))


def test_at_most_one_handler_recognises_a_file(save):
    names = [handler.name for handler in handlers()]
    assert len(names) == len(set(names))
    for content in (VALID, *map(lay_out, QUANTISED.values())):
        header: Header = read_header(save(content))
        claims = [handler for handler in handlers() if handler.recognises(header)]
        assert len(claims) <= 1
        assert find_handler(header).name == (claims[0].name if claims else "other")


def test_pickles_are_not_opened_and_said_to_stay_on_this_machine(save):
    class Trap:
        def __reduce__(self):
            return (pytest.fail, ("the pickle was opened",))

    import pickle

    report = require_loadable(save(pickle.dumps(Trap()), "old.ckpt"))
    assert (report.format, report.loadable) == ("pickle", True)
    assert "not sent to a worker" in report.problems[0]
    assert inspect_file(save(b"PK\x03\x04" + bytes(60), "new.PT")).format == "pickle"


def test_safetensors_file_named_like_a_pickle_is_refused_before_torch_load_sees_it(save):
    with pytest.raises(UnsupportedFile, match=r"Rename it to end in \.safetensors"):
        require_loadable(save(VALID, "model.ckpt"))


def test_empty_checkpoint_is_refused(save):
    assert inspect_file(save(b"", "model.ckpt")).loadable is False


def test_report_is_plain_json(save):
    fields = json.loads(json.dumps(dataclasses.asdict(inspect_file(save(VALID)))))
    assert {"file", "format", "family", "parameters", "bytes", "layers", "loadable", "problems"} <= set(fields)


def test_importing_formats_pulls_in_neither_torch_nor_numpy():
    root = Path(header_text.__file__).parent.parent
    script = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('monarch_split', {str(root / '__init__.py')!r},"
        f" submodule_search_locations=[{str(root)!r}])\n"
        "module = sys.modules['monarch_split'] = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "import monarch_split.formats.registry as registry\n"
        "registry.handlers()\n"
        "assert not {'torch', 'numpy', 'safetensors', 'comfy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
