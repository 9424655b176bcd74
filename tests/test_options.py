"""Of transformer_options only plain data that forwards read travels; code, and what may be state, is named."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from monarch_split.distributed.codec import pack_plain
from monarch_split.distributed.options import NotReproducible, code_in_the_forward, owner, plain_options


def my_patch(*_: Any) -> None:
    pass


class Caching:
    def __call__(self, *_: Any) -> None:
        pass

    def method(self) -> None:
        pass


def reasons(options: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(NotReproducible) as caught:
        plain_options(options)
    return caught.value.reasons


def test_what_stock_samplers_write_travels_unchanged() -> None:
    options = {
        "cond_or_uncond": [1, 0],
        "sigmas": torch.tensor([1.0]),
        "sample_sigmas": torch.linspace(1, 0, 5),
        "rope_options": {"scale_x": 1.0, "shift_y": 0.5},
        "total_steps": 20,
        "some_setting": ("name", [1, 2.5, None, True]),
    }
    assert plain_options(options) == options
    pack_plain(plain_options(options), "options")


def test_bookkeeping_of_the_driver_stays_there() -> None:
    outside = {"outer_sample": {None: [my_patch]}, "apply_model": {"key": [my_patch]}, "predict_noise": {}}
    options = {"wrappers": outside, "callbacks": {"x": {None: [my_patch]}}, "patches": {}, "patches_replace": {}}
    assert plain_options({**options, "uuids": [object()], "prefetch_dynamic_vbars": object()}) == {}
    assert plain_options({}) == {}


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"wrappers": {"diffusion_model": {"teacache": [my_patch]}}}, "teacache"),
        ({"wrappers": {"diffusion_model": {None: [my_patch]}}}, "my_patch"),
        ({"wrappers": {"a_kind_of_tomorrow": {None: [Caching()]}}}, "Caching"),
        ({"patches": {"attn1_patch": [my_patch]}}, "attn1_patch"),
        ({"patches": {"attn1_patch": [Caching().method]}}, "Caching.method"),
        ({"patches_replace": {"dit": {("double_block", 0): my_patch}}}, "dit"),
        ({"optimized_attention_override": my_patch}, "attention is overridden: my_patch"),
        ({"my_callback": my_patch}, "my_callback"),
        ({"my_object": Caching()}, "Caching"),
        ({"nested": {"deep": [(Caching(),)]}}, "Caching"),
        ({"a_set": {1, 2}}, "set"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_code_and_objects_are_named(options: dict[str, Any], word: str) -> None:
    (reason,) = reasons(options)
    assert word in reason
    assert len(reason) < 200


@pytest.mark.parametrize("value", [torch.zeros(3), {"step": 1}, [torch.zeros(2)], [{}]], ids=repr)
def test_what_may_be_state_of_a_forward_is_named(value: Any) -> None:
    (reason,) = reasons({"previous": value})
    assert "'previous'" in reason


def test_a_dict_that_holds_itself_is_named_and_does_not_end_the_render() -> None:
    options: dict[str, Any] = {}
    options["again"] = options
    (reason,) = reasons(options)
    assert "'again'" in reason


def test_every_reason_is_given_once() -> None:
    options = {
        "patches": {"attn1_patch": [my_patch, my_patch], "attn2_patch": [my_patch]},
        "optimized_attention_override": Caching(),
        "thing": Caching(),
    }
    found = reasons(options)
    assert len(found) == len(set(found)) == 4
    assert all(reason in str(NotReproducible(found)) for reason in found)


def test_empty_entries_stand_in_nobodys_way() -> None:
    empty = {"wrappers": {"diffusion_model": {"key": []}}, "patches": {"x": []}, "patches_replace": {"dit": {}}}
    assert code_in_the_forward(empty) == []
    assert code_in_the_forward({"wrappers": None, "patches": None, "patches_replace": None}) == []


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (my_patch, "my_patch"),
        (Caching, "Caching"),
        (Caching(), "Caching"),
        (Caching().method, "Caching.method"),
        (lambda: None, "<lambda>"),
        (functools.partial(my_patch), "partial"),
        (print, "print"),
        (3, "int"),
        (None, "NoneType"),
    ],
    ids=str,
)
def test_owner_names_any_object(code: object, name: str) -> None:
    assert owner(code).startswith(name)


def test_owner_names_the_custom_node_pack() -> None:
    def patch() -> None:
        pass

    patch.__module__ = "/home/user/ComfyUI/custom_nodes/ComfyUI_x_TeaCache"
    assert owner(patch).endswith("(ComfyUI.TeaCache)")
    assert owner(patch).startswith("test_owner_names_the_custom_node_pack")
