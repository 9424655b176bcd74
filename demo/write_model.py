"""Script for ComfyUI's Python: writes a tiny model for the demo's server.

python write_model.py COMFYUI FOLDER FAMILY SCALE"""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path


def main() -> None:
    comfyui, folder, family, scale = sys.argv[1:]
    # In place of this file's folder, whose `nodes` would hide ComfyUI's.
    sys.path[0] = comfyui
    runpy.run_path(str(Path(__file__).resolve().parent.parent / "__main__.py"))["load_pack"]()
    # Before anything of ComfyUI looks for a GPU.
    importlib.import_module("comfy.cli_args").args.cpu = True
    importlib.import_module("monarch_split.demo.tiny_models").write_model(family, Path(folder), scale=scale)


if __name__ == "__main__":
    main()
