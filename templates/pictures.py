"""Takes the picture of each template from ComfyUI's real page, in Chromium without a window.

python templates/pictures.py COMFYUI PYTHON, in a Python with playwright and Pillow.
Model files are there by name alone, so that the page misses none; nothing is run."""

from __future__ import annotations

import argparse
import io
import json
import runpy
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).resolve().parent.parent / "__main__.py"))["load_pack"]()
    from monarch_split.templates.pictures import main

    main()
    raise SystemExit

from ..demo.comfy_server import ComfyServer
from .images import IMAGES
from .videos import VIDEOS
from .write import FOLDER

PACK = FOLDER.parent
WIDTH, QUALITY = 1895, 82
_MARGIN = 20  # pixels of the picture around the graph
# The page's own bars lie at the edges: left, top, right, bottom.
_BARS = (90, 130, 40, 110)
_SETTINGS = {
    "Comfy.ColorPalette": "light",
    "Comfy.TutorialCompleted": True,
    "Comfy.Minimap.Visible": False,
    "Comfy.Graph.CanvasInfo": False,
    "Comfy.VueNodes.Enabled": False,
    "LiteGraph.Canvas.MinFontSizeForLOD": 0,
    "Comfy.Workflow.Persist": False,
}
_READY = "() => !!window.LiteGraph?.registered_node_types?.MonarchSampler && !!window.app?.extensionManager"
_SHOW = """([scale, x, y]) => {
    const view = window.app.canvas.ds
    view.scale = scale
    view.offset = [x, y]
    window.app.canvas.setDirty(true, true)
}"""


def photograph(page: Any, graph: dict[str, Any]) -> bytes:
    """A JPEG of a graph in an open page of ComfyUI. The page's window is made to fit."""
    boxes = [(*node["pos"], *node["size"]) for node in graph["nodes"]]
    boxes += [tuple(group["bounding"]) for group in graph["groups"]]
    left, top = min(box[0] for box in boxes), min(box[1] for box in boxes)
    width = max(box[0] + box[2] for box in boxes) - left
    height = max(box[1] + box[3] for box in boxes) - top
    scale = (WIDTH - 2 * _MARGIN) / width
    picture = {"x": _BARS[0], "y": _BARS[1], "width": WIDTH, "height": round(height * scale) + 2 * _MARGIN}
    page.set_viewport_size(
        {"width": picture["width"] + _BARS[0] + _BARS[2], "height": picture["height"] + _BARS[1] + _BARS[3]}
    )
    page.evaluate("graph => window.app.loadGraphData(graph)", graph)
    page.wait_for_timeout(500)
    canvas = page.locator("#graph-canvas").bounding_box()
    x = (picture["x"] + _MARGIN - canvas["x"]) / scale - left
    y = (picture["y"] + _MARGIN - canvas["y"]) / scale - top
    page.evaluate(_SHOW, [scale, x, y])
    page.wait_for_timeout(800)
    return _as_jpeg(page.screenshot(clip=picture))


def _as_jpeg(png: bytes) -> bytes:
    from PIL import Image

    stream = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").save(stream, "JPEG", quality=QUALITY, optimize=True)
    return stream.getvalue()


def prepare(base: Path, comfyui: Path) -> None:
    """Settings, files with the names of the models, and the picture that ComfyUI comes with, in a server's folder."""
    settings = base / "user" / "default" / "comfy.settings.json"
    settings.parent.mkdir(parents=True)
    settings.write_text(json.dumps(_SETTINGS), encoding="utf-8")
    for make in (*IMAGES, *VIDEOS):
        for node in make().nodes:
            for file in node.files:
                folder = base / "models" / file.folder
                folder.mkdir(parents=True, exist_ok=True)
                (folder / file.name).touch()
    (base / "input").mkdir()
    shutil.copy(comfyui / "input" / "example.png", base / "input")


def main(arguments: Sequence[str] | None = None) -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("comfyui", type=Path)
    parser.add_argument("python", help="ComfyUI's Python")
    parser.add_argument("--frontend", help="folder of the page, where ComfyUI's Python has no comfyui-frontend-package")
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[], help="templates; all if left out")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        prepare(base, chosen.comfyui)
        root = ["--front-end-root", chosen.frontend] if chosen.frontend else []
        with (
            ComfyServer(
                base, comfyui=chosen.comfyui, python=chosen.python, pack=PACK, pack_name="monarch-split",
                environment={"MONARCH_CONFIG_DIR": folder}, arguments=root, frontend=True,
            ) as server,
            sync_playwright() as playwright,
            playwright.chromium.launch(
                executable_path=chosen.chromium, args=["--no-sandbox", "--disable-gpu", "--disable-quic"]
            ) as browser,
        ):  # fmt: skip
            page = browser.new_page(locale="en-US")
            page.goto(server.url)
            page.wait_for_function(_READY, timeout=60_000)
            page.wait_for_timeout(2000)
            page.keyboard.press("Escape")
            for path in sorted(FOLDER.glob("*.json")):
                if not chosen.only or path.stem in chosen.only:
                    graph = json.loads(path.read_text(encoding="utf-8"))
                    path.with_suffix(".jpg").write_bytes(photograph(page, graph))
                    print(path.with_suffix(".jpg"))
