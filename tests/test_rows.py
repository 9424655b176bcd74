"""The row split cuts whatever has the batch dimension, and joining gives what one forward would have given."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from monarch_split.distributed.rows import Call, cut, join, row_count


def forward(x: Any, timestep: Any, context: Any = None, control: Any = None, transformer_options: Any = None) -> Any:
    """Depends on every argument, row by row."""
    first = x if isinstance(x, torch.Tensor) else x[0]
    out = first * timestep[:, None] + context.sum(1, keepdim=True)
    for residual in (control or {}).get("output", []):
        if residual is not None:
            out = out + residual
    kinds = transformer_options["cond_or_uncond"]
    per_row = [kind for kind in kinds for _ in range(first.shape[0] // len(kinds))]
    out = out + torch.tensor(per_row)[:, None]
    return out if isinstance(x, torch.Tensor) else [out, x[1] * 2]


def call(rows: int, kinds: list[int], *, several: bool = False) -> Call:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 4, generator=generator)
    kwargs = {
        "context": torch.randn(rows, 3, generator=generator),
        "control": {"output": [torch.randn(rows, 4, generator=generator), None], "middle": []},
        "transformer_options": {"cond_or_uncond": kinds, "uuids": list("abcdefgh"[: len(kinds)]), "block": ("x", 1)},
    }
    return Call(([x, torch.randn(rows, 7, generator=generator)] if several else x, torch.arange(float(rows))), kwargs)


@pytest.mark.parametrize(
    ("rows", "kinds"), [(1, [0]), (2, [1, 0]), (3, [0]), (4, [0, 1]), (5, [0]), (6, [0, 1, 1]), (3, [1, 0, 0])]
)
@pytest.mark.parametrize("several", [False, True], ids=["latent", "latents"])
def test_any_cut_joins_to_the_whole(rows: int, kinds: list[int], several: bool) -> None:
    whole = call(rows, kinds, several=several)
    expected = forward(*whole.args, **whole.kwargs)
    for boundary in range(rows + 1):
        spans = [span for span in ((0, boundary), (boundary, rows)) if span[0] < span[1]]
        parts = []
        for start, stop in spans:
            part = cut(whole, start, stop)
            assert part.rows == stop - start
            parts.append(forward(*part.args, **part.kwargs))
        joined = join(parts)
        assert type(joined) is type(expected)
        for got, want in zip(joined, expected, strict=True):
            assert torch.equal(got, want)


def test_what_does_not_have_the_batch_dimension_goes_whole() -> None:
    other = torch.zeros(7, 3)
    guidance = torch.tensor(3.5)
    whole = Call(
        (torch.zeros(2, 4), torch.zeros(1)), {"y": other, "guidance": guidance, "n": 5, "name": "x", "z": None}
    )
    part = cut(whole, 1, 2)
    assert part.args[1] is whole.args[1]
    assert part.kwargs["y"] is other
    assert part.kwargs["guidance"] is guidance
    assert (part.kwargs["n"], part.kwargs["name"], part.kwargs["z"]) == (5, "x", None)


def test_tensors_in_lists_tuples_and_dicts_are_cut() -> None:
    tensor = torch.arange(6).reshape(3, 2)
    extra = {"list": [tensor, None], "tuple": (tensor, [tensor]), "dict": {"a": {"b": tensor}, 1: tensor}}
    part = cut(Call((torch.zeros(3, 1),), extra), 1, 3).kwargs
    found = [part["list"][0], part["tuple"][0], part["tuple"][1][0], part["dict"]["a"]["b"], part["dict"][1]]
    assert all(torch.equal(item, tensor[1:3]) for item in found)
    assert type(part["tuple"]) is tuple
    assert part["list"][1] is None


def test_control_residuals_of_one_row_are_broadcast_not_cut() -> None:
    shared = torch.zeros(1, 4)
    part = cut(Call((torch.zeros(2, 4),), {"control": {"output": [shared]}}), 0, 1)
    assert part.kwargs["control"]["output"][0] is shared


@pytest.mark.parametrize(
    ("rows", "kinds", "start", "stop", "expected"),
    [
        (4, [1, 0], 1, 3, [1, 0]),
        (4, [1, 0], 2, 4, [0, 0]),
        (3, [1, 0, 2], 1, 3, [0, 2]),
        (6, [0], 2, 5, [0, 0, 0]),
        (3, [1, 0], 0, 2, [1, 0]),
        (2, [], 0, 1, []),
    ],
)
def test_conditionings_follow_their_rows(
    rows: int, kinds: list[int], start: int, stop: int, expected: list[int]
) -> None:
    options = {"cond_or_uncond": kinds}
    part = cut(Call((torch.zeros(rows, 1),), {"transformer_options": options}), start, stop)
    assert part.kwargs["transformer_options"]["cond_or_uncond"] == expected
    assert options == {"cond_or_uncond": kinds}


@pytest.mark.parametrize("span", [(0, 2), (0, 1)], ids=["whole", "cut"])
def test_a_forward_that_writes_into_its_options_does_not_reach_the_callers(span: tuple[int, int]) -> None:
    options: dict[str, Any] = {"cond_or_uncond": [0, 1]}
    part = cut(Call((torch.zeros(2, 1),), {"transformer_options": options}), *span)
    part.kwargs["transformer_options"]["block"] = 3
    assert "block" not in options


def test_options_that_are_missing_or_none_are_left_so() -> None:
    assert cut(Call((torch.zeros(2, 1),), {}), 0, 1).kwargs == {}
    assert cut(Call((torch.zeros(2, 1),), {"transformer_options": None}), 0, 1).kwargs == {"transformer_options": None}


def test_parts_are_views_not_copies() -> None:
    x = torch.zeros(4, 1000)
    assert cut(Call((x,), {}), 2, 4).args[0].data_ptr() == x[2:].data_ptr()


def test_rows_of_a_latent_and_of_latents_sampled_together() -> None:
    assert row_count(torch.zeros(3, 4, 5)) == 3
    assert row_count([torch.zeros(2, 4), torch.zeros(2, 9)]) == 2


def test_outputs_that_do_not_match_are_not_joined() -> None:
    with pytest.raises(ValueError, match="argument 2"):
        join([[torch.zeros(1), torch.zeros(1)], [torch.zeros(1)]])
