"""Monarch Sampler: KSampler, split over the machines of the cluster."""

from __future__ import annotations

import importlib
from typing import Any

from comfy_api.latest import io

from .notify import Notifier
from .split import split_input


class MonarchSampler(io.ComfyNode):
    """KSampler's inputs in KSampler's order, then how to split."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        import comfy.samplers

        return io.Schema(
            node_id="MonarchSampler",
            display_name="Monarch Sampler",
            category="monarch",
            description="KSampler that splits each step between this machine and your workers. The picture is the "
            "same. Whatever cannot be split runs on this machine, and the node says why.",
            inputs=[
                io.Model.Input("model", tooltip="The model used for denoising, from any loader, with any LoRA."),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=0xFFFFFFFFFFFFFFFF,
                    control_after_generate=True,
                    tooltip="The random seed used for creating the noise. All randomness stays on this machine.",
                ),
                io.Int.Input("steps", default=20, min=1, max=10000, tooltip="The number of denoising steps."),
                io.Float.Input(
                    "cfg",
                    default=8.0,
                    min=0.0,
                    max=100.0,
                    step=0.1,
                    round=0.01,
                    tooltip="Classifier-free guidance. Above 1 each step has two rows, which two machines share.",
                ),
                io.Combo.Input(
                    "sampler_name", options=comfy.samplers.KSampler.SAMPLERS, tooltip="The sampling algorithm."
                ),
                io.Combo.Input(
                    "scheduler",
                    options=comfy.samplers.KSampler.SCHEDULERS,
                    tooltip="How noise is removed over the steps.",
                ),
                io.Conditioning.Input("positive", tooltip="What you want to see in the image."),
                io.Conditioning.Input("negative", tooltip="What you do not want to see in the image."),
                io.Latent.Input("latent_image", tooltip="The latent to denoise. Each image of a batch is one row."),
                io.Float.Input(
                    "denoise",
                    default=1.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="How much is denoised; lower values keep the structure of the latent.",
                ),
                split_input(),
            ],
            outputs=[io.Latent.Output(tooltip="The denoised latent.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls,
        model: Any,
        seed: int,
        steps: int,
        cfg: float,
        sampler_name: str,
        scheduler: str,
        positive: Any,
        negative: Any,
        latent_image: Any,
        denoise: float,
        split: str,
    ) -> io.NodeOutput:
        from .attach import attach

        # ComfyUI's own module of this name, not the package this file is in.
        common_ksampler = importlib.import_module("nodes").common_ksampler
        notifier = Notifier(cls.hidden.unique_id)
        split_model = attach(model, split, notifier)
        (latent,) = common_ksampler(
            split_model, seed, steps, cfg, sampler_name, scheduler, positive, negative, latent_image, denoise=denoise
        )
        return io.NodeOutput(latent, ui={"monarch": [report.as_dict() for report in notifier.reports]})
