"""What both sides run: compared when they meet, so that different code never computes one picture.

Pack and ComfyUI code must agree; torch and comfy-kitchen may differ, with a warning.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import __version__


@dataclass(frozen=True)
class Versions:
    """Versions of one side.

    `pack_code` and `comfyui_code` are digests of the engine and of ComfyUI's comfy folder (empty where there is none);
    `kitchen_backends` names the kernels that quantised layers can use.
    """

    pack: str
    comfyui: str
    comfyui_code: str
    torch: str
    kitchen: str
    pack_code: str = ""
    kitchen_backends: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {"versions": asdict(self)}

    @classmethod
    def from_message(cls, body: dict[str, Any]) -> Versions:
        """What the other side said; fields it did not send are empty."""
        said = body.get("versions")
        said = said if isinstance(said, dict) else {}
        return cls(**{name: str(said.get(name, ""))[:200] for name in cls.__dataclass_fields__})


def own_versions(comfyui: Path | None, comfyui_version: str = "") -> Versions:
    """Versions of this process; `comfyui` is the folder that holds comfy/."""
    return Versions(
        pack=__version__,
        pack_code=_code_digest(Path(__file__).parent),
        comfyui=comfyui_version,
        comfyui_code=_code_digest(comfyui / "comfy") if comfyui else "",
        torch=_installed("torch"),
        kitchen=_installed("comfy-kitchen"),
        kitchen_backends=_kitchen_backends(),
    )


def mismatch(driver: Versions, worker: Versions, name: str) -> tuple[str | None, list[str]]:
    """(reason to refuse, warnings) for a driver and the worker called `name`."""
    if driver.pack != worker.pack:
        return (
            f"{name} runs Monarch {worker.pack or 'of an unknown version'}, this machine {driver.pack}; "
            "install the same version on both",
            [],
        )
    if driver.pack_code != worker.pack_code:
        return (f"{name} has other code of Monarch {driver.pack}; install the same release or commit on both", [])
    if driver.comfyui_code != worker.comfyui_code:
        return (
            f"{name} runs other ComfyUI code ({worker.comfyui or 'unknown'}) than this machine "
            f"({driver.comfyui or 'unknown'}); update both to the same version",
            [],
        )
    warnings = [
        f"{name} has {package} {theirs or 'missing'}, this machine {ours or 'missing'}"
        for package, ours, theirs in (
            ("torch", driver.torch, worker.torch),
            ("comfy-kitchen", driver.kitchen, worker.kitchen),
            ("comfy-kitchen's backends", driver.kitchen_backends, worker.kitchen_backends),
        )
        if ours != theirs
    ]
    return None, warnings


@lru_cache(maxsize=8)
def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _kitchen_backends() -> str:
    """Names of the kernel backends that ComfyUI uses, once it is imported."""
    kitchen = sys.modules.get("comfy_kitchen")
    if kitchen is None:
        return ""
    backends = kitchen.list_backends().items()
    return ", ".join(sorted(name for name, state in backends if state["available"] and not state["disabled"]))


@lru_cache(maxsize=4)
def _code_digest(folder: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    # By text: Windows would sort paths without regard to case.
    for path in sorted(folder.rglob("*.py"), key=Path.as_posix):
        digest.update(path.relative_to(folder).as_posix().encode())
        # The same code checked out on Windows has other line ends.
        digest.update(path.read_bytes().replace(b"\r\n", b"\n"))
    return digest.hexdigest()
