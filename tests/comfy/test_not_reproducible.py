"""What a worker cannot reproduce is rendered on the driver, equal to stock, and the reason names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("plain_convolutions")]


def attention_patch(q: Any, k: Any, v: Any, options: Any) -> tuple[Any, Any, Any]:
    return q * 1.1, k, v


def replace_block(args: Any, extra: Any) -> Any:
    out = extra["original_block"](args)
    return {**out, "img": out["img"] * 1.05}


def diffusion_wrapper(executor: Any, *args: Any, **kwargs: Any) -> Any:
    return executor(*args, **kwargs) * 1.05


def override(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs) * 1.02


def by_attention_patch(model: Any) -> Any:
    model = model.clone()
    model.set_model_attn1_patch(attention_patch)
    return model


def by_block_replacement(model: Any) -> Any:
    model = model.clone()
    model.set_model_patch_replace(replace_block, "dit", "double_block", 0)
    return model


def by_wrapper(model: Any) -> Any:
    model = model.clone()
    model.add_wrapper_with_key("diffusion_model", "another_pack", diffusion_wrapper)
    return model


def by_override(model: Any) -> Any:
    model = model.clone()
    model.model_options["transformer_options"]["optimized_attention_override"] = override
    return model


def by_replaced_forward(model: Any) -> Any:
    diffusion_model = model.model.diffusion_model
    forward = type(diffusion_model).forward.__get__(diffusion_model)
    model = model.clone()
    model.add_object_patch("diffusion_model.forward", lambda *args, **kwargs: forward(*args, **kwargs) * 1.05)
    return model


def by_weight_wrapper(model: Any) -> Any:
    model = model.clone()
    model.add_weight_wrapper("diffusion_model.img_in.weight", lambda weight, *args, **kwargs: weight * 1.05)
    return model


def by_easy_cache(model: Any) -> Any:
    from comfy_extras.nodes_easycache import EasyCacheNode

    return EasyCacheNode.execute(model, 0.2, 0.15, 0.95, False).result[0]


CASES: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "attention patch": (by_attention_patch, "sd15", "attention_patch"),
    "replaced block": (by_block_replacement, "flux_schnell", "replace_block"),
    "model wrapper": (by_wrapper, "flux_schnell", "another_pack"),
    "attention override": (by_override, "flux_schnell", "override"),
    "replaced forward": (by_replaced_forward, "flux_schnell", "diffusion_model.forward"),
    "EasyCache": (by_easy_cache, "flux_schnell", "easycache"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("order", ["before the split", "after the split"])
def test_runs_here_and_names_the_cause(driver: Any, tiny: Callable[..., Any], case: str, order: str) -> None:
    import torch

    change, family, named = CASES[case]
    it = tiny(family)
    expected = it.sample(change(it.model), cfg=4.0, steps=4)
    split = driver.split(change(it.model)) if order == "before the split" else change(driver.split(it.model))
    latent = it.sample(split, cfg=4.0, steps=4)
    assert torch.equal(latent, expected)
    assert driver.report.forwards_split == 0
    assert named in driver.report.line()
    assert not torch.equal(expected, it.sample(cfg=4.0, steps=4)) or case == "EasyCache"


def test_a_change_of_an_earlier_render_does_not_linger(driver: Any, tiny: Callable[..., Any]) -> None:
    it = tiny("flux_schnell")
    it.sample(by_replaced_forward(it.model), cfg=4.0)
    latent = it.sample(driver.split(it.model), cfg=4.0)
    driver.assert_split()
    assert (latent - it.sample(cfg=4.0)).abs().max() <= 1e-5


def test_a_forward_replaced_outside_of_comfyui_runs_here(driver: Any, tiny: Callable[..., Any]) -> None:
    import torch

    it = tiny("flux_schnell")
    diffusion_model = it.model.model.diffusion_model
    forward = diffusion_model.forward
    diffusion_model.forward = lambda *args, **kwargs: forward(*args, **kwargs) * 1.05
    expected = it.sample(cfg=4.0)
    assert torch.equal(it.sample(driver.split(it.model), cfg=4.0), expected)
    assert "replaced the model's forward" in driver.report.line()


def test_a_block_replaced_or_hooked_outside_of_comfyui_runs_here(driver: Any, tiny: Callable[..., Any]) -> None:
    import torch

    it = tiny("flux_schnell")
    block = it.model.model.diffusion_model.double_blocks[0]
    forward = block.forward
    block.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    expected = it.sample(cfg=4.0)
    assert torch.equal(it.sample(driver.split(it.model), cfg=4.0), expected)
    assert "another pack changed double_blocks.0" in driver.report.line()
    del block.forward
    hook = block.register_forward_hook(lambda module, args, output: output)
    it.sample(driver.split(it.model), cfg=4.0)
    assert driver.report.forwards_split == 0
    hook.remove()
    it.sample(driver.split(it.model), cfg=4.0)
    driver.assert_split()


def test_a_compiled_model_runs_here(driver: Any, tiny: Callable[..., Any]) -> None:
    import torch

    it = tiny("flux_schnell")
    compiled = it.model.clone()

    def swap(executor: Any, *args: Any, **kwargs: Any) -> Any:
        model = executor.class_obj
        original = model.diffusion_model
        model.diffusion_model = torch.nn.ModuleList([original])[0].__class__.__new__(original.__class__)
        model.diffusion_model.__dict__.update(original.__dict__)
        try:
            return executor(*args, **kwargs)
        finally:
            model.diffusion_model = original

    compiled.add_wrapper_with_key("apply_model", "torch.compile", swap)
    expected = it.sample(compiled, cfg=4.0)
    latent = it.sample(driver.split(compiled), cfg=4.0)
    assert torch.equal(latent, expected)
    assert "compiled" in driver.report.line()


def test_a_model_of_an_unknown_loader_runs_here(driver: Any, tiny: Callable[..., Any]) -> None:
    import torch

    it = tiny("flux_schnell")
    it.model.cached_patcher_init = None
    expected = it.sample(cfg=4.0)
    assert torch.equal(it.sample(driver.split(it.model), cfg=4.0), expected)
    assert "Monarch Model Loader" in driver.report.line()


def test_lora_hooks_in_the_prompt_run_here(driver: Any, tiny: Callable[..., Any], comfy: Any, tmp_path: Any) -> None:
    import comfy.hooks
    import torch

    from monarch_split.demo.tiny_loras import write_lora

    it = tiny("flux_schnell")
    weights = comfy.utils.load_torch_file(str(write_lora("flux_schnell", tmp_path)))
    hooks = comfy.hooks.create_hook_lora(lora=weights, strength_model=1.0, strength_clip=0.0)
    positive = comfy.hooks.set_hooks_for_conditioning(it.positive, hooks)
    expected = it.sample(cfg=4.0, steps=3, positive=positive)
    latent = it.sample(driver.split(it.model), cfg=4.0, steps=3, positive=positive)
    assert torch.equal(latent, expected)
    assert "LoRA hooks" in driver.report.line()
    assert not torch.equal(expected, it.sample(cfg=4.0, steps=3))


def test_a_gguf_model_is_refused_before_anything_is_sent(driver: Any, tiny: Callable[..., Any]) -> None:
    it = tiny("flux_schnell")

    class GGUFModelPatcher(type(it.model)):
        """What ComfyUI-GGUF calls its models."""

    it.model.__class__ = GGUFModelPatcher
    with pytest.raises(ValueError, match="GGUF") as refusal:
        driver.split(it.model)
    for format_name in ("BF16", "FP8", "NVFP4", "INT8"):
        assert format_name in str(refusal.value)
    driver.split(it.model, "off")


def test_the_model_is_left_as_it_was(driver: Any, tiny: Callable[..., Any]) -> None:
    it = tiny("flux_schnell")
    options_before = repr(it.model.model_options)
    it.sample(driver.split(it.model), cfg=4.0)
    assert "forward" not in vars(it.model.model.diffusion_model)
    assert repr(it.model.model_options) == options_before
    assert not it.model.wrappers
