"""Test-only: let a metadata key of a file override the sizes that ComfyUI detects, for families of fixed size.

Wraps comfy.model_detection for the life of a process, which the product never does; driver and worker need it alike.
`python family_override.py SCRIPT [argument ...]` runs a script under the wrap, and under plain_convolutions."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import runpy
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

# JSON in the safetensors header: {"class": name in comfy.supported_models, "unet_config": {...}}.
METADATA_KEY = "monarch_test_family"
MODULE = "comfy.model_detection"
_MARK = "_monarch_test_wrap"


def wrap(detection: ModuleType) -> None:
    """Make `detection` (comfy.model_detection, imported) obey METADATA_KEY. Wrapping twice changes nothing."""
    original = detection.model_config_from_unet
    if hasattr(original, _MARK):
        return

    def model_config_from_unet(state_dict: dict, prefix: str, *args: Any, metadata: dict | None = None, **kw: Any):
        if metadata is None or METADATA_KEY not in metadata:
            return original(state_dict, prefix, *args, metadata=metadata, **kw)
        import comfy.supported_models

        override = json.loads(metadata[METADATA_KEY])
        config = detection.detect_unet_config(state_dict, prefix, metadata=metadata)
        config.update(override["unet_config"])
        made = getattr(comfy.supported_models, override["class"])(config)
        made.unet_config.update(override["unet_config"])  # some classes put sizes of their own over what is detected
        return made

    setattr(model_config_from_unet, _MARK, True)
    vars(detection)["model_config_from_unet"] = model_config_from_unet


def plain_convolutions() -> None:
    """Switch oneDNN off in this process.

    On a CPU torch convolves one row directly but several rows with oneDNN, and the two differ by 1e-5, which a UNet at
    its first step multiplies a thousandfold. Without oneDNN a row's result does not depend on the rows beside it.
    """
    import torch

    torch.backends.mkldnn.enabled = False


def install(then: Callable[[], None] | None = None) -> None:
    """Wrap comfy.model_detection, and call `then`, now if it is imported, else when it is."""
    if MODULE in sys.modules:
        wrap(sys.modules[MODULE])
        if then is not None:
            then()
    else:
        sys.meta_path.insert(0, _WrapOnImport(then))


class _WrapOnImport(importlib.abc.MetaPathFinder):
    def __init__(self, then: Callable[[], None] | None) -> None:
        self._then = then

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_wrap(module: ModuleType) -> None:
                execute(module)
                wrap(module)
                if self._then is not None:
                    self._then()

            spec.loader.exec_module = execute_and_wrap  # type: ignore[method-assign]
        return spec


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("usage: family_override.py SCRIPT [argument ...]")
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    # As Python itself would have it; run_path does this only for folders, and this file's folder must not shadow names.
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    install(plain_convolutions)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
