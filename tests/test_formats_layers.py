"""Quantised layers: each format told by its marker and tensors, its parameters counted, every companion checked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from monarch_split.formats import Node, UnsupportedFile, compute_paths, inspect_file, require_loadable
from monarch_split.tests.model_files import COLUMNS, OPTIONAL, QUANTISED, ROWS, Tensors, lay_out, quantised

Save = Callable[..., Path]
NORM: Tensors = {"norm.weight": ("BF16", [64])}
CASES = [(name, part) for name, (tensors, _) in QUANTISED.items() for part in tensors]


def one(name: str, settings: Any = ..., **tensors: Any) -> dict[str, tuple[Tensors, Any]]:
    """Layer 'a.b' in a format, with other settings or tensors; a tensor of None is left out."""
    stock, stock_settings = QUANTISED[name]
    parts = {part: tensor for part, tensor in {**stock, **tensors}.items() if tensor is not None}
    return {"a.b": (parts, stock_settings if settings is ... else settings)}


def refusal(path: Path) -> str:
    with pytest.raises(UnsupportedFile) as caught:
        require_loadable(path)
    return str(caught.value)


@pytest.mark.parametrize("in_header", [False, True], ids=["comfy_quant", "header"])
@pytest.mark.parametrize("name", QUANTISED)
def test_a_format_is_named_and_counted_wherever_its_marker_is(save: Save, name: str, in_header: bool) -> None:
    layers = {**one(name), "c": QUANTISED[name]}
    plain: Tensors = {**NORM, "a.b.bias": ("BF16", [ROWS]), "out.weight": ("BF16", [8, 64])}
    report = require_loadable(save(quantised(layers, in_header=in_header, plain=plain)))
    assert (report.format, report.problems) == (name, [])
    assert report.layers == {name: 2, "bf16": 1}
    assert report.parameters == 2 * ROWS * COLUMNS + 64 + ROWS + 8 * 64
    assert report.memory_bytes < report.bytes


def test_old_scaled_fp8_is_named_by_its_mark_and_only_there(save: Save) -> None:
    layer: Tensors = {"weight": ("F8_E4M3", [4, 8]), "scale_weight": ("F32", []), "scale_input": ("F32", [])}
    other: Tensors = {"b.weight": ("BF16", [99, 99]), "c.weight": ("F8_E4M3", [4, 8])}
    for prefix in ("", "model.diffusion_model."):
        for mark in (("F8_E4M3", [0]), ("F8_E4M3", [2]), ("F32", [0])):
            tensors = {f"{prefix}a.{part}": tensor for part, tensor in layer.items()}
            content = lay_out({**tensors, **other, f"{prefix}scaled_fp8": mark})
            report = require_loadable(save(content))
            assert (report.format, report.problems) == ("scaled_fp8", [])
            assert report.layers == {"scaled_fp8": 1, "bf16": 1, "fp8_e4m3fn": 1}
            assert report.parameters == 2 * 32 + 99 * 99
    unmarked = lay_out({f"a.{part}": tensor for part, tensor in layer.items()})
    assert "layer 'a' has a scale_weight, and the file lacks the scaled_fp8" in refusal(save(unmarked))


def test_a_mark_of_one_model_in_a_checkpoint_says_nothing_about_the_others(save: Save) -> None:
    layer: Tensors = {"weight": ("F8_E4M3", [4, 8]), "scale_weight": ("F32", [])}
    tensors = {f"{model}.a.{part}": tensor for model in ("one", "two") for part, tensor in layer.items()}
    assert "layer 'two.a' has a scale_weight" in refusal(save(lay_out({**tensors, "one.scaled_fp8": ("F32", [0])})))


def test_old_scaled_fp8_in_e5m2_is_refused_because_comfyui_takes_it_for_e4m3(save: Save) -> None:
    tensors: Tensors = {"a.weight": ("F8_E5M2", [4, 8]), "a.scale_weight": ("F32", []), "scaled_fp8": ("F8_E5M2", [0])}
    assert "F8_E5M2, and ComfyUI takes scaled_fp8 for F8_E4M3" in refusal(save(lay_out(tensors)))


@pytest.mark.parametrize("name", ["fp8_e4m3fn", "fp8_e5m2"])
def test_plain_fp8_is_told_from_scaled(save: Save, name: str) -> None:
    dtype = "F8_E4M3" if "e4m3" in name else "F8_E5M2"
    tensors: Tensors = {"a.weight": (dtype, [64, 64]), "a.bias": ("BF16", [64]), "table": (dtype, [4, 64]), **NORM}
    report = require_loadable(save(lay_out(tensors)))
    assert (report.format, report.layers) == (name, {name: 1})


def test_a_mixed_file_is_named_after_most_of_its_quantised_weights(save: Save) -> None:
    layers: dict[str, tuple[Tensors, Any]] = {f"a.{index}": QUANTISED["nvfp4"] for index in range(3)}
    layers |= {"b": QUANTISED["fp8_e4m3fn_scaled"], "c": QUANTISED["int8_rowwise"]}
    report = require_loadable(save(quantised(layers, plain={"big.weight": ("BF16", [1000, 1000])})))
    assert report.format == "nvfp4"
    assert report.layers == {"nvfp4": 3, "fp8_e4m3fn_scaled": 1, "int8_rowwise": 1, "bf16": 1}


def test_marker_names_in_the_header_may_leave_out_the_prefix(save: Save) -> None:
    tensors, settings = QUANTISED["nvfp4"]
    names = {f"model.diffusion_model.a.{part}": tensor for part, tensor in tensors.items()}
    metadata = {"_quantization_metadata": json.dumps({"layers": {"a": settings}})}
    assert require_loadable(save(lay_out(names, metadata))).layers == {"nvfp4": 1}


def test_scales_of_blocks_may_be_stored_as_bytes(save: Save) -> None:
    for name in ("nvfp4", "mxfp8"):
        scale = QUANTISED[name][0]["weight_scale"]
        require_loadable(save(quantised(one(name, weight_scale=("U8", scale[1])))))


@pytest.mark.parametrize("name", ["fp8_e4m3fn_scaled", "nvfp4", "mxfp8", "int8_tensorwise", "int8_rowwise"])
def test_banks_of_experts_are_counted_and_checked(save: Save, name: str) -> None:
    def bank(part: str, tensor: tuple[str, Any]) -> tuple[str, Any]:
        return tensor if part in OPTIONAL else (tensor[0], [3, *tensor[1]])

    tensors, settings = QUANTISED[name]
    parts = {part: bank(part, tensor) for part, tensor in tensors.items()}
    report = require_loadable(save(quantised({"a": (parts, {**settings, "num_experts": 3})})))
    assert (report.layers, report.parameters) == ({name: 1}, 3 * ROWS * COLUMNS)
    short = {**parts, "weight_scale": (parts["weight_scale"][0], [2, *parts["weight_scale"][1][1:]])}
    assert "weight_scale of shape [2" in refusal(save(quantised({"a": (short, settings)})))


@pytest.mark.parametrize(("name", "part"), [case for case in CASES if case[1] not in OPTIONAL])
def test_a_missing_companion_is_named_with_its_layer(save: Save, name: str, part: str) -> None:
    message = refusal(save(quantised(one(name, **{part: None}))))
    assert message.startswith("model.safetensors cannot be used: layer 'a.b' ")
    assert ("has no weight" if part == "weight" else f"lacks {part}") in message


@pytest.mark.parametrize(("name", "part"), [case for case in CASES if case[1] in OPTIONAL])
def test_optional_companions_may_be_missing(save: Save, name: str, part: str) -> None:
    assert require_loadable(save(quantised(one(name, **{part: None})))).format == name


@pytest.mark.parametrize(("name", "part"), CASES)
def test_a_companion_of_another_dtype_is_named_with_its_layer(save: Save, name: str, part: str) -> None:
    shape = QUANTISED[name][0][part][1]
    message = refusal(save(quantised(one(name, **{part: ("I16", shape)}))))
    assert "layer 'a.b'" in message
    assert f"{part} as I16 instead of" in message


@pytest.mark.parametrize(("name", "part"), CASES)
def test_a_companion_of_another_shape_is_named_with_its_layer(save: Save, name: str, part: str) -> None:
    dtype, shape = QUANTISED[name][0][part]
    if part == "weight":
        wrong, cause = [*shape, 1, 1], "which is not a matrix"
    else:  # a column too many, or a scale that came apart
        wrong = [*shape[:-1], shape[-1] + 1] if shape else [7]
        cause = f"has {part} of shape {wrong} instead of "
    message = refusal(save(quantised(one(name, **{part: (dtype, wrong)}))))
    assert "layer 'a.b'" in message
    assert cause in message


def test_scales_in_rows_of_blocks_instead_of_cublas_tiles_are_refused(save: Save) -> None:
    for name, block in (("nvfp4", 16), ("mxfp8", 32)):
        dtype = QUANTISED[name][0]["weight_scale"][0]
        content = quantised(one(name, weight_scale=(dtype, [ROWS, COLUMNS // block])))
        assert f"of shape [{ROWS}, {COLUMNS // block}] instead of [128, {COLUMNS // block}]" in refusal(save(content))


@pytest.mark.parametrize("name", ["fp8_e4m3fn_scaled", "nvfp4", "int8_tensorwise", "int8_rowwise"])
def test_scales_without_a_marker_are_refused_because_comfyui_would_ignore_them(save: Save, name: str) -> None:
    path = save(quantised(one(name, None)))
    assert "neither a comfy_quant tensor nor the header's metadata says its format" in refusal(path)
    assert inspect_file(path).format == name


@pytest.mark.parametrize("extra", ["weight_correction", "weight_zero_point", "scale_weight"])
def test_companions_that_comfyui_would_leave_out_are_refused(save: Save, extra: str) -> None:
    message = refusal(save(quantised(one("asym_w4a8_int8", **{extra: ("F32", [ROWS])}))))
    assert f"layer 'a.b' has {extra}, which ComfyUI does not read in this format" in message


SETTINGS = {
    "groups_not_a_power_of_four": ("int8_convrot", {"convrot_groupsize": 128}, "not a power of four"),
    "groups_that_do_not_divide": ("int8_convrot", {"convrot_groupsize": 1024}, "1024 does not divide"),
    "groups_not_a_number": ("convrot_w4a4", {"convrot_groupsize": "256"}, "not a power of four"),
    "unknown_linear_dtype": ("convrot_w4a4", {"linear_dtype": "int2"}, "instead of 'int4' or 'int8'"),
    "group_size": ("asym_w4a8_int8", {"group_size": 24}, "neither 4, 8 nor a multiple of 16"),
    "scales_of_another_group_size": ("asym_w4a8_int8", {"group_size": 32}, f"instead of [{ROWS}, {COLUMNS // 32}]"),
    "group_size_in_params": ("asym_w4a8_int8", {"params": {"group_size": 32}}, f"instead of [{ROWS}, {COLUMNS // 32}]"),
}


@pytest.mark.parametrize(("name", "more", "cause"), SETTINGS.values(), ids=SETTINGS)
def test_settings_that_do_not_fit_the_weight_are_refused(
    save: Save, name: str, more: dict[str, Any], cause: str
) -> None:
    message = refusal(save(quantised(one(name, {**QUANTISED[name][1], **more}))))
    assert "layer 'a.b'" in message
    assert cause in message


BROKEN_MARKERS = {
    "unknown_format": (
        {"format": "int8_blockwise", "group_size": 128},
        "in the format 'int8_blockwise', which ComfyUI",
    ),
    "no_format": ({"group_size": 128}, "name no format"),
    "format_not_text": ({"format": ["nvfp4"]}, "which ComfyUI does not read"),
    "not_an_object": ([1], "not a JSON object"),
    "not_json": ("{nvfp4", "not valid JSON"),
    "not_text": ("\N{DEGREE SIGN}" * 3000, "not a short text"),
    "nested": ("[" * 4000, "not valid JSON"),
}


@pytest.mark.parametrize(("settings", "cause"), BROKEN_MARKERS.values(), ids=BROKEN_MARKERS)
def test_a_marker_that_says_nothing_comfyui_knows_is_refused(save: Save, settings: Any, cause: str) -> None:
    path = save(quantised(one("nvfp4", settings)))
    message = refusal(path)
    assert "layer 'a.b'" in message
    assert cause in message
    assert inspect_file(path).format == "unknown"


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"layers": []}', "[" * 9999, '{"layers": {"a": ' + "[]," * 10**6])
def test_header_metadata_that_lists_no_layers_is_refused(save: Save, text: str) -> None:
    report = inspect_file(save(lay_out({"a.weight": ("BF16", [4, 4])}, {"_quantization_metadata": text})))
    assert (report.format, report.loadable) == ("unreadable", False)
    assert "_quantization_metadata" in report.problems[0]


def test_one_sentence_says_for_how_many_layers_it_holds(save: Save) -> None:
    layers = {f"blocks.{index}": one("nvfp4", weight_scale_2=None)["a.b"] for index in range(40)}
    report = inspect_file(save(quantised({**layers, "good": QUANTISED["nvfp4"]})))
    assert report.layers == {"nvfp4": 41}
    (problem,) = report.problems
    assert "layer 'blocks.0' (and 39 more) lacks weight_scale_2" in problem


def test_many_different_problems_are_cut_short(save: Save) -> None:
    layers = {f"b.{index}": one("nvfp4", weight_scale=("U8", [index, 1]))["a.b"] for index in range(200)}
    report = inspect_file(save(quantised(layers)))
    assert len(report.problems) < 10
    assert sum(map(len, report.problems)) < 2000


CPU, TURING, AMPERE, ADA, HOPPER, SPARK = None, (7, 5), (8, 6), (8, 9), (9, 0), (12, 1)
PATHS = [
    ("fp8_e4m3fn_scaled", {CPU: "dequantised", AMPERE: "dequantised", ADA: "native", HOPPER: "native"}),
    ("fp8_e5m2_scaled", {AMPERE: "dequantised", ADA: "emulated"}),
    ("nvfp4", {CPU: "dequantised", HOPPER: "dequantised", (10, 0): "native", SPARK: "native"}),
    ("mxfp8", {CPU: "dequantised", HOPPER: "dequantised", SPARK: "native"}),
    ("int8_convrot", {CPU: "emulated", TURING: "native", SPARK: "native"}),
    ("convrot_w4a4", {CPU: "emulated", TURING: "native", SPARK: "native"}),
    ("asym_w4a8_int8", {TURING: "emulated", AMPERE: "native"}),
]


@pytest.mark.parametrize(("name", "by_capability"), PATHS, ids=[name for name, _ in PATHS])
def test_the_compute_path_follows_the_gpu_as_comfyui_decides_it(
    save: Save, name: str, by_capability: dict[tuple[int, int] | None, str]
) -> None:
    report = require_loadable(save(quantised(one(name), plain={"out.weight": ("BF16", [8, 64])})))
    for capability, path in by_capability.items():
        paths = compute_paths(report, Node(capability))
        assert paths == {name: path, "bf16": "native" if capability and capability >= (8, 0) else "dequantised"}
    assert compute_paths(report, Node(SPARK, backends=frozenset()))[name] == "unavailable"


def test_a_missing_kernel_and_an_old_torch_show_in_the_compute_path(save: Save) -> None:
    layers = {name: QUANTISED[name] for name in ("int8_rowwise", "convrot_w4a4", "nvfp4", "mxfp8")}
    report = require_loadable(save(quantised(layers)))
    eager = Node(SPARK, frozenset({"eager"}), (2, 9))
    assert compute_paths(report, eager) == {
        "int8_rowwise": "emulated",
        "convrot_w4a4": "emulated",
        "nvfp4": "native",
        "mxfp8": "dequantised",
    }
    triton = Node(SPARK, frozenset({"eager", "triton"}))
    assert compute_paths(report, triton)["int8_rowwise"] == "native"
    assert compute_paths(report, triton)["convrot_w4a4"] == "emulated"
