"""Cases of test_token_families for video models and for models that pack everything into one sequence.

Among the sizes are odd ones (which are padded), prime numbers of tokens, and so few tokens that a rank gets one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .token_ranks import Case


def _noise(*shape: int, seed: int = 5) -> Any:
    import torch

    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _rising(count: int) -> Any:
    """`count` numbers from 0.1 to 1, all different."""
    import torch

    return torch.linspace(0.1, 1.0, count)


def _mask_per_frame(latent: Any) -> Any:
    """A noise mask [1, 1, T, H, W] with a value of its own for every frame."""
    frames, height, width = latent.shape[2:]
    return _rising(frames).view(1, 1, frames, 1, 1).expand(1, 1, frames, height, width)


def _mask_per_cell(latent: Any) -> Any:
    """The same with a value for every cell."""
    frames, height, width = latent.shape[2:]
    return _rising(frames * height * width).view(1, 1, frames, height, width)


def _masks_of(video: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same for a latent with sound, whose moments have a value each as well."""

    def make(latent: Any) -> Any:
        from comfy.nested_tensor import NestedTensor

        picture, sound = latent.unbind()
        time = max(range(2, sound.ndim), key=lambda dim: dim == (2 if sound.shape[-1] == 16 else 3))
        moments = _rising(sound.shape[time]).view([-1 if dim == time else 1 for dim in range(sound.ndim)])
        return NestedTensor([video(picture), moments.expand(1, *sound.shape[1:])])

    return make


# --- Wan --------------------------------------------------------------------------------------------------------------


def _context_latents(options: dict[str, Any]) -> None:
    options["context_latents"] = [_noise(1, 16, 1, 6, 10), _noise(1, 16, 2, 4, 4, seed=6)]


def _more_frames(options: dict[str, Any]) -> None:
    options["time_dim_concat"] = _noise(1, 16, 1, 8, 8)


def _two_vace_contexts(options: dict[str, Any]) -> None:
    import torch

    options["vace_frames"] = [_noise(1, 32, 3, 8, 8), _noise(1, 32, 3, 8, 8, seed=6)]
    options["vace_mask"] = [torch.ones(1, 64, 3, 8, 8), torch.zeros(1, 64, 3, 8, 8)]
    options["vace_strength"] = [1.0, 0.6]


def _camera(options: dict[str, Any]) -> None:
    options["camera_conditions"] = _noise(1, 24, 3, 64, 64)


def _pose(options: dict[str, Any]) -> None:
    options["reference_latents"] = [_noise(1, 16, 1, 8, 8)]
    options["pose_video_latent"] = _noise(1, 16, 3, 4, 4)


def _pose_and_masks(options: dict[str, Any]) -> None:
    """SCAIL-2: 28 channels of mask for the reference and the video, and for the pose."""
    _pose(options)
    options["ref_mask_28ch"] = _noise(1, 4, 28, 8, 8, seed=6)
    options["driving_mask_28ch"] = _noise(1, 3, 28, 4, 4, seed=7)


_WAN = [
    Case("wan", "odd size", size=(1, 7, 13), tokens=1),
    Case("wan", "13 tokens, two latents", size=(1, 2, 26), tokens=2, batch=2),
    Case("wan", "2 tokens", size=(1, 2, 4)),
    Case("wan", "references", more=_context_latents, matters=("context_latents",)),
    Case("wan", "more frames", more=_more_frames, matters=("time_dim_concat",)),
    Case("wan_i2v", "image", size=(3, 5, 8), tokens=1, batch=2, matters=("clip_fea",)),
    Case("wan22_5b", "timestep per frame", size=(5, 6, 6), mask=_mask_per_frame, matters=("timestep",)),
    Case("wan22_5b", "as many tokens as frames", size=(7, 2, 2), mask=_mask_per_frame, matters=("timestep",)),
    Case("wan22_5b", "two latents", size=(2, 2, 14), batch=2, mask=_mask_per_frame, matters=("timestep",)),
    Case("wan_vace", "two contexts", more=_two_vace_contexts, instead={"vace_strength": [1.0, 0.0]}),
    Case("wan_vace", "prime length", size=(1, 2, 26), batch=2, tokens=1),
    Case("wan_camera", "path", more=_camera, matters=("camera_conditions", "clip_fea")),
    Case("wan_scail", "pose", more=_pose, matters=("pose_latents", "reference_latent")),
    Case(
        "wan_scail2",
        "pose and masks",
        more=_pose_and_masks,
        matters=("pose_latents", "ref_mask_latents", "sam_latents"),
    ),
    Case("wan_scail2", "13 tokens", size=(1, 2, 26), tokens=1),
]

# --- LTX --------------------------------------------------------------------------------------------------------------


def _guides(tracked: int, strength: float = 0.5) -> Callable[[dict[str, Any]], None]:
    """Options for two frames of 3 x 4 guide tokens at the end, of which so many have a strength of their own."""

    def add(options: dict[str, Any]) -> None:
        import torch

        generator = torch.Generator().manual_seed(3)
        options["keyframe_idxs"] = torch.randint(0, 64, (1, 3, 24, 2), generator=generator).float()
        pixels = torch.rand(1, 1, 1, 32, 32, generator=generator)
        entry = {"pre_filter_count": 24, "strength": strength, "pixel_mask": pixels, "latent_shape": (1, 1, tracked)}
        options["guide_attention_entries"] = [entry]

    return add


def _guide_noise_mask(latent: Any, dropped: int = 0) -> Any:
    """Two frames of guides at the end are given; a negative value drops a token."""
    mask = latent.new_ones(1, 1, *latent.shape[2:])
    mask[:, :, -2:] = 0.1
    mask[:, :, -1, 0, :dropped] = -1.0
    return mask


def _run_options(**options: Any) -> dict[str, Any]:
    """Fields of a Case with these transformer_options."""

    def change(_: Any, kwargs: dict[str, Any]) -> None:
        kwargs["transformer_options"].update(options)

    return {"change": change, "instead": {"transformer_options": {}}}


def _reference_sound(options: dict[str, Any]) -> None:
    options["ref_audio"] = {"tokens": _noise(1, 5, 128)}


_LTX = [
    Case("ltxv", "17 tokens, two latents", size=(1, 1, 17), tokens=2, batch=2),
    Case("ltxv", "padded prompt", conditioning={"masked": 4}, instead={"attention_mask": None}),
    Case("ltxv", "timestep per frame", size=(3, 3, 5), tokens=1, mask=_mask_per_frame, matters=("timestep",)),
    Case("ltxv", "timestep per token", size=(3, 3, 5), mask=_mask_per_cell, matters=("timestep",)),
    *(
        Case(
            family,
            f"guides, {name}",
            size=(5, 3, 4),
            mask=make(mask),
            more=_guides(tracked),
            matters=("keyframe_idxs", "guide_attention_entries"),
        )
        for family, make in (("ltxv", lambda mask: mask), ("ltxav", _masks_of))
        for name, tracked, mask in (
            ("all tracked", 24, _guide_noise_mask),
            ("some tracked", 2, _guide_noise_mask),
            ("some dropped", 12, lambda latent: _guide_noise_mask(latent, 3)),
        )
    ),
    Case("ltxav", "prime length, two latents", size=(1, 1, 17), audio=3, tokens=1, batch=2),
    Case("ltxav", "no sound", size=(2, 3, 5), audio=0, tokens=2),
    Case("ltxav", "one moment of sound", audio=1),
    Case("ltxav", "padded prompt", conditioning={"masked": 4}, matters=("attention_mask",)),
    Case("ltxav", "timestep per frame", size=(3, 3, 5), mask=_masks_of(_mask_per_frame), matters=("timestep",)),
    Case("ltxav", "timestep per token", size=(3, 3, 5), mask=_masks_of(_mask_per_cell), matters=("timestep",)),
    Case("ltxav", "reference sound", more=_reference_sound, matters=("ref_audio",)),
    Case("ltxav", "self-attention skipped in a block", **_run_options(stg_self_attn_blocks=(0,))),
    Case("ltxav", "sound not attended to", **_run_options(a2v_cross_attn=False)),
]

# --- the others -------------------------------------------------------------------------------------------------------


def _no_text(_: Any, kwargs: dict[str, Any]) -> None:
    del kwargs["context"]


def _kept_first_frame(options: dict[str, Any]) -> None:
    options["time_dim_replace"] = _noise(1, 16, 1, 6, 6)


def _edited_image(options: dict[str, Any]) -> None:
    options["concat_latent_image"] = _noise(1, 16, 8, 8)


def _minimax_conditions(options: dict[str, Any]) -> None:
    import torch

    options["minimax_token_tags"] = torch.tensor([[1, 1, 0, 0, 0, 1, 1, 1, 1]])
    options["minimax_keyframes"] = [
        {"resolved_frame_index": 0, "latent": _noise(1, 24, 1, 8, 8), "audio_latent": _noise(1, 32, 2, 3)}
    ]
    options["minimax_refs"] = [{"kind": "image", "latent_h": 4, "latent_w": 6, "latent": _noise(1, 24, 1, 4, 6)}]


_OTHERS = [
    Case("krea2", "odd size, one word", size=(1, 7, 9), tokens=1),
    Case("krea2", "two latents", size=(1, 2, 26), tokens=2, batch=2),
    *(
        Case(
            "krea2",
            f"references, {method}",
            batch=batch,
            conditioning={"references": [(1, 4, 6), (1, 5, 5)], "reference_method": method},
            matters=("ref_latents", "ref_latents_method"),
        )
        for method, batch in (("index", 2), ("index_timestep_zero", 1), ("index_timestep_zero", 2))
    ),
    Case("cosmos_predict2", "odd size, one word", size=(1, 7, 5), tokens=1),
    Case("cosmos_predict2", "13 tokens, two latents", size=(1, 2, 26), tokens=2, batch=2),
    Case("cosmos_predict2", "timestep per frame", size=(3, 4, 6), mask=_mask_per_frame, matters=("timestep",)),
    Case(
        "cosmos_predict2",
        "timesteps, two latents",
        size=(3, 2, 2),
        batch=2,
        mask=_mask_per_frame,
        matters=("timestep",),
    ),
    Case("kandinsky5", "one frame, one word", size=(1, 6, 10), tokens=1),
    Case("kandinsky5", "13 tokens, two latents", size=(1, 2, 26), tokens=2, batch=2),
    Case("kandinsky5", "kept first frame", size=(3, 6, 6), more=_kept_first_frame, matters=("time_dim_replace",)),
    Case("ideogram4", "17 tokens, one word", size=(1, 16), tokens=1),
    Case("ideogram4", "padded prompt, two latents", batch=2, conditioning={"masked": 4}, matters=("attention_mask",)),
    Case("ideogram4", "no prompt", size=(1, 13), change=_no_text),
    Case("minimax_h3", "odd size, one word", size=(1, 7, 5), audio=1, tokens=1),
    Case(
        "minimax_h3",
        "mask",
        size=(3, 6, 6),
        mask=_masks_of(_mask_per_cell),
        matters=("denoise_mask", "audio_denoise_mask"),
    ),
    Case("minimax_h3", "keyframe and reference", more=_minimax_conditions, matters=("minimax_payload",)),
    Case("hidream", "13 tokens, one word", size=(2, 26), tokens=1),
    Case("hidream", "odd size, two latents", size=(7, 9), tokens=2, batch=2),
    Case("hidream", "edited image", more=_edited_image, matters=("image_cond",)),
]

CASES = [*_WAN, *_LTX, *_OTHERS]
