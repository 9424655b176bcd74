"""`monarch convert` before anything is converted: what cannot be read or written is named, and nothing is touched."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from monarch_split.cli import main
from monarch_split.formats import UnsupportedFile
from monarch_split.formats.convert import convert
from monarch_split.tests.model_files import GGUF_V3, QUANTISED, lay_out, quantised

Capture = pytest.CaptureFixture[str]
MODEL = lay_out({"blocks.0.q.weight": ("BF16", [32, 32]), "head.modulation": ("BF16", [32])})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.safetensors"
    path.write_bytes(MODEL)
    return path


def refused(capsys: Capture, source: Path, target: Path, *more: str) -> str:
    """What is said of a target that must not be written."""
    before = {path: path.stat().st_mtime_ns for path in target.parent.iterdir()}
    assert main(["convert", str(source), str(target), "--to", "fp8", *more]) == 2
    assert {path: path.stat().st_mtime_ns for path in target.parent.iterdir()} == before
    return capsys.readouterr().err


@pytest.mark.parametrize("more", [[], ["--force"]], ids=["", "force"])
def test_a_folder_or_a_pipe_is_never_replaced(capsys: Capture, source: Path, tmp_path: Path, more: list[str]) -> None:
    (tmp_path / "folder.safetensors").mkdir()
    assert "is a folder. Name the file to write" in refused(capsys, source, tmp_path / "folder.safetensors", *more)
    os.mkfifo(tmp_path / "pipe.safetensors")
    assert "is a pipe or a device, not a file" in refused(capsys, source, tmp_path / "pipe.safetensors", *more)


@pytest.mark.parametrize("more", [[], ["--force"]], ids=["", "force"])
def test_a_model_is_not_converted_onto_itself(capsys: Capture, source: Path, tmp_path: Path, more: list[str]) -> None:
    link = tmp_path / "link.safetensors"
    link.symlink_to(source)
    old = tmp_path / "in.ckpt"
    os.link(source, old)
    for target in (source, link, old):
        assert "IN and OUT are the same file" in refused(capsys, source, target, *more)


def test_a_name_that_comfyui_does_not_load_is_refused(capsys: Capture, source: Path, tmp_path: Path) -> None:
    assert "does not end in .safetensors" in refused(capsys, source, tmp_path / "out.gguf")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (GGUF_V3, "is a GGUF file, which convert does not read. Convert the BF16, FP16 or FP32"),
        (b"PK\x03\x04" + bytes(60), "is a pickled PyTorch file, which convert does not read. Convert the BF16"),
        (lay_out({"q.lora_up.weight": ("BF16", [32, 32])}), "is a LoRA; convert writes models and text encoders"),
        (lay_out({"decoder.conv_in.weight": ("BF16", [32, 32])}), "is a VAE; convert writes models"),
        (quantised({"a": QUANTISED["nvfp4"]}), "is in nvfp4 already"),
        (MODEL[:-1], "is cut off"),
        (b"", "is empty"),
    ],
    ids=["gguf", "pickle", "lora", "vae", "quantised", "truncated", "empty"],
)
def test_a_source_that_cannot_be_converted_is_called_what_it_is(tmp_path: Path, content: bytes, words: str) -> None:
    source = tmp_path / "in.ckpt" if content.startswith(b"PK") else tmp_path / "in.safetensors"
    source.write_bytes(content)
    with pytest.raises(UnsupportedFile, match=words) as caught:
        convert(source, tmp_path / "out.safetensors", "fp8")
    assert str(caught.value).startswith(source.name)
    assert os.listdir(tmp_path) == [source.name]


def test_a_disk_without_room_is_named_before_anything_is_written(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    rows = -(-free // (2 * 16384) // 16) * 16
    header = {"head.modulation": {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]}}
    header |= {"blocks.0.q.weight": {"dtype": "BF16", "shape": [rows, 16384], "data_offsets": [0, rows * 16384 * 2]}}
    header |= {"blocks.0.k.weight": {**header["blocks.0.q.weight"], "data_offsets": [rows * 32768, rows * 65536]}}
    text = json.dumps(header).encode()
    source = tmp_path / "in.safetensors"
    with source.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + rows * 65536)
    with pytest.raises(OSError, match=r"need [\d.]+ GB, its disk has [\d.]+ GB free") as caught:
        convert(source, tmp_path / "out.safetensors", "fp8")
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == ["in.safetensors"]
