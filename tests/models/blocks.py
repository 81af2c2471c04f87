"""The slice's models: an MLP and an attention block, of the BERT kind and of the Llama kind."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


def scaled(model: nn.Module, seed: int = 0) -> nn.Module:
    """Weights that keep activations near unit size, so that an error is not hidden by small outputs."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            is_matrix = parameter.ndim > 1
            spread, mean = (1.5 / parameter.shape[-1] ** 0.5, 0.0) if is_matrix else (0.1, 1.0)
            parameter.copy_(mean + spread * torch.randn(parameter.shape, generator=generator))
    return model.eval()


class Mlp(nn.Module):
    """Layer norm, GELU, residual."""

    def __init__(self, hidden: int = 48, inner: int = 104) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, inner)
        self.down = nn.Linear(inner, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class GatedMlp(nn.Module):
    """RMS norm, SwiGLU, residual."""

    def __init__(self, hidden: int = 48, inner: int = 104) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden, eps=1e-6)
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class BertBlock(nn.Module):
    """Bidirectional attention with a padding mask, then `Mlp`;"""

    def __init__(self, hidden: int = 48, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))
        self.out = nn.Linear(hidden, hidden)
        self.mlp = Mlp(hidden)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        b, s, hidden = x.shape
        q, k, v = (
            each(x).view(b, s, self.heads, hidden // self.heads).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        bias = (1.0 - mask[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.mlp(x + self.out(y.transpose(1, 2).reshape(b, s, hidden)))


class LlamaBlock(nn.Module):
    """Causal attention with rotary positions and grouped queries, then `GatedMlp`."""

    def __init__(self, hidden: int = 64, heads: int = 4, kv_heads: int = 2) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, hidden // heads
        self.norm = nn.RMSNorm(hidden, eps=1e-6)
        self.query = nn.Linear(hidden, heads * self.dim, bias=False)
        self.key = nn.Linear(hidden, kv_heads * self.dim, bias=False)
        self.value = nn.Linear(hidden, kv_heads * self.dim, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.mlp = GatedMlp(hidden, 96)
        self.register_buffer("frequencies", 1.0 / 10000 ** (torch.arange(0, self.dim, 2) / self.dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, hidden = x.shape
        y = self.norm(x)
        q = self.query(y).view(b, s, self.heads, self.dim).transpose(1, 2)
        k = self.key(y).view(b, s, self.kv_heads, self.dim).transpose(1, 2)
        v = self.value(y).view(b, s, self.kv_heads, self.dim).transpose(1, 2)
        angles = torch.arange(s)[:, None] * self.frequencies[None, :]
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        q, k = (each * cos + self._turned(each) * sin for each in (q, k))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.mlp(x + self.out(y.transpose(1, 2).reshape(b, s, hidden)))

    @staticmethod
    def _turned(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat((-second, first), dim=-1)
