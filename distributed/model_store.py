"""The worker's ComfyUI: finds model files, loads them, keeps the models that memory allows, and runs their forwards.

Builds replicas from recipes; the serving loop is worker's.
"""

from __future__ import annotations

import gc
import json
import logging
import sys
from collections import OrderedDict
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from ..formats import require_splittable
from .codec import ProtocolError, pack_plain
from .compute_path import NATIVE, OWN, PLAIN_FP8, follow
from .families import find_family
from .files import FileRef, file_digest
from .jobs import say
from .loading import load_checked
from .memory import forget_pages, give_back_freed, is_unified, loaded_bytes, require_memory
from .options import CODE_OPTIONS
from .replica import add_weight_patches
from .runtime import Through, run_model
from .versions import own_versions

# ComfyUI's kinds of folders with models that can be split.
MODEL_FOLDERS = ("diffusion_models", "checkpoints")
# What decides how a file is loaded; the compute dtype and patches are put on clones.
_BASE_KEYS = ("loader", "options", "dtype", "paths")


class ComfyRuntime:
    """A runtime (see runtime) that computes with the ComfyUI in folder `comfyui`. Create it before importing comfy."""

    def __init__(self, comfyui: Path, arguments: list[str]) -> None:
        """`arguments` are ComfyUI's own command line flags, such as --base-directory or --use-sage-attention."""
        version = _import_comfyui(comfyui, arguments)
        import comfy.model_management as model_management

        self.versions = own_versions(comfyui, version)
        self._model_management = model_management
        # By the digest of the file and how it was loaded.
        self._models: OrderedDict[tuple[str, str], Any] = OrderedDict()
        self._loaded: Any = None
        self._loaded_for = 0.0

    def describe(self) -> dict[str, str]:
        device = self._model_management.get_torch_device()
        memory = self._model_management.get_total_memory(device)
        name = self._model_management.get_torch_device_name(device)
        emulated = " ".join(_emulated_formats(self._model_management, device))
        unified = is_unified(device)
        own_memory = device.type != "cpu" and not unified
        free = f"{self._model_management.get_free_memory(device) / 1e9:.0f} GB" if own_memory else ""
        return {
            "device": name,
            "memory": f"{memory / 1e9:.0f} GB",
            "emulates": emulated,
            "unified": "yes" if unified else "",
            "free": free,
            "driver": _driver_version() if device.type == "cuda" else "",
            "total_bytes": str(int(memory)),
            "free_bytes": str(int(self._model_management.get_free_memory(device))),
            # By the beginning of each file's digest: a driver knows the names of its own files.
            "holds": " ".join(dict.fromkeys(digest[:12] for digest, _ in list(self._models))),
        }

    @staticmethod
    def model_folders() -> list[Path]:
        """Where this ComfyUI looks for models that can be split."""
        import folder_paths

        return [Path(path) for kind in MODEL_FOLDERS for path in folder_paths.get_folder_paths(kind)]

    def find(self, ref: FileRef) -> Path | None:
        import folder_paths

        if ref.folder not in MODEL_FOLDERS:
            return None
        found = folder_paths.get_full_path(ref.folder, ref.name)
        path = Path(found) if found else None
        if path is not None and not self._is_in_a_model_folder(path):
            say(f"{path} is a link out of the model folders and is not used; name its folder to ComfyUI instead.")
            return None
        try:
            if path is not None and path.stat().st_size == ref.bytes and file_digest(path) == ref.digest:
                return path
        except OSError as error:
            say(f"{path} cannot be read ({error.strerror or error}) and is not used.")
        return None

    def _is_in_a_model_folder(self, path: Path) -> bool:
        """A whole folder may be a link; a file may link to another folder of models."""
        own = path.resolve()
        return any(own.is_relative_to(folder.resolve()) for folder in self.model_folders())

    def build(self, tree: dict[str, Any], path: Path, key: str) -> ComfyReplica:
        # As ComfyUI's own prompts run: otherwise patching weights would be recorded for gradients.
        with torch.inference_mode():
            return self._build(tree, path, key)

    def _build(self, tree: dict[str, Any], path: Path, key: str) -> ComfyReplica:
        patcher = self._base(tree, path).clone()
        patched = add_weight_patches(patcher, tree["patches"])
        if patcher.get_model_object("manual_cast_dtype") != tree["compute_dtype"]:
            patcher.set_model_compute_dtype(tree["compute_dtype"])
        patcher.force_cast_weights = tree["force_cast"]
        # The same recipe gets the same identity, so that a run with unchanged patches finds its weights loaded.
        patcher.patches_uuid = key
        # Now, and not with the first forward: the driver's own weights are on their way to its device, too.
        self.use(patcher)
        return ComfyReplica(self, patcher, patched)

    def _base(self, tree: dict[str, Any], path: Path) -> Any:
        how = json.dumps(pack_plain({name: tree[name] for name in _BASE_KEYS}, "recipe")[0])
        key = (file_digest(path), how)
        if key not in self._models:
            report = require_splittable(path)
            require_memory(path.name, loaded_bytes(report, tree["dtype"]), "the worker", self._drop_a_model)
            self._models[key] = self._load(tree, path)
            if is_unified(self._model_management.get_torch_device()):
                forget_pages(path)
        self._models.move_to_end(key)
        return self._models[key]

    def _load(self, tree: dict[str, Any], path: Path) -> Any:
        import comfy.sd

        options = dict(tree["options"])
        if not set(options) <= {"dtype", "weight_dtype", "fp8_optimizations"}:
            raise ProtocolError("a recipe holds unknown loader options")
        # The driver's own choice, which may have depended on its free memory.
        options["dtype"] = tree["dtype"]
        if tree["paths"].get(PLAIN_FP8, OWN) != OWN:
            options["fp8_optimizations"] = tree["paths"][PLAIN_FP8] == NATIVE
        if tree["loader"] == "load_diffusion_model":
            patcher = load_checked(path, lambda: comfy.sd.load_diffusion_model(str(path), model_options=options))
        elif tree["loader"] == "load_checkpoint_guess_config":
            only_model = {"output_vae": False, "output_clip": False, "output_clipvision": False}
            patcher = load_checked(
                path,
                lambda: comfy.sd.load_checkpoint_guess_config(str(path), **only_model, model_options=options)[0],
            )
        else:
            raise ProtocolError("a recipe names an unknown loader")
        follow(patcher.model, tree["paths"])
        if patcher.model.get_dtype() != tree["dtype"]:
            raise RuntimeError(
                f"{path.name} was loaded as {patcher.model.get_dtype()} here and as {tree['dtype']} on the driver; "
                "start both with the same ComfyUI options"
            )
        return patcher

    def _drop_a_model(self) -> bool:
        """Let go of the model that was not used for longest; False if none is left."""
        if not self._models:
            return False
        self._models.popitem(last=False)
        self._give_memory_back()
        return True

    def release(self, files: Collection[str]) -> int:
        unwanted = [key for key in self._models if key[0] in files]
        for key in unwanted:
            del self._models[key]
        if unwanted:
            self._give_memory_back()
        return len(unwanted)

    def _give_memory_back(self) -> None:
        # As they were loaded: outside of it ComfyUI makes other tensors of quantised weights that it moves, which
        # cannot be moved back within it.
        with torch.inference_mode():
            self._set_aside()
            self._model_management.unload_all_models()
        # Patchers and models refer to each other.
        gc.collect()
        self._model_management.soft_empty_cache()
        give_back_freed()

    def _set_aside(self) -> None:
        if self._loaded is not None:
            self._loaded.cleanup()
        self._loaded = None

    def use(self, patcher: Any, input_shape: list[int] | None = None) -> None:
        """Have `patcher` on its device, ready for a forward on inputs of this shape if that is known."""
        required = patcher.memory_required(input_shape) if input_shape else 0
        if self._loaded is patcher and required <= self._loaded_for:
            return
        if self._loaded is not patcher:
            self._set_aside()
        self._model_management.load_models_gpu([patcher], memory_required=required)
        patcher.pre_run()
        self._loaded, self._loaded_for = patcher, required

    def interrupt(self, on: bool) -> None:
        self._model_management.interrupt_current_processing(on)


class ComfyReplica:
    """A patched MODEL on this worker."""

    def __init__(self, runtime: ComfyRuntime, patcher: Any, patched: int) -> None:
        self.patched = patched
        self.device = patcher.load_device
        self.family = find_family(patcher.model.diffusion_model)
        self._runtime = runtime
        self._patcher = patcher

    def forward(self, args: list[Any], kwargs: dict[str, Any], through: Through = run_model) -> Any:
        """Output of `through(diffusion_model, args, kwargs)` on this worker's device."""
        first = args[0] if isinstance(args[0], torch.Tensor) else args[0][0]
        with torch.inference_mode():
            self._runtime.use(self._patcher, list(first.shape))
        options = dict(kwargs.get("transformer_options") or {})
        if not CODE_OPTIONS.isdisjoint(options):
            raise ProtocolError("transformer_options from the network hold code")
        if hasattr(self._patcher, "is_dynamic"):
            options["prefetch_dynamic_vbars"] = self._patcher.is_dynamic()
        placed = _to_device({**kwargs, "transformer_options": options}, self._patcher.load_device)
        with torch.inference_mode():
            return through(self._patcher.model.diffusion_model, _to_device(args, self._patcher.load_device), placed)


def _driver_version() -> str:
    """Version of the NVIDIA driver, where Linux tells it."""
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return ""


def _emulated_formats(model_management: Any, device: torch.device) -> list[str]:
    """Formats whose matrices ComfyUI multiplies dequantised on this device, as it decides when it loads a model."""
    emulated = []
    for supports, formats in (
        ("supports_fp8_compute", ["float8_e4m3fn", "float8_e5m2", PLAIN_FP8]),
        ("supports_nvfp4_compute", ["nvfp4"]),
        ("supports_mxfp8_compute", ["mxfp8"]),
    ):
        check = getattr(model_management, supports, None)
        if check is None or not check(device):
            emulated += formats
    return emulated


def _to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if type(value) in (list, tuple):
        return type(value)(_to_device(item, device) for item in value)
    if isinstance(value, dict):
        return {key: _to_device(item, device) for key, item in value.items()}
    return value


def _import_comfyui(comfyui: Path, arguments: list[str]) -> str:
    """Import ComfyUI as its main.py does, as far as models need it. Returns its version."""
    sys.path.insert(0, str(comfyui))
    accelerated = torch.cuda.is_available() or torch.backends.mps.is_available()
    cpu = [] if accelerated or "--cpu" in arguments else ["--cpu"]
    previous, sys.argv = sys.argv, ["main.py", *arguments, *cpu]
    try:
        import comfy.options

        comfy.options.enable_args_parsing()
        import comfy.cli_args
    finally:
        sys.argv = previous
    dynamic = _start_dynamic_memory(comfy.cli_args.args)
    import comfy.sd
    import utils.extra_config

    for config in _path_configs(comfyui, comfy.cli_args.args):
        utils.extra_config.load_extra_path_config(str(config))
    if dynamic:
        _use_dynamic_memory(comfy.cli_args.args)
    from comfyui_version import __version__ as version

    return version


def _path_configs(comfyui: Path, args: Any) -> list[Path]:
    own = comfyui / "extra_model_paths.yaml"
    named = [Path(path) for group in args.extra_model_paths_config or [] for path in group]
    return [*([own] if own.is_file() else []), *named]


def _start_dynamic_memory(args: Any) -> bool:
    """Load weights the way the driver's ComfyUI does: LoRA results differ between its two ways in the last bits."""
    try:
        import comfy_aimdo.control
        from comfy.cli_args import enables_dynamic_vram
    except ImportError:
        return False
    if not enables_dynamic_vram():
        return False
    reserve = getattr(args, "reserve_vram", None)
    headroom = {"simple_vram_headroom": None if reserve is None else int(reserve * 1024**3)}
    pressure = {"nvml_pressure": not getattr(args, "disable_nvml_pressure", False)}
    # Newer releases of comfy-aimdo take more.
    for settings in ({**headroom, **pressure}, headroom, {}):
        try:
            comfy_aimdo.control.init(**settings)
            return True
        except TypeError:
            continue
    return False


def _use_dynamic_memory(args: Any) -> None:
    import comfy.memory_management
    import comfy.model_management
    import comfy.model_patcher
    import comfy_aimdo.control

    if not getattr(args, "enable_dynamic_vram", False) and not _dynamic_memory_supported(comfy.model_management):
        return
    devices = comfy.model_management.get_all_torch_devices()
    headroom = int(getattr(args, "vram_headroom", 0.0) * 1024**3)
    try:
        started = comfy_aimdo.control.init_devices((device.index, headroom) for device in devices)
    except TypeError:
        started = comfy_aimdo.control.init_devices(device.index for device in devices)
    if started:
        comfy.model_patcher.CoreModelPatcher = comfy.model_patcher.ModelPatcherDynamic
        comfy.memory_management.aimdo_enabled = True
    else:
        logging.warning("comfy-aimdo does not work here; models are loaded whole")


def _dynamic_memory_supported(model_management: Any) -> bool:
    """The conditions of ComfyUI's main.py."""
    if model_management.torch_version_numeric < (2, 8):
        return False
    if model_management.is_nvidia():
        return True
    rocm: Any = getattr(model_management, "rocm_version", (0, 0))
    return bool(model_management.is_amd()) and rocm >= (7, 14)
