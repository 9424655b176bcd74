"""`monarch inspect`: files and folders, a table and JSON, exit codes; in any Python, with nothing installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from monarch_split.cli import main
from monarch_split.tests.model_files import GGUF_V3, QUANTISED, build, entry, lay_out, quantised

PACK = Path(__file__).parent.parent
FIELDS = ["file", "format", "family", "parameters", "bytes", "layers", "loadable", "problems", "memory_bytes"]
BF16 = lay_out({"double_blocks.0.img_attn.norm.key_norm.scale": ("BF16", [64]), "img_in.weight": ("BF16", [64, 64])})
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A folder of models with sub-folders, other files and links."""
    for name, content in {
        "flux.safetensors": BF16,
        "sub/deep/nvfp4.SFT": quantised({"a": QUANTISED["nvfp4"]}),
        "sub/wan.gguf": GGUF_V3,
        "sub/old.ckpt": b"PK\x03\x04" + bytes(60),
        "sub/readme.txt": b"not a model",
    }.items():
        path = tmp_path / "models" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "models"


def inspect(capsys: Capture, *arguments: str | Path) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)"""
    code = main(["inspect", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_json_is_one_list_with_the_documented_fields_first(models: Path, capsys: Capture) -> None:
    path = models / "flux.safetensors"
    code, out, err = inspect(capsys, "--json", path)
    (report,) = json.loads(out)
    assert (code, err) == (0, "")
    assert list(report)[: len(FIELDS)] == FIELDS
    assert report == {
        "file": str(path),
        "format": "bf16",
        "family": "Flux",
        "parameters": 64 * 65,
        "bytes": len(BF16),
        "layers": {"bf16": 1},
        "loadable": True,
        "problems": [],
        "memory_bytes": 2 * 64 * 65,
        "content": "diffusion_model",
    }


def test_a_folder_is_searched_for_model_files_of_any_kind(models: Path, capsys: Capture) -> None:
    code, out, _ = inspect(capsys, "--json", models)
    found = {Path(report["file"]).name: report["format"] for report in json.loads(out)}
    assert found == {"flux.safetensors": "bf16", "nvfp4.SFT": "nvfp4", "wan.gguf": "gguf", "old.ckpt": "pickle"}
    assert code == 1


def test_links_are_followed_and_a_ring_of_them_ends(models: Path, tmp_path: Path, capsys: Capture) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "more.safetensors").write_bytes(BF16)
    (models / "link").symlink_to(outside)
    (models / "sub" / "ring").symlink_to(models)
    _, out, err = inspect(capsys, "--json", models)
    names = sorted(Path(report["file"]).name for report in json.loads(out))
    assert names == ["flux.safetensors", "more.safetensors", "nvfp4.SFT", "old.ckpt", "wan.gguf"]
    assert err == f"monarch inspect: {models / 'link'} is a link to {outside.resolve()}, which is looked into, too.\n"


def test_several_files_are_listed_in_the_order_they_were_named(models: Path, capsys: Capture) -> None:
    paths = [models / "sub" / "deep" / "nvfp4.SFT", models / "flux.safetensors"]
    code, out, _ = inspect(capsys, "--json", *paths)
    assert [report["file"] for report in json.loads(out)] == list(map(str, paths))
    assert code == 0


def test_the_table_says_what_each_file_is_and_why_one_is_refused(models: Path, capsys: Capture) -> None:
    code, out, _ = inspect(capsys, models)
    assert code == 1
    lines = {Path(line.split("  ")[0]).name: line for line in out.splitlines()}
    assert lines["flux.safetensors"].split()[1:4] == ["bf16", "Flux", "4.16"]
    assert lines["flux.safetensors"].split()[-3:] == ["1", "bf16", "ok"]
    assert lines["nvfp4.SFT"].split()[-3:] == ["1", "nvfp4", "ok"]
    assert lines["wan.gguf"].endswith("refused")
    assert lines["old.ckpt"].endswith("see below")
    assert "wan.gguf is a GGUF file, and GGUF cannot be split by Monarch." in out
    assert max(map(len, out.splitlines())) < 400


def test_the_table_names_all_that_a_mixed_file_is_quantised_in(tmp_path: Path, capsys: Capture) -> None:
    layers = {f"{name}.{i}": QUANTISED[name] for name, count in (("nvfp4", 1), ("mxfp8", 3)) for i in range(count)}
    (tmp_path / "mixed.safetensors").write_bytes(quantised(layers, plain={"out.weight": ("BF16", [512, 512])}))
    code, out, _ = inspect(capsys, tmp_path)
    assert (code, re.split(" {2,}", out.splitlines()[1])[1]) == (0, "mxfp8+nvfp4")
    assert "3 mxfp8, 1 bf16, 1 nvfp4" in out


@pytest.mark.parametrize("content", [b"", BF16[:-1], GGUF_V3], ids=["empty", "truncated", "gguf"])
def test_a_refused_file_is_a_finding(tmp_path: Path, capsys: Capture, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    code, out, _ = inspect(capsys, path)
    assert (code, "refused" in out) == (1, True)


def test_a_missing_file_is_a_finding_and_the_others_are_still_inspected(models: Path, capsys: Capture) -> None:
    code, out, _ = inspect(capsys, "--json", models / "gone.safetensors", models / "flux.safetensors")
    gone, good = json.loads(out)
    assert "no such file" in gone["problems"][0]
    assert (gone["loadable"], good["loadable"], code) == (False, True, 1)


@pytest.mark.parametrize("how", [[], ["--json"]], ids=["table", "json"])
def test_a_folder_without_models_is_said_and_is_no_error(tmp_path: Path, capsys: Capture, how: list[str]) -> None:
    (tmp_path / "put_models_here").touch()
    code, out, err = inspect(capsys, *how, tmp_path)
    assert (code, out.strip()) == (0, "[]" if how else "")
    assert f"{tmp_path} holds no model files (.bin, " in err


def test_nothing_to_inspect_is_a_usage_error(capsys: Capture) -> None:
    assert inspect(capsys)[0] == 2


OTHERS: dict[str, tuple[str, list[str]]] = {
    "LoRA": ("lora", ["blocks.0.q.lora_A.weight", "blocks.0.q.lora_B.weight", "blocks.0.q.alpha"]),
    "text encoder": ("text_encoder", ["encoder.block.0.layer.0.SelfAttention.k.weight"]),
    "VAE": ("vae", ["decoder.conv_in.weight", "decoder.conv_in.bias"]),
    "ControlNet": ("controlnet", ["controlnet_blocks.0.weight", "img_in.weight"]),
}


def test_what_is_no_diffusion_model_is_said_and_is_no_finding(tmp_path: Path, capsys: Capture) -> None:
    for title, (_, names) in OTHERS.items():
        content = lay_out({name: ("BF16", [4, 4]) for name in names})
        (tmp_path / f"{title}.safetensors").write_bytes(content)
    code, out, _ = inspect(capsys, tmp_path)
    assert code == 0
    for title in OTHERS:
        (row,) = [line for line in out.splitlines() if f"{title}.safetensors" in line]
        assert row.endswith("see below")
        assert re.split(" {2,}", row)[2] == title
        assert f"- A {title} is not split. Load it with" in out
    _, out, _ = inspect(capsys, "--json", tmp_path)
    found = {Path(report["file"]).stem: report for report in json.loads(out)}
    assert {title: report["content"] for title, report in found.items()} == {t: c for t, (c, _) in OTHERS.items()}
    assert not any(report["loadable"] for report in found.values())


def test_a_refused_file_is_a_finding_beside_ones_that_are_something_else(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "lora.safetensors").write_bytes(lay_out({"a.lora_up.weight": ("BF16", [4, 4])}))
    (tmp_path / "half.safetensors").write_bytes(BF16[:-1])
    assert inspect(capsys, tmp_path)[0] == 1


def test_an_unreadable_folder_is_named_and_left_out(
    models: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Permissions do not bind the administrator, whom tests may run as.
    real = os.scandir

    def scandir(path: str) -> object:
        if str(path).endswith("deep"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    code, out, err = inspect(capsys, "--json", models)
    assert len(json.loads(out)) == 3
    assert "deep cannot be read (Permission denied)" in err
    assert code == 1


def test_names_from_a_disk_never_reach_the_terminal_raw(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "a\x1b[31mb.safetensors"
    path.write_bytes(build({"x\x1b[31m.weight": entry("I8", [2, 2], 0, 4)}, 4))
    _, out, _ = inspect(capsys, path)
    assert "\x1b" not in out


def test_a_reader_that_has_seen_enough_is_no_error(models: Path) -> None:
    # More than a pipe holds, so that it is still being written when nobody reads any more.
    for index in range(400):
        (models / f"{index}.safetensors").write_bytes(BF16)
    command = [sys.executable, str(PACK), "inspect", "--json", str(models)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"[\n"
    process.stdout.close()
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (1, b"")


def test_monarch_inspect_runs_in_a_bare_python_and_loads_nothing_heavy(models: Path) -> None:
    check = (
        "import runpy, sys\n"
        f"run = runpy.run_path({str(PACK / '__main__.py')!r})['run']\n"
        "sys.argv = ['monarch', 'inspect', '--json', sys.argv[1]]\n"
        "code = run(own_environment=True)\n"
        "assert not {'torch', 'numpy', 'zmq', 'safetensors', 'comfy'} & set(sys.modules)\n"
        "sys.exit(code)\n"
    )
    # -I and -S: without the packages of any environment.
    command = [sys.executable, "-I", "-S", "-c", check, str(models / "flux.safetensors")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0]["format"] == "bf16"
