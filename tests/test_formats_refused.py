"""Formats that ComfyUI does not read: each refused by its name, from the header, before anything is loaded."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from monarch_split.formats import UnsupportedFile, inspect_file, require_loadable, require_splittable
from monarch_split.tests.model_files import FOREIGN, FOREIGN_SHAPE, Tensors, lay_out

Save = Callable[..., Path]


@pytest.mark.parametrize(("parts", "name", "words"), FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_format_is_refused_by_name_with_a_way_out(save: Save, parts: Tensors, name: str, words: str) -> None:
    tensors: Tensors = {"big.weight": ("BF16", [256, 256]), "a.b.bias": ("BF16", FOREIGN_SHAPE[:1])}
    tensors |= {f"a.b.{part}": tensor for part, tensor in parts.items()}
    path = save(lay_out(tensors), "flux.safetensors")
    report = inspect_file(path)
    assert (report.format, report.loadable) == (name, False)
    assert report.layers == {name: 1, "bf16": 1}
    with pytest.raises(UnsupportedFile) as caught:
        require_loadable(path)
    message = str(caught.value)
    assert message.startswith("flux.safetensors cannot be used: layer 'a.b' ")
    assert words in message
    assert "safetensors file of the same model" in message or "Download it again" in message


@pytest.mark.parametrize("name", ["nf4", "gptq", "awq", "torchao", "svdquant"])
def test_parameters_of_a_foreign_format_are_counted_unpacked(save: Save, name: str) -> None:
    rows, columns = FOREIGN_SHAPE
    tensors: Tensors = {f"a.{part}": tensor for part, tensor in FOREIGN[name][0].items()}
    assert (
        inspect_file(save(lay_out({**tensors, "a.bias": ("BF16", FOREIGN_SHAPE[:1])}))).parameters
        == rows * columns + rows
    )


def test_tables_and_tokenizers_beside_the_weights_are_not_taken_for_packed_weights(save: Save) -> None:
    tensors: Tensors = {
        "a.weight": ("BF16", [4, 8]),
        "text.spiece_model": ("U8", [5000]),
        "position_ids": ("I64", [1, 77]),
        "mask": ("BOOL", [77, 77]),
        "pos_embed": ("F32", [1, 64, 128]),
    }
    report = require_loadable(save(lay_out(tensors)))
    assert report.layers == {"bf16": 1}


def test_a_pickle_is_not_opened_and_stays_on_this_machine(save: Save) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
            return (pytest.fail, ("the pickle was opened",))

    path = save(pickle.dumps(Trap()), "old.ckpt")
    report = require_loadable(path)
    assert (report.format, report.loadable) == ("pickle", True)
    assert "can run code when opened" in report.problems[0]
    assert "not sent to a worker" in report.problems[0]
    assert inspect_file(save(b"PK\x03\x04" + bytes(60), "new.PT")).format == "pickle"
    with pytest.raises(UnsupportedFile, match="not sent to a worker"):
        require_splittable(path)


def test_a_safetensors_file_named_like_a_pickle_is_refused_before_torch_load_sees_it(save: Save) -> None:
    with pytest.raises(UnsupportedFile, match=r"Rename it to end in \.safetensors"):
        require_loadable(save(lay_out({"a.weight": ("BF16", [4, 4])}), "model.ckpt"))


def test_a_file_without_tensors_and_an_empty_one_are_refused(save: Save) -> None:
    with pytest.raises(UnsupportedFile, match="holds no tensors"):
        require_loadable(save(lay_out({})))
    assert not inspect_file(save(b"", "model.ckpt")).loadable
