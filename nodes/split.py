"""Monarch Split: MODEL to MODEL, for every sampler and guider that is not Monarch Sampler.

Nodes import the engine when they are run: ComfyUI has to describe them at its start, and starts no slower for it.
"""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from .notify import Notifier

SPLIT_MODES = ("auto", "rows", "off", "tokens")


def split_input() -> io.Combo.Input:
    """The widget that says how to split; new values go to its end, so that saved graphs keep theirs."""
    return io.Combo.Input(
        "split",
        options=list(SPLIT_MODES),
        default="auto",
        tooltip="auto: split as long as that is faster: conditionings and batch items between the machines, or the "
        "tokens of a single image or of a number that does not divide evenly. rows: always split conditionings and "
        "batch items. off: this machine alone. tokens: always split the tokens of every image or video, whatever the "
        "link.",
    )


class MonarchSplit(io.ComfyNode):
    """Has whatever samples this MODEL split its steps."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="MonarchSplit",
            display_name="Monarch Split",
            category="monarch",
            description="Splits the steps of any sampler or guider that this model is connected to between this "
            "machine and your workers. LoRA and sampling nodes can come before it or after it.",
            inputs=[
                io.Model.Input("model", tooltip="The model to split, from any loader, with any LoRA."),
                split_input(),
            ],
            outputs=[io.Model.Output(tooltip="The same model; sampling it is split.")],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt],
        )

    @classmethod
    def execute(cls, model: Any, split: str) -> io.NodeOutput:
        from .attach import attach
        from .early_loading import load_early

        split_model = attach(model, split, Notifier(cls.hidden.unique_id))
        load_early(split_model, getattr(cls.hidden, "prompt", None))
        return io.NodeOutput(split_model)
