"""Runs a program and writes down every file that it touches outside of some folders, and every program that it starts.

python audited.py LOG FOLDER[:FOLDER…] SCRIPT ARGUMENTS…    one line of JSON in LOG for each
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import threading
from typing import Any

# Arguments of these events of sys.addaudithook that are paths. Others that matter have none.
_PATHS = {
    **dict.fromkeys(("open", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "os.utime"), (0,)),
    **dict.fromkeys(("os.rename", "os.link", "os.symlink", "shutil.move", "shutil.copyfile"), (0, 1)),
    **dict.fromkeys(("os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "pty.spawn"), ()),
}


def watch(log: str, folders: list[str]) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    inside = tuple(os.path.realpath(folder) + os.sep for folder in folders if folder)
    busy = threading.local()

    def is_inside(path: Any) -> bool:
        if isinstance(path, int):
            return True  # a descriptor, which was opened before
        real = os.path.realpath(os.fsdecode(path))
        return (real + os.sep).startswith(inside)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        places = _PATHS.get(event)
        if places is None or getattr(busy, "now", False):
            return
        busy.now = True
        try:
            if not places or not all(is_inside(arguments[place]) for place in places):
                os.write(descriptor, (json.dumps([event, repr(arguments)[:500]]) + "\n").encode())
        finally:
            busy.now = False

    sys.addaudithook(hook)


if __name__ == "__main__":
    watch(sys.argv[1], sys.argv[2].split(os.pathsep))
    del sys.argv[:3]
    runpy.run_path(sys.argv[0], run_name="__main__")
