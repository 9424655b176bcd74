"""Every family of the table gives the stock forward's output with its tokens split, at any length, shares and ranks.

The cases have a row for everything that a family's row in distributed/families has to get right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_split.distributed.layout import NotSplittable
from monarch_split.distributed.outputs import relative_difference

from . import image_token_cases, video_token_cases
from .token_ranks import Case, Models, Ranks, capture, largest_difference

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("comfy")]

# Halves are left to what follows.
SHARES = ((0.37, 0.63), (0.1, 0.9), (0.3, 0.3, 0.4))

# Latents that leave at least four tokens of each stream to every rank at SHARES, with a prompt of 40.
LARGE = {
    **dict.fromkeys(("flux", "chroma", "qwen_image", "lumina2", "z_image", "sd3", "sd35_medium"), (23, 25)),
    **dict.fromkeys(("krea2", "hidream"), (23, 25)),
    **dict.fromkeys(("flux2", "ideogram4"), (11, 13)),
    **dict.fromkeys(("wan", "wan_i2v", "wan22_5b", "cosmos_predict2", "minimax_h3"), (3, 13, 15)),
    **dict.fromkeys(("hunyuan_video15", "ltxv", "ltxav"), (3, 7, 7)),
    **dict.fromkeys(("hunyuan_video", "kandinsky5"), (3, 14, 18)),  # their stock forwards want even sizes
}


@pytest.mark.parametrize("case", [*image_token_cases.CASES, *video_token_cases.CASES], ids=str)
def test_split_forward_equals_the_whole_one(case: Case, models: Models, ranks: dict[int, Ranks]) -> None:
    patcher, replicas = models(case.family)
    forward = capture(patcher, case)
    expected = forward()
    for name in case.matters:
        assert largest_difference(forward(without=name), expected) > 1e-3, f"{name} makes no difference"
    for name, value in case.instead.items():
        assert largest_difference(forward(instead={name: value}), expected) > 1e-3, f"{name} makes no difference"
    for shares in SHARES:
        group = ranks[len(shares)]
        before = group.sent_bytes()
        output = group.run(group.splits(forward.model), replicas, forward, shares)
        assert largest_difference(output, expected) <= 1e-5, shares
        if len(shares) == 2:
            # More than what the ranks agree on beforehand: each has keys and values that the other one lacks.
            assert all(now - then > 1000 for now, then in zip(group.sent_bytes(), before, strict=True))
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in replicas[0].modules())


@pytest.mark.parametrize("family", LARGE)
def test_split_forward_is_the_same_bit_by_bit(family: str, models: Models, ranks: dict[int, Ranks]) -> None:
    """Unless a rank has so few tokens (up to three) that the matrix product adds up in another order."""
    patcher, replicas = models(family)
    forward = capture(patcher, Case(family, "large", LARGE[family], tokens=40))
    expected = forward()
    for shares in ((0.5, 0.5), *SHARES):
        group = ranks[len(shares)]
        output = group.run(group.splits(forward.model), replicas, forward, shares)
        assert largest_difference(output, expected) == 0, shares


@pytest.mark.parametrize("family", LARGE)
def test_a_compressed_exchange_is_close_and_less(family: str, models: Models, ranks: dict[int, Ranks]) -> None:
    patcher, replicas = models(family)
    forward = capture(patcher, Case(family, "large", LARGE[family], tokens=40))
    sent = []
    for compress in (False, True):
        before = ranks[2].sent_bytes()
        splits = ranks[2].splits(forward.model)
        output = ranks[2].run(splits, replicas, forward, (0.5, 0.5), compress=compress)
        sent.append(sum(ranks[2].sent_bytes()) - sum(before))
    error = relative_difference(output, forward())
    # Measured: 1.5e-4 (MiniMax H3) to 1.8e-3 (Ideogram 4) of the output's norm, and 39 to 50 percent of the bytes.
    assert 1e-5 < error < 5e-3
    assert sent[1] < 0.55 * sent[0]


def test_a_split_serves_forwards_of_other_sizes(models: Models, ranks: dict[int, Ranks]) -> None:
    patcher, replicas = models("qwen_image")
    splits = ranks[2].splits(replicas[0])
    for size, tokens in (((7, 9), 9), ((2, 26), 1), ((16, 16), 30), ((7, 9), 9)):
        for shares in ((0.5, 0.5), (0.1, 0.9)):
            forward = capture(patcher, Case("qwen_image", "any", size, tokens=tokens))
            output = ranks[2].run(splits, replicas, forward, shares)
            assert largest_difference(output, forward()) <= 1e-5


@pytest.mark.parametrize(
    ("family", "attribute", "control", "reason"),
    [
        ("flux", None, {"middle": [1.0]}, "'middle'"),
        ("chroma", ("skip_dit", [2]), None, "skipped"),
        ("hunyuan_video", ("double_blocks.0.flipped_img_txt", True), None, "update ComfyUI"),
    ],
    ids=["unknown residuals", "skipped blocks", "streams in another order"],
)
def test_what_cannot_be_split_is_refused_on_every_rank(
    family: str,
    attribute: tuple[str, Any] | None,
    control: Any,
    reason: str,
    models: Models,
    ranks: dict[int, Ranks],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    patcher, replicas = models(family)
    forward = capture(patcher, Case(family, "plain"))
    forward.kwargs["control"] = control
    for replica, split in zip(replicas, ranks[2].splits(replicas[0]), strict=False):
        if attribute is not None:
            path, _, name = attribute[0].rpartition(".")
            monkeypatch.setattr(replica.get_submodule(path), name, attribute[1], raising=False)
        with pytest.raises(NotSplittable, match=reason):
            split.run(replica, replica, forward.args, forward.kwargs, (0.5, 0.5), 0)


@pytest.fixture(scope="module")
def models(comfy: Any, models_folder: Path) -> Models:
    return Models(models_folder)


@pytest.fixture(scope="module")
def ranks() -> Iterator[dict[int, Ranks]]:
    groups = {size: Ranks(size) for size in (2, 3)}
    yield groups
    for group in groups.values():
        group.close()


@pytest.fixture(scope="module", autouse=True)
def uninitialised_memory_is_nan(comfy: Any) -> Iterator[None]:
    """Tokens that no rank has sent show up in the output, and do not happen to be right from the forward before."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
