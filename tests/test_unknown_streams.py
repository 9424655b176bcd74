"""A model whose blocks are called in another way than its family says is not split, rather than ending the render."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from monarch_split.distributed.families import Blocks, Family, Table
from monarch_split.distributed.layout import NotSplittable
from monarch_split.distributed.volume import measure

_A, _B = ("a",), ("b",)
_FAMILY = Family(
    blocks=(
        Blocks(
            "blocks",
            tokens={},
            tuples={"pair": (_A, _B)},
            tables={"table": Table(_A, 2)},
            returns=(_A, _B),
            attention={},
        ),
    ),
    result=("a",),
)


class _Block(nn.Module):
    def __init__(self, result: Callable[[Any], Any]) -> None:
        super().__init__()
        self._result = result

    def forward(self, pair: Any, table: torch.Tensor) -> Any:
        return self._result(pair)


class _Model(nn.Module):
    def __init__(self, result: Callable[[Any], Any] = lambda pair: pair) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Block(result)])

    def forward(self, pair: Any, table: torch.Tensor, **_: Any) -> torch.Tensor:
        return self.blocks[0](pair, table=table)[0]


_STREAM = torch.randn(1, 6, 4)
_TABLE = torch.randn(1, 1, 6)


def test_a_model_that_is_called_as_its_family_says_is_measured() -> None:
    model = _Model()
    output, volume = measure(_FAMILY, model, model, ((_STREAM, _STREAM), _TABLE), {})
    assert torch.equal(output, _STREAM)
    assert volume.operations == 1


@pytest.mark.parametrize(
    ("pair", "table", "result", "reason"),
    [
        ((_STREAM,) * 3, _TABLE, lambda pair: pair, "another order"),
        ((_STREAM,), _TABLE, lambda pair: pair, "another order"),
        (None, _TABLE, lambda pair: pair, "another order"),
        (_STREAM, _TABLE, lambda pair: pair, "another order"),
        ((_STREAM, None), _TABLE, lambda pair: pair, "another order"),
        ((_STREAM, _STREAM[0, 0]), _TABLE, lambda pair: pair, "another order"),
        ((_STREAM, _STREAM), _TABLE[0], lambda pair: pair, "one entry for each"),
        ((_STREAM, _STREAM), _TABLE[..., :4], lambda pair: pair, "one entry for each"),
        ((_STREAM, _STREAM), _TABLE, lambda pair: pair[:1], "another order"),
        ((_STREAM, _STREAM), _TABLE, lambda pair: pair[0], "another order"),
    ],
    ids=[
        "three",
        "one",
        "none",
        "no tuple",
        "no tensor",
        "flat",
        "flat table",
        "short table",
        "one back",
        "no tuple back",
    ],
)
def test_another_number_of_streams_or_dimensions_is_refused(
    pair: Any, table: torch.Tensor, result: Callable[[Any], Any], reason: str
) -> None:
    model = _Model(result)
    with pytest.raises(NotSplittable, match=reason):
        measure(_FAMILY, model, model, (pair, table), {})
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
