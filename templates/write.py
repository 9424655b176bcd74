"""Writes example_workflows/*.json: python templates/write.py. The pictures are pictures.py's job."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).resolve().parent.parent / "__main__.py"))["load_pack"]()
    from monarch_split.templates.write import main

    main()
    raise SystemExit

from .images import IMAGES
from .videos import VIDEOS

FOLDER = Path(__file__).resolve().parent.parent / "example_workflows"


def texts() -> dict[str, str]:
    """The content of every file, by its name."""
    workflows = [make() for make in (*IMAGES, *VIDEOS)]
    return {
        f"{workflow.name}.json": json.dumps(workflow.as_json(), indent=1, ensure_ascii=False) + "\n"
        for workflow in workflows
    }


def main() -> None:
    for name, text in texts().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
        print(FOLDER / name)
