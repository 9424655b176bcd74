"""What the demo found out: one picture rendered on one process and on all of them, and whether that went well.

Plain data from run_comfyui or run_reference to the command line, which prints it. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

# On one CPU thread both ways compute nearly the same; this leaves room for another batch size in a matrix product.
ALLOWED_DIFFERENCE = 1e-4

STEPS = 8
CFG = 4.0  # two rows for each step, so that there is something to split
# A new worker is proved with one forward, and the next is split. No more: "auto" is to try that out where it is seen.
WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Comparison:
    """seconds_one, seconds_all: from the start of a render to its last step, with the model loaded already.

    split: how steps were split ("rows", "tokens", "conditionings"), "off" if that was asked for, "none" if no step was.
    max_abs_diff: between the two latents. note: the engine's own line about the split render.
    """

    runtime: str
    nodes: int
    split: str
    steps: int
    steps_split: int
    pixels: int
    seconds_one: float
    seconds_all: float
    max_abs_diff: float
    image: Path
    note: str = ""

    @property
    def speedup(self) -> float:
        return self.seconds_one / self.seconds_all

    def problem(self) -> str | None:
        """A sentence about what went wrong, or None."""
        # Written so that a NaN is a difference too.
        if not self.max_abs_diff <= ALLOWED_DIFFERENCE:
            return (
                f"The two pictures differ: their latents by up to {self.max_abs_diff:.3g}, and {ALLOWED_DIFFERENCE:g} "
                "is allowed. This is a fault in Monarch; please report it with the output of 'monarch demo --json'."
            )
        if self.split != "off" and not self.steps_split:
            return f"No step was split. {self.note}"
        return None

    def as_dict(self) -> dict[str, Any]:
        return {
            "runtime": self.runtime,
            "nodes": self.nodes,
            "split": self.split,
            "steps": self.steps,
            "steps_split": self.steps_split,
            "seconds": {"one": round(self.seconds_one, 3), "all": round(self.seconds_all, 3)},
            "speedup": round(self.speedup, 3),
            "max_abs_diff": self.max_abs_diff,
            "image": str(self.image),
        }


def steps_split(report: dict[str, Any], steps: int) -> int:
    """How many of `steps` were split, from a run's report: conditionings may have forwards of their own."""
    return report["forwards_split"] * steps // report["forwards"] if report["forwards"] else 0
