"""Small models with the structures that rewrites of the float graph look for, with outliers put into them."""

from __future__ import annotations

import torch
from torch import nn

WIDTH, HEADS, GROUPS, HIDDEN, WORDS = 64, 4, 2, 96, 50


class RMSNorm(nn.Module):
    """`form`: as transformers writes it, as torch's own operator, or with Gemma's gain (1 + w)."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.weight = nn.Parameter((0.0 if form == "offset" else 1.0) + 0.3 * torch.randn(WIDTH))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        if self.form == "aten":
            return nn.functional.rms_norm(h, (WIDTH,), self.weight, 1e-6)
        u = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return u * (1.0 + self.weight) if self.form == "offset" else self.weight * u


class Layer(nn.Module):
    """Pre-norm: grouped queries, and a gated MLP."""

    def __init__(self, form: str, bias: bool) -> None:
        super().__init__()
        dim = WIDTH // HEADS
        self.first = nn.LayerNorm(WIDTH) if form == "layer" else RMSNorm(form)
        self.second = nn.LayerNorm(WIDTH) if form == "layer" else RMSNorm(form)
        self.q, self.o = nn.Linear(WIDTH, WIDTH, bias), nn.Linear(WIDTH, WIDTH, bias)
        self.k, self.v = nn.Linear(WIDTH, GROUPS * dim, bias), nn.Linear(WIDTH, GROUPS * dim, bias)
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN, bias), nn.Linear(WIDTH, HIDDEN, bias)
        self.down = nn.Linear(HIDDEN, WIDTH, bias)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        b, s, _ = h.shape
        u = self.first(h)
        q, k, v = (m(u).view(b, s, -1, WIDTH // HEADS).transpose(1, 2) for m in (self.q, self.k, self.v))
        k, v = (x[:, :, None].expand(b, GROUPS, HEADS // GROUPS, s, -1).reshape(b, HEADS, s, -1) for x in (k, v))
        a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.o(a.transpose(1, 2).reshape(b, s, WIDTH))
        u = self.second(h)
        return h + self.down(nn.functional.silu(self.gate(u)) * self.up(u))


class Decoder(nn.Module):
    """Two layers between an embedding and a head, tied or not. `form` is the norms' (see RMSNorm), or "layer"."""

    def __init__(self, form: str = "written", *, tied: bool = False, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer(form, bias) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH) if form == "layer" else RMSNorm(form)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                nn.init.normal_(module.weight, 1.0, 0.3)
                nn.init.normal_(module.bias, 0.0, 0.3)
            elif isinstance(module, nn.Linear):  # as weights that were trained are: a rotation keeps this distribution
                nn.init.normal_(module.weight, 0.0, module.in_features**-0.5)
        self.eval()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        for layer in self.layers:
            h = layer(h)
        return self.head(self.norm(h))


def outlier_twin(model: Decoder, count: int = 8, factor: float = 50.0) -> Decoder:
    """The same floats: some channels of each norm's gain times `factor`, the columns that read them divided by it."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in model.layers:
            for norm, readers in ((layer.first, (layer.q, layer.k, layer.v)), (layer.second, (layer.gate, layer.up))):
                channels = torch.randperm(WIDTH, generator=generator)[:count]
                norm.weight[channels] *= factor
                for reader in readers:
                    reader.weight[:, channels] /= factor
    return model


def ids(count: int = 4, seed: int = 1) -> list[torch.Tensor]:
    """Inputs of several sizes."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, WORDS, (2 + i % 2, 20 + i), generator=generator) for i in range(count)]


SHAPES = {"ids": {0: ("b", 1, 8), 1: ("s", 1, 64)}}
EXAMPLE = (torch.zeros(2, 7, dtype=torch.int64),)
