"""Starts a worker of which each block takes so many seconds per token, as on a slower machine: for WorkerProcess.

python slow_worker.py SECONDS PACK/__main__.py worker …
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

if __name__ == "__main__":
    runpy.run_path(sys.argv[2])["load_pack"]()
    from monarch_split import cli
    from monarch_split.demo import reference_runtime
    from monarch_split.demo.reference import slowed

    stock = reference_runtime.load_reference_model

    def load(path: Any) -> Any:
        model = stock(path)
        slowed(model, float(sys.argv[1]))
        return model

    reference_runtime.load_reference_model = load
    sys.exit(cli.main(sys.argv[3:]))
