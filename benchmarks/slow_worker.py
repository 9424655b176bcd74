"""Starts a worker of which each block takes so many seconds per token, as on a slower machine: for WorkerProcess.

python slow_worker.py SECONDS PACK/__main__.py worker …
"""

from __future__ import annotations

import runpy
import sys
import time
from typing import Any


def slow_down(model: Any, seconds: float) -> None:
    """Have each block of a reference model take `seconds` longer for every token of every row that it is given."""

    def sleep(_: Any, __: Any, output: Any) -> None:
        time.sleep(seconds * output.shape[0] * output.shape[1])

    for block in model.blocks:
        block.register_forward_hook(sleep)


if __name__ == "__main__":
    runpy.run_path(sys.argv[2])["load_pack"]()
    from monarch_split import cli
    from monarch_split.demo import reference_runtime

    stock = reference_runtime.load_reference_model

    def load(path: Any) -> Any:
        model = stock(path)
        slow_down(model, float(sys.argv[1]))
        return model

    reference_runtime.load_reference_model = load
    sys.exit(cli.main(sys.argv[3:]))
