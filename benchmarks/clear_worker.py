"""Starts a worker that serves anybody in the clear, to measure what encryption costs: a launcher for WorkerProcess.

python clear_worker.py PACK/__main__.py worker …
"""

from __future__ import annotations

import functools
import runpy
import sys

if __name__ == "__main__":
    runpy.run_path(sys.argv[1])["load_pack"]()
    from monarch_split import cli
    from monarch_split.distributed import serve

    serve.serve = functools.partial(serve.serve, encrypted=False)
    sys.exit(cli.main(sys.argv[2:]))
