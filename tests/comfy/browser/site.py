"""A ComfyUI server with its page, Monarch and a tiny model, whose driver has a configuration folder of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from monarch_split.demo.comfy_server import ComfyServer
from monarch_split.demo.graphs import Graph, text_to_image
from monarch_split.demo.tiny_models import write_model
from monarch_split.demo.worker_process import PACK
from monarch_split.tests.driving import share_identity

_FAMILY = "flux_schnell"
_MODEL = f"{_FAMILY}_deep.safetensors"


class Site(ComfyServer):
    """Use as a context manager. configuration: the driver's folder, which names no worker at first."""

    def __init__(self, base: Path, comfyui: Path, frontend: Path, arguments: Sequence[str] = ()) -> None:
        """frontend: the folder with the page's index.html."""
        self.configuration = base / "configuration"
        super().__init__(
            base,
            comfyui=comfyui,
            pack=PACK,
            pack_name="monarch-split",
            frontend=True,
            arguments=["--front-end-root", str(frontend), *arguments],
            environment={"MONARCH_CONFIG_DIR": str(self.configuration)},
        )
        self.configuration.mkdir()
        share_identity(self.configuration)
        settings = base / "user" / "default" / "comfy.settings.json"
        settings.parent.mkdir(parents=True)
        # The page greets a new user with a dialog.
        settings.write_text('{"Comfy.TutorialCompleted": true}')
        (base / "custom_nodes").mkdir()
        (base / "custom_nodes" / "monarch_templates").symlink_to(Path(__file__).parent / "template_pack")
        write_model(_FAMILY, self.models_folder("diffusion_models"), scale="deep")

    def name_workers(self, *addresses: str, **clusters: Sequence[str]) -> None:
        """Have the configuration name these workers, and other clusters besides; without any, those that are paired."""
        file = self.configuration / "monarch.toml"
        named = {**({"default": addresses} if addresses else {}), **clusters}
        lines = [
            f"[clusters.{name}]\nworkers = [{', '.join(repr(each) for each in listed)}]\n"
            for name, listed in named.items()
        ]
        file.write_text("".join(lines)) if lines else file.unlink(missing_ok=True)

    def finished(self) -> list[dict[str, Any]]:
        """History entries of prompts that ended, oldest first."""
        return [entry for entry in self._request("/history").values() if entry.get("status", {}).get("status_str")]


def render(seed: int = 1, steps: int = 4, **more: Any) -> Graph:
    """A render of the tiny model by Monarch Sampler."""
    settings = {"family": _FAMILY, "sampler_node": "MonarchSampler", "split": "rows", "cfg": 4.0}
    return text_to_image(_MODEL, seed=seed, steps=steps, **{**settings, **more})
