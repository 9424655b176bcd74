"""Monarch Model Loader: ComfyUI's own diffusion model loader, with the file checked before anything is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from comfy_api.latest import io


class MonarchModelLoader(io.ComfyNode):
    """MODEL from a file in diffusion_models, loaded as Load Diffusion Model loads it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        import folder_paths

        return io.Schema(
            node_id="MonarchModelLoader",
            display_name="Monarch Model Loader",
            category="monarch",
            description="Loads a diffusion model that can be split over two machines. Files that cannot work are "
            "refused with the reason before anything is read. The stock loaders work with Monarch, too.",
            inputs=[
                io.Combo.Input(
                    "unet_name",
                    options=folder_paths.get_filename_list("diffusion_models"),
                    tooltip="A file in models/diffusion_models. A worker that has no copy is sent one.",
                ),
                io.Combo.Input(
                    "weight_dtype",
                    options=["default", "fp8_e4m3fn", "fp8_e4m3fn_fast", "fp8_e5m2"],
                    tooltip="As in Load Diffusion Model: the type that the weights are held in.",
                ),
            ],
            outputs=[io.Model.Output(tooltip="The model, for any node that takes one.")],
            hidden=[io.Hidden.prompt],
        )

    @classmethod
    def execute(cls, unet_name: str, weight_dtype: str) -> io.NodeOutput:
        import comfy.model_management
        import comfy.sd
        import folder_paths
        import torch

        from ..distributed.loading import load_checked
        from ..distributed.memory import forget_pages, is_unified, loaded_bytes, require_memory
        from ..distributed.replica import LOADED_WITH
        from ..formats import require_loadable
        from .early_loading import load_early

        path = folder_paths.get_full_path_or_raise("diffusion_models", unet_name)
        report = require_loadable(path)
        options: dict[str, Any] = {}
        if weight_dtype != "default":
            options["dtype"] = torch.float8_e5m2 if weight_dtype == "fp8_e5m2" else torch.float8_e4m3fn
        if weight_dtype == "fp8_e4m3fn_fast":
            options["fp8_optimizations"] = True
        unified = is_unified(comfy.model_management.get_torch_device())
        if unified:
            require_memory(Path(path).name, loaded_bytes(report), "this machine", _free_memory)
        # Not with ComfyUI's --disable-mmap, which holds the weights twice while it loads.
        model = load_checked(Path(path), lambda: comfy.sd.load_diffusion_model(path, model_options=options))
        if unified:
            forget_pages(Path(path))
        model.set_attachments(LOADED_WITH, (comfy.sd.load_diffusion_model, (path, options)))
        load_early(model, getattr(cls.hidden, "prompt", None))
        return io.NodeOutput(model)


def _free_memory() -> bool:
    """Give back what other models hold on the GPU; False if they hold nothing."""
    import comfy.model_management as model_management

    if not model_management.current_loaded_models:
        return False
    model_management.unload_all_models()
    model_management.soft_empty_cache()
    return True
