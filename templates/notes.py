"""The note of each template: which file goes where, how to start the worker, and what to expect of the split."""

from __future__ import annotations

from collections.abc import Sequence

from .files import ModelFile

_HOME = "https://github.com/monarch-split/monarch-split"

# What the two machines share out, by what the graph gives them to share.
PROMPTS = (
    "With CFG above 1 each step computes the positive and the negative prompt. **Each machine computes one of them.** "
    "Any network will do."
)
BATCH = (
    "At CFG 1 one image is one row. A **batch of two** gives each machine one image of every step. Any network will do."
)
TOKENS = (
    "At CFG 1 one {thing} is one row, so its **tokens** are shared out: each machine computes a part of it and swaps "
    "what attention needs with the other. That takes a fast cable. `auto` measures the link and stays on one machine "
    "where a split would not pay."
)

_WORKER = """### 2. Start the worker

On the second machine, with ComfyUI's Python and that machine's address:

```
python ComfyUI/custom_nodes/monarch-split worker --listen 192.168.1.20
```"""
_PAIR = (
    "Paste the code that it prints into the **Monarch** tab at the left, or give it to `./monarch pair`, once. More in "
    f"the [README]({_HOME}#start-the-worker). Without a worker this graph runs on one machine."
)

_FIRST = (
    "The first render takes longer: the worker loads the model, or receives it first, and one step is not split "
    "because both machines check that they compute the same."
)
_MEASURED = {
    True: f"What was measured with this model, and on what: [numbers]({_HOME}#try-it).",
    False: "This model has not been measured yet. Flux dev and Wan 2.1 have, on two GPUs of one machine: "
    f"[numbers]({_HOME}#try-it).",
}
_AFTERWARDS = (
    "**{node}** then shows how many steps were split, the seconds per step and the speed-up, or why it ran on one "
    "machine.\n\nTo compare, keep the seed (*control after generate*: `fixed`) and set `split` to `off`: the same "
    "result, on one machine."
)


def note(
    title: str,
    what: str,
    files: Sequence[ModelFile],
    *,
    more: str = "",
    node: bool = False,
    measured: bool = False,
    closing: str = "",
) -> str:
    """Markdown. what: what is split; more: a paragraph about this graph; node: the split is by Monarch Split.

    measured: whether benchmarks/results has this model. closing: in place of how to compare.
    """
    listed = "\n".join(f"- [{file.name}]({file.url}) in `models/{file.folder}`" for file in files)
    parts = [
        f"## {title}\n\n{what}",
        *([more] if more else []),
        f"### 1. Files on this machine\n\n{listed}",
        "The second machine needs none: it is sent the model that it lacks, once.",
        _WORKER,
        _PAIR,
        f"### 3. Run\n\n{_FIRST} {_MEASURED[measured]}",
        closing or _AFTERWARDS.format(node="Monarch Split" if node else "Monarch Sampler"),
    ]
    return "\n\n".join(parts) + "\n"
