"""Decoder layers of a Llama with a static cache and random weights: one token, as a compiled program runs it.

Uses torch only, without transformers; the shapes are those of an 8 B Llama (`FULL`) or small ones (`SMALL`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer; `keys` is the length of the cache, `filled` the part of it that a step reads."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    dim: int
    keys: int
    filled: int
    layers: int


FULL = Shape(hidden=4096, inner=14336, heads=32, kv_heads=8, dim=128, keys=8192, filled=8192, layers=1)
SMALL = Shape(hidden=64, inner=128, heads=4, kv_heads=2, dim=16, keys=48, filled=40, layers=1)

DRAWN = 4_194_301
"""A prime, so that no row of a weight equals another row."""


class Layer(nn.Module):
    """RMS norm, grouped-query attention over a cache that it writes, RMS norm, SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        hidden, keys = shape.hidden, shape.kv_heads * shape.dim
        self.norm, self.mlp_norm = nn.RMSNorm(hidden, eps=1e-5), nn.RMSNorm(hidden, eps=1e-5)
        self.q, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(hidden, keys, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(hidden, shape.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.inner, hidden, bias=False)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, shape.kv_heads, shape.keys, shape.dim))

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, position: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        batch, length, hidden = x.shape

        def heads(linear: nn.Linear, y: torch.Tensor) -> torch.Tensor:
            return linear(y).view(batch, length, -1, self.shape.dim).transpose(1, 2)

        y = self.norm(x)
        q, k, v = heads(self.q, y), heads(self.k, y), heads(self.v, y)
        q, k = (each * cos + _turned(each) * sin for each in (q, k))
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        y = functional.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(batch, length, hidden))
        y = self.mlp_norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Step(nn.Module):
    """`layers` layers: x (1, 1, hidden) and its position (1) give the next x."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.register_buffer("frequencies", frequencies(shape))

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        angles = position[:, None].float() * self.frequencies.float()[None]
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        mask = torch.arange(self.shape.keys)[None, None, None, :] <= position[None, None, :, None]
        for layer in self.layers:
            x = layer(x, cos, sin, position, mask)
        return x


def frequencies(shape: Shape) -> torch.Tensor:
    """The frequencies of rotary positions in Llama 3."""
    return 500000.0 ** (-torch.arange(0, shape.dim, 2) / shape.dim)


def _turned(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def step(shape: Shape, seed: int = 0) -> tuple[Step, tuple[torch.Tensor, torch.Tensor]]:
    """A bf16 model whose activations keep their magnitude, with a filled cache, and arguments for its last position."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(DRAWN, generator=generator)
    taken = 0

    def random(like: torch.Tensor) -> torch.Tensor:
        """Repeats `DRAWN` values, each time from another start: drawing 400 million values takes seconds."""
        nonlocal taken
        taken += 7919
        turned = drawn.roll(-taken % DRAWN)
        return turned.repeat(-(-like.numel() // DRAWN))[: like.numel()].view(like.shape)

    with torch.device("meta"):  # torch's own initial values would take seconds, too
        model = Step(shape).eval().bfloat16()
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.frequencies.copy_(frequencies(shape))
        for parameter in model.parameters():
            spread, mean = (parameter.shape[-1] ** -0.5, 0.0) if parameter.ndim > 1 else (0.1, 1.0)
            parameter.copy_(mean + spread * random(parameter))
        for layer in model.layers:
            for cache in (layer.keys, layer.values):
                cache.zero_()
                cache[:, :, : shape.filled] = random(cache[:, :, : shape.filled])
    x = torch.randn((1, 1, shape.hidden), generator=generator).bfloat16()
    return model, (x, torch.tensor([shape.filled - 1]))
