"""Small models of torch whose texts torch-mlir writes: an MLP, a conv net, an encoder layer, a Llama block."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

DIALECTS = ("torch", "linalg", "stablehlo")
OUTPUTS = {"torch": "TORCH", "linalg": "LINALG_ON_TENSORS", "stablehlo": "STABLEHLO"}


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, stride=2), nn.BatchNorm2d(8)
        self.depth, self.head = nn.Conv2d(8, 8, 3, groups=8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x)))
        result: torch.Tensor = self.head(F.max_pool2d(self.depth(x), 2).mean((2, 3)))
        return result


class Llama(nn.Module):
    """One block with grouped heads, rotary embeddings and a causal mask, between an embedding and a head."""

    def __init__(self, hidden: int = 32, heads: int = 4, groups: int = 2, inner: int = 64, tokens: int = 40) -> None:
        super().__init__()
        self.heads, self.groups = heads, groups
        self.embed, self.head = nn.Embedding(tokens, hidden), nn.Linear(hidden, tokens, bias=False)
        small = hidden // heads * groups
        self.q, self.k, self.v = (nn.Linear(hidden, n, bias=False) for n in (hidden, small, small))
        self.o, self.gate = nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, inner, bias=False)
        self.up, self.down = nn.Linear(hidden, inner, bias=False), nn.Linear(inner, hidden, bias=False)
        self.scales = nn.ParameterList([nn.Parameter(torch.rand(hidden) + 0.5) for _ in range(2)])

    def _norm(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * scale

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        b, t, hidden = x.shape
        d, times = hidden // self.heads, self.heads // self.groups
        angles = torch.arange(t)[:, None] * (1e4 ** (-torch.arange(0, d, 2) / d))[None]
        cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)

        def turned(y: torch.Tensor) -> torch.Tensor:
            return y * cos + torch.cat([-y[..., d // 2 :], y[..., : d // 2]], -1) * sin

        def repeated(y: torch.Tensor) -> torch.Tensor:
            wide = y[:, :, None].expand(b, self.groups, times, t, d)
            return wide.reshape(b, self.heads, t, d)

        y = self._norm(x, self.scales[0])
        q = turned(self.q(y).view(b, t, self.heads, d).transpose(1, 2))
        k = turned(self.k(y).view(b, t, self.groups, d).transpose(1, 2))
        v = self.v(y).view(b, t, self.groups, d).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, repeated(k), repeated(v), is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(b, t, hidden))
        y = self._norm(x, self.scales[1])
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        result: torch.Tensor = self.head(x)
        return result


def model(name: str) -> nn.Module:
    """ "mlp", "conv", "encoder" or "llama", with fixed weights."""
    torch.manual_seed(1)
    made: dict[str, Any] = {
        "mlp": lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)),
        "conv": ConvNet,
        "encoder": lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0, activation="gelu"),
        "llama": Llama,
    }
    result: nn.Module = made[name]().eval()
    return result


def example(name: str, batch: int) -> torch.Tensor:
    """An input of a model."""
    draw = torch.Generator().manual_seed(batch)
    if name == "llama":
        return torch.randint(0, 40, (batch, 6), generator=draw)
    return torch.randn({"mlp": (batch, 8), "conv": (batch, 3, 16, 16), "encoder": (batch, 5, 32)}[name], generator=draw)


def text(module: nn.Module, x: torch.Tensor, dialect: str, *, dynamic: bool = False) -> Any:
    """The module that torch-mlir writes; with `dynamic` the batch is `?`, 2 to 8."""
    from torch_mlir import fx
    from torch_mlir.compiler_utils import OutputType

    sizes = ({0: torch.export.Dim("b", min=2, max=8)},) if dynamic else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fx.export_and_import(
            module, x, output_type=OutputType[OUTPUTS[dialect]], func_name="main", dynamic_shapes=sizes
        )
