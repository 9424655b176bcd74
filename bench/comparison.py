"""How much the results of runs differ from what one machine sampled; of all tensors, only those of one run are kept."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from safetensors.torch import load

from ..distributed.outputs import relative_difference

# (largest absolute difference, norm of the difference over the norm of what is expected); infinite for other shapes.
Difference = tuple[float, float]


class Comparison:
    """Compares what each run sampled with the first that one machine sampled."""

    def __init__(self) -> None:
        self._expected: list[torch.Tensor] | None = None

    def difference(self, mode: str, files: Iterable[bytes]) -> Difference | None:
        """Of the tensors in safetensors files; None as long as there is nothing to compare them with."""
        got = [tensor for file in files for _, tensor in sorted(load(file).items())]
        if self._expected is None and mode == "one" and got:
            self._expected = got
        return None if self._expected is None else _difference(got, self._expected)


def _difference(got: list[torch.Tensor], want: list[torch.Tensor]) -> Difference:
    if [tensor.shape for tensor in got] != [tensor.shape for tensor in want]:
        return float("inf"), float("inf")
    largest = max((float((a.double() - b.double()).abs().max()) for a, b in zip(got, want, strict=True)), default=0.0)
    return largest, relative_difference(got, want)
