"""Norms in the loop that modulates them, and joined streams that are rotated where they stand: same bits as apart."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import qcompiler as qc
from qcompiler.passes import pipeline
from qcompiler.plan.kinds.parts import PartsKernel
from qcompiler.plan.plan import Launch

HEADS, TYPES = 3, {"f32": torch.float32, "bf16": torch.bfloat16}


class Streams(nn.Module):
    """Attention over text and image together, as in a double block of Flux: each stream has its own modulation, norms
    of hidden states and of heads, and linears; pairs are rotated after the streams were joined."""

    def __init__(self, dim: int, tokens: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dim, wide = dim, HEADS * dim
        self.modulation = nn.Linear(wide, 4 * wide)
        self.norms = nn.ModuleList(nn.LayerNorm(wide, 1e-6, elementwise_affine=False) for _ in range(2))
        self.qkv = nn.ModuleList(nn.Linear(wide, 3 * wide) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(wide, wide) for _ in range(2))
        self.heads = nn.ModuleList(nn.RMSNorm(dim, 1e-6) for _ in range(4))
        for norm in self.heads:
            nn.init.normal_(norm.weight, 1.0, 0.3)
        angle = torch.arange(tokens)[:, None] * 100.0 ** (-torch.arange(0, dim, 2) / dim)
        self.register_buffer("cos", angle.cos().repeat_interleave(2, -1))
        self.register_buffer("sin", angle.sin().repeat_interleave(2, -1))

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        other = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(3).float()
        return (x.float() * self.cos + other * self.sin).to(x.dtype)

    def forward(self, text: torch.Tensor, image: torch.Tensor, time: torch.Tensor) -> Any:
        parts = self.modulation(time).chunk(4, -1)
        joined: list[list[torch.Tensor]] = [[], [], []]
        for n, x in enumerate((text, image)):
            scale, shift = parts[2 * n : 2 * n + 2]
            rows = self.qkv[n](self.norms[n](x) * (1 + scale[:, None]) + shift[:, None])
            q, k, v = (each.unflatten(-1, (HEADS, self.dim)) for each in rows.chunk(3, -1))
            for whole, each in zip(joined, (self.heads[2 * n](q), self.heads[2 * n + 1](k), v), strict=True):
                whole.append(each)
        q, k, v = (torch.cat(each, 1).transpose(1, 2) for each in joined)
        y = nn.functional.scaled_dot_product_attention(self.turned(q), self.turned(k), v)
        y = y.transpose(1, 2).flatten(2)
        return self.out[0](y[:, : text.shape[1]]), self.out[1](y[:, text.shape[1] :])


def given(batch: int, text: int, image: int, dim: int, dtype: str) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((batch, text, HEADS * dim), (batch, image, HEADS * dim), (batch, HEADS * dim))
    return tuple(torch.randn(*shape, generator=generator).to(TYPES[dtype]) for shape in shapes)


@cache
def program_of(batch: int, text: int, image: int, dim: int, dtype: str, device: str, most: int) -> qc.Program:
    model, stages = Streams(dim, text + image).to(TYPES[dtype]).eval(), pipeline.STAGES
    try:
        pipeline.STAGES = pipeline.with_options(stages, {"merge-launches": {"most": most}})
        return qc.qcompile(
            model, given(batch, text, image, dim, dtype), device=device,
            verify_each="numerics" if most > 1 and device == "cpu" else None,
        )  # fmt: skip
    finally:
        pipeline.STAGES = stages


def kinds(program: qc.Program) -> Counter[str]:
    specs = {spec.name: spec.template for spec in program.plan.kernels}
    return Counter(specs[step.kernel] for step in program.plan.entries[-1].steps if isinstance(step, Launch))


def bits(value: Any) -> bytes:
    return (
        value.contiguous().view(torch.uint8).numpy().tobytes() if isinstance(value, torch.Tensor) else value.tobytes()
    )


SIZES = [
    pytest.param(*case, marks=() if case == (2, 5, 8, 6, "f32", "cpu") else pytest.mark.slow)
    for device in ("cpu", "sim:0")
    for dtype in TYPES
    for case in (
        (1, 7, 16, 16, dtype, device), (2, 5, 8, 6, dtype, device), (1, 1, 9, 128, dtype, device),
        (2, 16, 1, 96, dtype, device),
    )
]  # fmt: skip


@pytest.mark.parametrize(("batch", "text", "image", "dim", "dtype", "device"), SIZES)
def test_results_have_the_bits_of_the_launches_apart(
    batch: int, text: int, image: int, dim: int, dtype: str, device: str
) -> None:
    size = (batch, text, image, dim, dtype, device)
    merged, apart = program_of(*size, 8), program_of(*size, 1)
    assert kinds(merged)["norm"] == 0 and kinds(apart)["norm"] == 6
    wide, split = HEADS * dim > 256, batch > 1
    small = kinds(merged)["parts"] + kinds(merged)["loop"]
    scales = 2 - wide if dtype == "bf16" else 0  # 1 + scale is rounded to bf16 first: not computed again for each row
    assert small == 2 + wide + split + scales, "norms, apart if wide; what is joined; rows of several images; scales"
    x = given(batch, text, image, dim, dtype)
    for one, other in zip(merged(*x), apart(*x), strict=True):
        assert bits(one) == bits(other)


def test_the_streams_are_rotated_where_the_whole_stands() -> None:
    program = program_of(2, 5, 8, 6, "f32", "cpu", 8)
    bodies = [spec.body for spec in program.plan.kernels if isinstance(spec.body, PartsKernel)]
    assert sorted((len(body.parts), sum(part.norm is not None for part in body.parts)) for body in bodies) == [
        (2, 0), (2, 2), (6, 4),
    ], "rows of each stream in the attention's result; norms of both; q, k and v of both"  # fmt: skip
    model, x = Streams(6, 13), given(2, 5, 8, 6, "f32")
    for got, want in zip(program(*x), model(*x), strict=True):
        np.testing.assert_allclose(got, want.detach(), rtol=1e-4, atol=1e-5)


class Added(nn.Module):
    def __init__(self, cols: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, cols), nn.RMSNorm(cols, 1e-6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return x.exp() + self.norm(x)


class Transposed(Added):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.norm(self.linear(x)) * 2).transpose(0, 1).contiguous()


@pytest.mark.parametrize(
    ("model", "cols", "launches"),
    [
        (Added, 40, {"linear": 1, "norm": 1, "loop": 1}), (Transposed, 40, {"linear": 1, "parts": 1, "loop": 1}),
        (Transposed, 300, {"linear": 1, "parts": 1, "loop": 1}),
    ],
    ids=["reads the rows themselves too", "a copy that transposes", "a copy that transposes wide rows"],
)  # fmt: skip
def test_what_stays_apart(model: type[Added], cols: int, launches: dict[str, int]) -> None:
    torch.manual_seed(0)
    layer, x = model(cols).eval(), torch.randn(5, 8)
    program = qc.qcompile(layer, (x,))
    np.testing.assert_allclose(program(x), layer(x).detach(), rtol=1e-4, atol=1e-5)
    assert kinds(program) == launches


class Returned(nn.Module):
    """Results of the program that its loops read and copy as well."""

    def __init__(self, cols: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(cols, 1e-6)

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows, wave = self.norm(x.exp()), x.sin()
        return rows, rows * z, wave, torch.cat([wave, z.cos()], 1)


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
@pytest.mark.parametrize("cols", [6, pytest.param(300, marks=pytest.mark.slow)])
def test_what_the_caller_reads_is_stored(cols: int, device: str) -> None:
    """A norm that a loop reads, and a loop whose result is copied, keep their results if those are the program's."""
    model, (x, z) = Returned(cols).eval(), torch.randn(2, 3, cols, generator=torch.Generator().manual_seed(1))
    program = qc.qcompile(model, (x, z), device=device)
    with torch.no_grad():
        wanted = model(x, z)
    for got, want in zip(program(x, z), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
