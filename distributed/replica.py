"""MODEL -> recipe, or the reasons why it cannot be rebuilt elsewhere; recipe -> the weight patches of a replica.

The one place that knows how ComfyUI keeps loaders, files, dtypes and weight patches in a ModelPatcher.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from .codec import Kept, NotPlainData, pack_plain
from .compute_path import compute_paths
from .files import FileRef, file_digest
from .options import NotReproducible, code_in_the_forward, owner
from .recipe import Recipe, tensor_digest

# Where our loader notes how it loaded a MODEL, for a ComfyUI that does not do so itself (before 0.15).
LOADED_WITH = "monarch_loaded_with"
# Loaders of ComfyUI that a worker can call, and the model folders they read from.
_LOADERS = {"load_diffusion_model": ("diffusion_models",), "load_checkpoint_guess_config": ("checkpoints",)}
_LOADER_OPTIONS = ("dtype", "weight_dtype", "fp8_optimizations")
# Where a model is kept is each machine's own business.
_OWN_OPTIONS = ("load_device", "offload_device")
# Callbacks that leave the forward as it is.
_HARMLESS_CALLBACKS = ("on_clone", "on_cleanup", "on_detach_after", "on_deepclone_multigpu", "on_match_multigpu_clones")
# Diffusion models that mix the rows of a batch: their halves, slots or frames.
_COUPLED_ROWS = ("NaDiT", "Trellis2")
_PATCH_KINDS = ("diff", "set", "model_as_lora")
_NO_EFFECT = (
    "a LoRA has no effect: none of its keys matches a weight of this diffusion model (ComfyUI's log lists them)"
)


def describe(patcher: Any) -> Recipe:
    """The recipe of a MODEL (comfy ModelPatcher). Raises NotReproducible with every reason against it."""
    reasons = list(_foreign_code(patcher))
    loader, path, options = "", None, {}
    try:
        loader, path, options = _loaded_with(patcher)
    except NotReproducible as error:
        reasons += error.reasons
    patches, tensors = _patches(patcher, reasons)
    if reasons or path is None:
        raise NotReproducible(reasons)
    tree = {
        "loader": loader,
        "options": options,
        "dtype": patcher.model.get_dtype(),
        "compute_dtype": patcher.get_model_object("manual_cast_dtype"),
        "force_cast": bool(getattr(patcher, "force_cast_weights", False)),
        "patches": patches,
        "paths": compute_paths(patcher.model),
    }
    notes = (_NO_EFFECT,) if _patched_in_vain(patcher) else ()
    return Recipe(tree, _file_ref(path, _LOADERS[loader]), path, tensors, notes)


def _foreign_code(patcher: Any) -> Iterable[str]:
    """Everything attached to a MODEL that changes what its forward computes and cannot travel."""
    # Wrappers of the MODEL are in transformer_options by the time a run begins, too; nodes ask before that.
    options = patcher.model_options.get("transformer_options", {})
    yield from code_in_the_forward({**options, "wrappers": patcher.wrappers})
    for key in patcher.object_patches:
        if key.split(".")[0] == "diffusion_model":
            yield f"a node replaced {key} of the model"
    for name in patcher.weight_wrapper_patches:
        yield f"a node wrapped the weight {name}"
    for key in patcher.injections:
        yield f"a node injects code into the model: {key}"
    if patcher.hook_patches:
        yield "the prompt carries LoRA hooks"
    for kind, by_key in patcher.callbacks.items():
        if kind not in _HARMLESS_CALLBACKS:
            for functions in by_key.values():
                yield from (f"a node acts on the model before it runs: {owner(function)}" for function in functions)
    for key in patcher.wrappers.get("apply_model", {}):
        if key == "torch.compile":
            yield "the model is compiled (TorchCompileModel)"
    diffusion_model = patcher.model.diffusion_model
    family = type(diffusion_model).__name__
    if family in _COUPLED_ROWS or patcher.model.model_config.unet_config.get("use_temporal_attention"):
        yield f"the rows of {family} depend on one another, so they cannot be computed apart"
    for name, module in diffusion_model.named_modules():
        if (name and forward_replaced(module)) or module._forward_hooks or module._forward_pre_hooks:
            yield f"another pack changed {name or family} inside the model"
            break
    if hasattr(diffusion_model, "_orig_mod") or getattr(diffusion_model, "_compiled_call_impl", None) is not None:
        yield "the model is compiled"
    if getattr(patcher, "additional_models", {}).get("multigpu"):
        yield "the model is already split over this machine's GPUs (MultiGPU CFG Split)"


def forward_replaced(module: Any) -> bool:
    """Whether somebody put another method on this module than its class has (ComfyUI may put the same one back)."""
    methods = [(value, getattr(type(module), name, None)) for name, value in vars(module).items() if callable(value)]
    return any(own is not None and getattr(value, "__func__", None) is not own for value, own in methods)


def _loaded_with(patcher: Any) -> tuple[str, Path, dict[str, Any]]:
    note = getattr(patcher, "cached_patcher_init", None) or patcher.get_attachment(LOADED_WITH)
    if note is None:
        raise NotReproducible(
            [f"it is not known from which file {type(patcher).__name__} was loaded; use Monarch Model Loader"]
        )
    factory, arguments = note[0], note[1]
    loader = getattr(factory, "__name__", "")
    if loader not in _LOADERS or not str(getattr(factory, "__module__", "")).startswith(("comfy.", "monarch")):
        raise NotReproducible([f"the model comes from a loader that only exists here: {owner(factory)}"])
    path = Path(arguments[0])
    model_options = arguments[1] if loader == "load_diffusion_model" else arguments[6]
    options = {name: value for name, value in (model_options or {}).items() if name not in _OWN_OPTIONS}
    unknown = sorted(set(options) - set(_LOADER_OPTIONS))
    if unknown:
        raise NotReproducible([f"the model was loaded with options that only exist here: {', '.join(unknown)}"])
    if path.suffix.lower() not in (".safetensors", ".sft"):
        raise NotReproducible(
            [f"{path.name} is not a safetensors file; other files can contain code and are not sent to a worker"]
        )
    if not path.is_file():
        raise NotReproducible([f"{path} is gone"])
    if _file_seen_with(patcher.model, path) != _stamp(path):
        raise NotReproducible([f"{path.name} changed after it was loaded; load the model again to split it"])
    return loader, path, options


# What the file was like when its model was first seen: the weights in memory came from that one. Keyed by object.
_stamps: dict[int, tuple[weakref.ref[Any], tuple[int, ...]]] = {}


def _stamp(path: Path) -> tuple[int, ...]:
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _file_seen_with(model: Any, path: Path) -> tuple[int, ...]:
    key = id(model)
    known = _stamps.get(key)
    if known is None or known[0]() is not model:
        _stamps[key] = (weakref.ref(model, lambda _: _stamps.pop(key, None)), _stamp(path))
    return _stamps[key][1]


def loaded_file(patcher: Any) -> Path | None:
    """The file that a MODEL came from, if that is known and it is still there; whatever stands against a split."""
    note = getattr(patcher, "cached_patcher_init", None) or patcher.get_attachment(LOADED_WITH)
    with contextlib.suppress(OSError, LookupError, TypeError, ValueError):
        if getattr(note[0], "__name__", "") in _LOADERS:
            path = Path(note[1][0])
            return path if path.is_file() else None
    return None


def note_file(patcher: Any) -> None:
    """Remember what the file of a MODEL is like now; called when a node gets the MODEL, soon after it was loaded."""
    with contextlib.suppress(NotReproducible, OSError, LookupError, TypeError, ValueError):
        _loaded_with(patcher)


def _file_ref(path: Path, folders: tuple[str, ...]) -> FileRef:
    import folder_paths

    folder, name = None, path.name
    for candidate in folders:
        for root in folder_paths.get_folder_paths(candidate):
            if path.is_relative_to(root):
                folder, name = candidate, path.relative_to(root).as_posix()
    return FileRef(folder, name, path.stat().st_size, file_digest(path))


# --- weight patches ---------------------------------------------------------------------------------------------------


def _patches(patcher: Any, reasons: list[str]) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """[(key, [(strength, strength of the weight, offset, kind, content)])] with tensors by digest.

    Patches of keys outside the diffusion model never reach a worker: nothing there reads them.
    """
    tensors: dict[str, torch.Tensor] = {}
    described = []
    for key, entries in patcher.patches.items():
        if not key.startswith("diffusion_model."):
            continue
        packed = []
        for strength, value, strength_model, offset, function in entries:
            try:
                kind, content = _patch_content(value)
                if function is not None:
                    raise NotPlainData(key, function)
                packed.append([strength, strength_model, offset, kind, _name_tensors(content, tensors)])
            except NotPlainData as error:
                merged = isinstance(error.value, list)
                what = "the model was merged from others" if merged else f"a patch holds {owner(error.value)}"
                reasons.append(f"{what}, which cannot be sent")
        described.append([key, packed])
    return described, tensors


def _patched_in_vain(patcher: Any) -> bool:
    """Whether weight patches were added, to this MODEL or one that it was cloned from, that match no weight at all.

    ComfyUI then only logs the keys; what is left is a new patches_uuid over the same patches.
    """
    while (parent := getattr(patcher, "parent", None)) is not None:
        if patcher.patches_uuid != parent.patches_uuid and _other_changes(patcher) == _other_changes(parent):
            return True
        patcher = parent
    return False


def _other_changes(patcher: Any) -> Any:
    """What changes of a MODEL give it a new patches_uuid."""
    patches = {key: len(entries) for key, entries in patcher.patches.items()}
    wrappers = {key: len(functions) for key, functions in patcher.weight_wrapper_patches.items()}
    dtype = patcher.object_patches.get("manual_cast_dtype")
    return patches, wrappers, dtype, patcher.force_cast_weights, len(patcher.hook_patches)


def _patch_content(value: Any) -> tuple[str, Any]:
    from comfy import weight_adapter

    if isinstance(value, weight_adapter.WeightAdapterBase):
        if type(value) not in weight_adapter.adapters:
            raise NotPlainData(type(value).__name__, value)
        weights = value.weights if isinstance(value.weights, (list, tuple)) else [value.weights]
        return type(value).__name__, list(weights)
    if isinstance(value, list):
        raise NotPlainData("the result of a model merge", value)
    if isinstance(value, tuple) and len(value) == 1:
        return "diff", value
    if isinstance(value, tuple) and len(value) == 2 and value[0] in _PATCH_KINDS:
        return value[0], value[1]
    raise NotPlainData("patch", value)


def _name_tensors(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        pack_plain(value, "patch")
        digest = _digest_once(value)
        tensors[digest] = value
        return Kept(digest)
    if type(value) in (list, tuple):
        return type(value)(_name_tensors(item, tensors) for item in value)
    if isinstance(value, dict):
        return {key: _name_tensors(item, tensors) for key, item in value.items()}
    pack_plain(value, "patch")
    return value


# By object: a LoRA's tensors stay the same ones while its strength changes.
_digest_by_id: dict[int, tuple[weakref.ref[torch.Tensor], int, str]] = {}


def _digest_once(tensor: torch.Tensor) -> str:
    """Digest of a tensor's content, computed again only if it was written to."""
    known = _digest_by_id.get(id(tensor))
    version = 0 if tensor.is_inference() else tensor._version
    if known is not None and known[0]() is tensor and known[1] == version:
        return known[2]
    digest = tensor_digest(tensor)
    key = id(tensor)
    reference = weakref.ref(tensor, lambda _: _digest_by_id.pop(key, None))
    _digest_by_id[key] = (reference, version, digest)
    return digest


def add_weight_patches(patcher: Any, described: list[Any]) -> int:
    """Attach described patches, whose tensors are in place, to `patcher`. Returns how many keys took one.

    Raises ValueError if a key or a kind of patch does not exist here.
    """
    rounds: dict[tuple[int, float, float], dict[Any, Any]] = {}
    for key, entries in described:
        for position, (strength, strength_model, offset, kind, content) in enumerate(entries):
            target = key if offset is None else (key, tuple(offset))
            rounds.setdefault((position, strength, strength_model), {})[target] = _rebuild(kind, content)
    patched = set()
    for (_, strength, strength_model), patches in sorted(rounds.items(), key=lambda item: item[0][0]):
        added = patcher.add_patches(patches, strength, strength_model)
        if len(added) != len(patches):
            raise ValueError("a weight patch names a weight that this model does not have")
        patched.update(key if isinstance(key, str) else key[0] for key in added)
    return len(patched)


def _rebuild(kind: str, content: Any) -> Any:
    from comfy import weight_adapter

    if kind in _PATCH_KINDS:
        return (kind, tuple(content))
    adapters = {adapter.__name__: adapter for adapter in weight_adapter.adapters}
    if kind not in adapters:
        raise ValueError(f"this ComfyUI has no weight adapter {kind}")
    return adapters[kind](set(), tuple(content))
