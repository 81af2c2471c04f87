"""What inputs and parameters hold. The same name, seed and shape give the same values anywhere."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan, 1e-39, -3e-41, 6e-8, 3e38, -65504.0, 1.0, -1.0, 0.5, -2.5)


def make(fill: str, dtype: torch.dtype, shape: Sequence[int], seed: int) -> torch.Tensor:
    """`normal`; `scaled` (normal, divided by the root of the last dim); `positive` (0.3 to 2.3); `unit` (-0.95 to
    0.95); `grid` (quarters with many ties); `special` (infinities, NaN, ...); `index:n` (0 to n - 1); `signed:n` (-n to
    n - 1, an index from either end); `order:n` (a permutation's first entries); `integer`; `divisor`; `flag`."""
    generator = torch.Generator().manual_seed(seed)
    kind, _, number = fill.partition(":")
    shape = tuple(shape)
    if kind in ("index", "signed"):
        count = int(number)
        return torch.randint(-count if kind == "signed" else 0, count, shape, generator=generator).to(dtype)
    if kind == "order":
        size = math.prod(shape)
        return torch.randperm(int(number), generator=generator)[:size].reshape(shape).to(dtype)
    if kind == "flag":
        return (torch.rand(shape, generator=generator) < 0.6).to(dtype)
    if kind == "integer":
        low = 0 if dtype in (torch.uint8, torch.bool) else -9
        return torch.randint(low, 10, shape, generator=generator).to(dtype)
    if kind == "divisor":
        sign = 1 if dtype == torch.uint8 else torch.randint(0, 2, shape, generator=generator) * 2 - 1
        return (torch.randint(1, 7, shape, generator=generator) * sign).to(dtype)
    return _floats(kind, shape, generator).to(dtype)


def _floats(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if kind == "normal":
        return torch.randn(shape, generator=generator)
    if kind == "scaled":
        return torch.randn(shape, generator=generator) / math.sqrt(max(shape[-1] if shape else 1, 1))
    if kind == "positive":
        return torch.rand(shape, generator=generator) * 2 + 0.3
    if kind == "unit":
        return torch.rand(shape, generator=generator) * 1.9 - 0.95
    if kind == "grid":
        return torch.randint(-8, 9, shape, generator=generator) / 4
    if kind == "special":
        pick = torch.randint(0, 2 * len(SPECIAL), shape, generator=generator)
        table = torch.cat([torch.tensor(SPECIAL), torch.randn(len(SPECIAL), generator=generator)])
        return table[pick]
    raise ValueError(f"no values are called {kind!r}")
