"""A small DiT in plain torch, called the way ComfyUI calls a diffusion model, with an Euler sampler and a picture.

It stands in for ComfyUI where there is none. Splitting its forward is the engine's job."""

from __future__ import annotations

import math
import time
import uuid
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .nodes import latent_to_rgb
from .png import write_png

PIXELS_PER_LATENT = 8
Forward = Callable[..., Tensor]


class ForwardStopped(Exception):
    """Raised between two blocks when transformer_options["should_stop"]() is true."""


@dataclass(frozen=True)
class ReferenceConfig:
    """Sizes and weight seed of a reference DiT: the same values always give the same weights."""

    width: int = 128
    depth: int = 2
    heads: int = 2
    context_width: int = 32
    channels: int = 16
    patch: int = 2
    mlp_ratio: int = 4
    weight_seed: int = 0

    def __post_init__(self) -> None:
        if min(self.width, self.depth, self.heads, self.context_width, self.channels, self.patch, self.mlp_ratio) < 1:
            raise ValueError(f"every size must be at least 1: {self}")
        if self.width % self.heads or self.width % 4:
            raise ValueError(f"width {self.width} must be a multiple of 4 and of the {self.heads} heads")

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, int]) -> ReferenceConfig:
        """The config of to_json's dict. Raises TypeError for unknown names, ValueError for impossible sizes."""
        return cls(**values)


TINY = ReferenceConfig()
# At 512 x 512 pixels one row of a forward takes some tenths of a second on one CPU thread.
DEMO = ReferenceConfig(width=384, depth=4, heads=6, context_width=64)


def attention(
    q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Tensor | None = None, transformer_options: dict | None = None
) -> Tensor:
    """Attention of q [B, Lq, H*D] to k, v [B, Lk, H*D] -> [B, Lq, H*D], through ComfyUI's override where one is set.

    `mask`: boolean, true = may be attended to, broadcastable to [B, H, Lq, Lk].
    """
    override = (transformer_options or {}).get("optimized_attention_override")
    if override is not None:
        return override(plain_attention, q, k, v, heads, mask=mask, transformer_options=transformer_options)
    return plain_attention(q, k, v, heads, mask=mask)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Tensor | None = None, **_: Any) -> Tensor:
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


def sinusoid(values: Tensor, width: int) -> Tensor:
    """Cosine and sine features [..., width] of `values` [...], base 10000 as in "Attention is all you need"."""
    half = width // 2
    frequencies = torch.exp(-math.log(10000.0) * torch.arange(half, device=values.device) / half)
    angles = values.float()[..., None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class SelfAttention(nn.Module):
    """Multi-head attention of tokens [B, tokens, width] to one another."""

    def __init__(self, config: ReferenceConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor, transformer_options: dict | None = None) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.proj(attention(q, k, v, self.heads, transformer_options=transformer_options))


class Block(nn.Module):
    """adaLN-modulated self-attention, cross-attention and MLP (Peebles and Xie, "Scalable Diffusion Models")."""

    def __init__(self, config: ReferenceConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation = nn.Linear(width, 6 * width)
        self.self_attention = SelfAttention(config)
        self.cross_q = nn.Linear(width, width)
        self.cross_kv = nn.Linear(config.context_width, 2 * width)
        self.cross_proj = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, config.mlp_ratio * width),
            nn.GELU(approximate="tanh"),
            nn.Linear(config.mlp_ratio * width, width),
        )

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        vector: Tensor,
        mask: Tensor | None = None,
        transformer_options: dict | None = None,
    ) -> Tensor:
        """x [B, tokens, width], context [B, L, D], vector [B, width], mask [B, 1, 1, L] -> [B, tokens, width]."""
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.modulation(vector)[:, None].chunk(6, dim=-1)
        x = x + gate * self.self_attention(self.norm(x) * (1 + scale) + shift, transformer_options)
        k, v = self.cross_kv(context).chunk(2, dim=-1)
        crossed = attention(self.cross_q(self.norm(x)), k, v, self.heads, mask, transformer_options)
        x = x + self.cross_proj(crossed)
        return x + mlp_gate * self.mlp(self.norm(x) * (1 + mlp_scale) + mlp_shift)


class ReferenceDiT(nn.Module):
    """Predicts the flow from data to noise. Float32 weights made from the config; nothing is read from disk."""

    def __init__(self, config: ReferenceConfig = TINY) -> None:
        super().__init__()
        self.config = config
        width, pixels = config.width, config.channels * config.patch**2
        self.patch_in = nn.Linear(pixels, width)
        self.time_in = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.vector_in = nn.Linear(config.context_width, width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.final_modulation = nn.Linear(width, 2 * width)
        self.final = nn.Linear(width, pixels)
        self._make_weights()
        self.eval().requires_grad_(False)

    def _make_weights(self) -> None:
        # A generator per name, so that a weight does not depend on the order in which modules are made.
        for name, parameter in self.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) ^ self.config.weight_seed)
            scale = 0.02 if parameter.ndim == 1 else 0.7 / math.sqrt(parameter.shape[1])
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * scale)

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor | None = None,
        control: dict | None = None,
        transformer_options: dict | None = None,
        y: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """x [B, C, H, W], timestep [B] in 0..1, context [B, L, D] -> flow [B, C, H, W].

        control["output"]: residuals [B, tokens, width] added after the blocks (None = none). y [B, D]: pooled context.
        attention_mask [B, L]: true = attend. H and W must be multiples of the patch size (ValueError).
        Raises ForwardStopped between blocks once transformer_options["should_stop"] says so.
        """
        config, should_stop = self.config, (transformer_options or {}).get("should_stop")
        height, width = x.shape[-2:]
        if context is None:
            raise ValueError("the reference DiT needs a context [B, L, D]")
        if height % config.patch or width % config.patch:
            raise ValueError(f"a latent of {height} x {width} does not divide into patches of {config.patch}")
        tokens = F.pixel_unshuffle(x, config.patch).flatten(2).transpose(1, 2)
        tokens = self.patch_in(tokens) + self._positions(height // config.patch, width // config.patch, x)
        vector = self.time_in(sinusoid(timestep * 1000, config.width).to(x.dtype))
        if y is not None:
            vector = vector + self.vector_in(y)
        mask = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
        residuals = (control or {}).get("output", [])
        for index, block in enumerate(self.blocks):
            if should_stop is not None and should_stop():
                raise ForwardStopped(f"stopped before block {index} of {config.depth}")
            tokens = block(tokens, context, vector, mask, transformer_options=transformer_options)
            if index < len(residuals) and residuals[index] is not None:
                tokens = tokens + residuals[index]
        shift, scale = self.final_modulation(vector)[:, None].chunk(2, dim=-1)
        tokens = self.final(F.layer_norm(tokens, (config.width,)) * (1 + scale) + shift)
        cells = tokens.transpose(1, 2).unflatten(2, (height // config.patch, width // config.patch))
        return F.pixel_shuffle(cells, config.patch)

    def _positions(self, rows: int, columns: int, like: Tensor) -> Tensor:
        """Absolute positions [1, rows * columns, width]: half of the features for the row, half for the column."""
        half = self.config.width // 2
        y = sinusoid(torch.arange(rows, device=like.device), half)[:, None].expand(rows, columns, half)
        x = sinusoid(torch.arange(columns, device=like.device), half)[None].expand(rows, columns, half)
        return torch.cat((y, x), dim=-1).flatten(0, 1)[None].to(like.dtype)


@torch.no_grad()
def sample(
    forward: Forward,
    config: ReferenceConfig,
    *,
    steps: int,
    cfg: float,
    seed: int,
    batch: int = 1,
    height: int = 128,
    width: int = 128,
    tokens: int = 16,
    on_step: Callable[[int, Tensor], None] | None = None,
) -> Tensor:
    """Render a latent [batch, C, height / 8, width / 8] (height, width in pixels) by Euler steps from sigma 1 to 0.

    One forward per step: rows are [negative, positive] as ComfyUI batches them, or only positive for cfg 1.
    on_step(step, latent) is called after each step, counted from 1; an exception from it ends the render.
    """
    cell = PIXELS_PER_LATENT * config.patch
    if height % cell or width % cell or steps < 1 or batch < 1:
        raise ValueError(f"{width} x {height} pixels must be multiples of {cell}; steps and batch at least 1")
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, config.channels, height // PIXELS_PER_LATENT, width // PIXELS_PER_LATENT)
    latent = torch.randn(shape, generator=generator)
    positive = torch.randn(1, tokens, config.context_width, generator=generator).repeat(batch, 1, 1)
    conditionings = [0] if cfg == 1.0 else [1, 0]
    context = positive if cfg == 1.0 else torch.cat((torch.zeros_like(positive), positive))
    sigmas = torch.linspace(1.0, 0.0, steps + 1)
    names = [uuid.uuid5(uuid.NAMESPACE_OID, f"{seed}/{index}") for index in conditionings]
    for step in range(steps):
        rows = torch.cat([latent] * len(conditionings))
        options = {
            "cond_or_uncond": conditionings,
            "uuids": names,
            "sigmas": sigmas[step : step + 1],
            "sample_sigmas": sigmas,
        }
        time = sigmas[step].repeat(rows.shape[0])
        flow = forward(rows, time, context=context, control=None, transformer_options=options)
        if cfg != 1.0:
            negative_flow, positive_flow = flow.chunk(2)
            flow = negative_flow + cfg * (positive_flow - negative_flow)
        latent = latent + (sigmas[step + 1] - sigmas[step]) * flow
        if on_step is not None:
            on_step(step + 1, latent)
    return latent


def save_picture(latent: Tensor, path: Path) -> Path:
    """Write the rows of a latent [B, C, H, W] as one PNG, pictures side by side, eight pixels per latent cell."""
    pictures = torch.cat(list(latent_to_rgb(latent, PIXELS_PER_LATENT)), dim=1)
    height, width, _ = pictures.shape
    return write_png(path, bytes((pictures * 255).round().to(torch.uint8).flatten().tolist()), width, height)


def slowed(model: ReferenceDiT, seconds: float) -> list[Any]:
    """Has each block take `seconds` longer for every token of every row that it is given; handles that undo it."""

    def sleep(_: Any, __: Any, output: torch.Tensor) -> None:
        time.sleep(seconds * output.shape[0] * output.shape[1])

    # Hooks that come later cut what goes into a block and put together what comes out of it.
    return [block.register_forward_hook(sleep) for block in model.blocks]
