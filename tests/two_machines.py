"""Script: another machine on a cable, in network namespaces of its own; prints what the doctor sees of it, as JSON.

Needs root: unshare --net --mount python two_machines.py
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE, THERE, PORT = "10.99.0.1", "10.99.0.2", 7690


def main() -> None:
    runpy.run_path(str(Path(__file__).parent.parent / "__main__.py"))["load_pack"]()
    # The one that was mounted before shows the interfaces of the old namespace.
    _run("mount", "-t", "sysfs", "sysfs", "/sys")
    _run("ip", "link", "set", "lo", "up")
    other = subprocess.Popen(["unshare", "--net", sys.executable, __file__, "listen"], stdin=subprocess.PIPE)
    assert other.stdin is not None
    try:
        _wait_for(lambda: os.readlink(f"/proc/{other.pid}/ns/net") != os.readlink("/proc/self/ns/net"))
        there = ("nsenter", "--target", str(other.pid), "--net")
        _run("ip", "link", "add", "here0", "type", "veth", "peer", "name", "there0", "netns", str(other.pid))
        _run("ip", "address", "add", f"{HERE}/24", "dev", "here0")
        _run("ip", "link", "set", "here0", "mtu", "9000", "up")
        _run(*there, "ip", "address", "add", f"{THERE}/24", "dev", "there0")
        _run(*there, "ip", "link", "set", "there0", "up")
        other.stdin.write(b"\n")
        other.stdin.flush()
        _wait_for(_is_there)
        seen = {"small packets there": _seen(THERE, PORT), "refused": _seen(THERE, PORT + 1)}
        _run(*there, "ip", "link", "set", "there0", "mtu", "9000")
        seen["alike"] = _seen(THERE, PORT)
        seen["nobody"] = _seen("10.99.0.3", PORT)
        seen["no way"] = _seen("10.98.0.3", PORT)
        # Drops what comes from here without a word, as a firewall does.
        _run(*there, "ip", "route", "add", "blackhole", f"{HERE}/32")
        seen["firewall"] = _seen(THERE, PORT)
        print(json.dumps(seen))
    finally:
        other.kill()
        other.wait(10)


def _seen(host: str, port: int) -> list[dict[str, Any]]:
    from monarch_split.distributed import limits
    from monarch_split.distributed.addresses import Address
    from monarch_split.distributed.doctor.network import Way, interfaces, reach

    limits.CONNECT_TIMEOUT = 0.5
    ways: list[Way] = []
    return [check.as_dict() for checks in (reach([Address(host, port)], ways), interfaces(ways)) for check in checks]


def _is_there() -> bool:
    try:
        socket.create_connection((THERE, PORT), timeout=1).close()
        return True
    except OSError:
        return False


def _wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        if time.monotonic() > deadline:
            sys.exit("the other machine did not come up")
        time.sleep(0.02)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=10, stdout=sys.stderr)


def _listen() -> None:
    sys.stdin.readline()
    with socket.create_server((THERE, PORT)) as server:
        while True:
            server.accept()[0].close()


if __name__ == "__main__":
    _listen() if "listen" in sys.argv else main()
