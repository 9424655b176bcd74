"""The command line: `python custom_nodes/<pack> …`, `python -m monarch_split …`, and `./monarch …` through it.

Loads this folder as the package `monarch_split`, whatever the folder is called; the rest is in `cli/`.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from types import ModuleType

PACKAGE = "monarch_split"

# Not resolved: a pack that is symlinked into custom_nodes must still find the ComfyUI above it.
FOLDER = os.path.dirname(os.path.abspath(__file__))


def load_pack() -> ModuleType:
    """Make this folder importable as `monarch_split`, and its own folders (`nodes`, …) by no other name.

    Python puts the folder of a script on sys.path. There, `nodes` and `distributed` would hide ComfyUI's modules and
    those of other packs, so the folder is taken off again.
    """
    here = os.path.realpath(FOLDER)
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or os.getcwd()) != here]

    loaded = sys.modules.get(PACKAGE)
    if loaded is not None:
        if os.path.realpath(os.path.dirname(loaded.__file__ or "")) != here:
            raise ImportError(f"{PACKAGE} is already loaded from {loaded.__file__}, so {FOLDER} cannot be loaded too.")
        return loaded

    spec = importlib.util.spec_from_file_location(
        PACKAGE, os.path.join(FOLDER, "__init__.py"), submodule_search_locations=[FOLDER]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{FOLDER} has no __init__.py that Python can load.")
    package = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = package
    spec.loader.exec_module(package)
    return package


def run(*, own_environment: bool) -> int:
    """Run the command line on sys.argv. `own_environment`: make and use `.venv`, as `./monarch` does."""
    load_pack()
    cli = importlib.import_module(f"{PACKAGE}.cli")
    return cli.main(sys.argv[1:], own_environment=own_environment)


if __name__ == "__main__":
    sys.exit(run(own_environment=False))
