"""What a report says of ordinary files: names, families, counts; and that making one reads headers only."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from monarch_split.formats import header as header_module
from monarch_split.formats import inspect_file, read_header, require_loadable
from monarch_split.formats.layers import read_layers
from monarch_split.formats.registry import handlers
from monarch_split.tests.model_files import FOREIGN, QUANTISED, Tensors, entry, lay_out, quantised

Save = Callable[..., Path]
PACK = Path(header_module.__file__).parent.parent
FLUX = ["double_blocks.0.img_attn.norm.key_norm.scale", "img_in.weight"]
MIXED: Tensors = {"a.weight": ("BF16", [4, 8]), "a.bias": ("BF16", [4]), "out.weight": ("F32", [2, 4])}


@pytest.mark.parametrize(("dtype", "name", "size"), [("BF16", "bf16", 2), ("F16", "fp16", 2), ("F32", "fp32", 4)])
def test_float_files_are_named_and_counted(save: Save, dtype: str, name: str, size: int) -> None:
    content = lay_out({"a.weight": (dtype, [4, 8]), "a.bias": (dtype, [4]), "norm.weight": (dtype, [8])})
    report = require_loadable(save(content))
    assert (report.format, report.parameters, report.layers) == (name, 44, {name: 1})
    assert (report.bytes, report.memory_bytes) == (len(content), 44 * size)
    assert (report.problems, report.family) == ([], None)


def test_mixed_floats_are_named_after_most_of_their_weights(save: Save) -> None:
    report = inspect_file(save(lay_out(MIXED)))
    assert (report.format, report.layers) == ("bf16", {"bf16": 1, "fp32": 1})
    tables: Tensors = {"table": ("F32", [99, 99])}
    assert inspect_file(save(lay_out({**MIXED, **tables}))).format == "fp32"


CONTENTS = {
    "lora": [
        ["q.lora_up.weight", "q.lora_down.weight", "q.alpha"],
        ["q.lora_A.default.weight", "q.lora_B.default.weight"],
        ["to_q_lora.down.weight", "to_q_lora.up.weight"],
        ["q.lora_linear_layer.down.weight", "q.lora_linear_layer.up.weight"],
        ["q.lokr_w1", "q.lokr_w2_a", "q.lokr_w2_b"],
        ["q.hada_w1_a", "q.hada_w1_b", "q.dora_scale"],
        ["q.diff", "q.diff_b"],
        ["q.oft_blocks"],
    ],
    "text_encoder": [
        ["text_model.encoder.layers.0.mlp.fc1.weight"],
        ["model.layers.0.post_attention_layernorm.weight", "model.layers.0.self_attn.q_proj.weight"],
    ],
    "vision_encoder": [["vision_model.encoder.layers.0.layer_norm1.weight"]],
    "vae": [["decoder.middle.0.residual.0.gamma"], ["decoder.conv_in.conv.weight"]],
    "controlnet": [[*FLUX, "controlnet_x_embedder.weight", "controlnet_blocks.0.weight"]],
    "diffusion_model": [
        FLUX,
        [*FLUX, "lora_scale.a1"],
        ["model.diffusion_model.head.modulation", "decoder.conv_in.weight"],
    ],
    None: [["some.weight", "alpha", "blocks.0.weight"]],
}


@pytest.mark.parametrize(("content", "names"), [(content, names) for content, all in CONTENTS.items() for names in all])
def test_what_is_no_diffusion_model_is_told_by_its_names(save: Save, content: str | None, names: list[str]) -> None:
    report = inspect_file(save(lay_out({name: ("BF16", [4, 4]) for name in names}), "it.safetensors"))
    assert report.content == content
    assert report.loadable == (content in (None, "diffusion_model"))
    if not report.loadable:
        assert (report.family, report.refused) == (None, False)
        assert report.problems[0].startswith("it.safetensors is a ")
        assert "not a diffusion model. Load it with " in report.problems[0]


def test_integer_buffers_do_not_make_a_float_file_something_else(save: Save) -> None:
    content = lay_out({"a.weight": ("F16", [4, 4]), "position_ids": ("I64", [1, 77]), "mask": ("BOOL", [8])})
    assert inspect_file(save(content)).format == "fp16"


def test_rare_floats_are_left_to_comfyui(save: Save) -> None:
    report = require_loadable(save(lay_out({"a.weight": ("F64", [8, 8]), "b.weight": ("BF16", [4, 4])})))
    assert (report.format, report.layers) == ("other", {"other": 1, "bf16": 1})


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "net."])
@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("Flux", FLUX),
        ("Flux2", [*FLUX, "double_stream_modulation_img.lin.weight"]),
        ("Chroma", [*FLUX, "distilled_guidance_layer.norms.0.scale"]),
        ("SD3", ["joint_blocks.0.context_block.attn.qkv.weight"]),
        ("Wan", ["head.modulation", "patch_embedding.weight"]),
        ("LTXAV", ["adaln_single.emb.timestep_embedder.linear_1.bias", "audio_adaln_single.linear.weight"]),
        ("LTXV", ["adaln_single.emb.timestep_embedder.linear_1.bias"]),
        ("SDXL", ["input_blocks.0.0.weight", "label_emb.0.0.weight"]),
        (None, ["encoder.layers.0.weight"]),
    ],
)
def test_the_family_is_told_by_names_that_only_it_has(
    save: Save, family: str | None, names: list[str], prefix: str
) -> None:
    assert inspect_file(save(lay_out({prefix + name: ("BF16", [4]) for name in names}))).family == family


def test_at_most_one_handler_recognises_a_layer_of_any_format(save: Save) -> None:
    names = [handler.name for handler in handlers()]
    assert len(names) == len(set(names))
    layers = {f"q.{name}": layer for name, layer in QUANTISED.items()}
    layers |= {f"bare.{name}": (parts, None) for name, (parts, _) in QUANTISED.items()}
    layers |= {f"foreign.{name}": (parts, None) for name, (parts, _, _) in FOREIGN.items()}
    old: Tensors = {"old.weight": ("F8_E4M3", [4, 8]), "old.scale_weight": ("F32", [])}
    for layer in read_layers(read_header(save(quantised(layers, plain={**MIXED, **old})))):
        claims = [handler.name for handler in handlers() if handler.recognises(layer)]
        assert len(claims) <= 1, layer.name
        if layer.name.startswith("q."):
            assert claims == [layer.name.removeprefix("q.")]


def test_a_report_is_plain_json(save: Save) -> None:
    fields = json.loads(json.dumps(dataclasses.asdict(inspect_file(save(lay_out(MIXED))))))
    expected = ["file", "format", "family", "parameters", "bytes", "layers", "loadable", "problems", "memory_bytes"]
    expected.append("content")
    assert list(fields) == expected


def test_importing_formats_pulls_in_neither_torch_nor_numpy() -> None:
    script = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('monarch_split', {str(PACK / '__init__.py')!r},"
        f" submodule_search_locations=[{str(PACK)!r}])\n"
        "module = sys.modules['monarch_split'] = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "import monarch_split.formats.registry as registry\n"
        "registry.handlers()\n"
        "assert not {'torch', 'numpy', 'safetensors', 'comfy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="bytes read by a process are counted on Linux only")
def test_of_a_large_file_only_the_header_and_the_markers_are_read(tmp_path: Path) -> None:
    marker = b'{"format": "int8_tensorwise"}'
    layers, rows, columns = 200, 8192, 12288  # 20 GB
    header: dict[str, object] = {}
    position = 0
    markers: list[int] = []
    for index in range(layers):
        for part, dtype, shape, size in (
            ("weight", "I8", [rows, columns], rows * columns),
            ("weight_scale", "F32", [], 4),
            ("comfy_quant", "U8", [len(marker)], len(marker)),
        ):
            header[f"b.{index}.{part}"] = entry(dtype, shape, position, position + size)
            position += size
        markers.append(position - len(marker))
    raw = json.dumps(header).encode()
    path = tmp_path / "big.safetensors"
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        start = file.tell()
        file.truncate(start + position)
        for begin in markers:
            file.seek(start + begin)
            file.write(marker)
    before = bytes_read()
    report = inspect_file(path)
    read = bytes_read() - before
    assert (report.format, report.parameters) == ("int8_tensorwise", layers * rows * columns)
    # Buffered reading fetches a block for each marker.
    assert read < 2 * len(raw) + layers * 16384


def bytes_read() -> int:
    """By this process so far, from files in the page cache, too."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])
