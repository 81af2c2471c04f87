"""Norms of heads in the launch that rotates them and writes the cache: the same bits as apart, and what stays apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qcompiler as qc
from qcompiler.passes import pipeline
from qcompiler.plan.kinds.parts import Part, PartsKernel
from qcompiler.plan.plan import Launch

HEADS, KV_HEADS, LENGTH = 4, 2, 11


class Layer(nn.Module):
    """Attention on a static cache whose queries and keys are normalised, head by head, and rotated, as in Qwen3."""

    def __init__(self, batch: int, dtype: torch.dtype, dim: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dim = dim
        self.qkv = nn.Linear(HEADS * dim, (HEADS + 2 * KV_HEADS) * dim, bias=False, dtype=dtype)
        self.q_norm, self.k_norm = (nn.RMSNorm(dim, eps=1e-6, dtype=dtype) for _ in range(2))
        for norm in (self.q_norm, self.k_norm):
            nn.init.normal_(norm.weight, 1.0, 0.3)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(batch, KV_HEADS, LENGTH, dim, dtype=dtype))
        self.register_buffer("inv_freq", 1.0 / 100.0 ** (torch.arange(0, dim, 2) / dim))

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        columns = [HEADS * self.dim, KV_HEADS * self.dim, KV_HEADS * self.dim]
        q, k, v = (part.view(batch, length, -1, self.dim) for part in self.qkv(x).split(columns, -1))
        q, k, v = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2), v.transpose(1, 2)
        angle = torch.cat([position[:, None] * self.inv_freq] * 2, -1)
        cos, sin, half = angle.cos().to(x.dtype), angle.sin().to(x.dtype), self.dim // 2
        q, k = (each * cos + torch.cat([-each[..., half:], each[..., :half]], -1) * sin for each in (q, k))
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        seen = torch.arange(LENGTH)[None] <= position[:, None]
        keys, values = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (self.keys, self.values))
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=seen)


TYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


@cache
def program_of(batch: int, dtype: str, dim: int, device: str, most: int) -> qc.Program:
    model, size, stages = Layer(batch, TYPES[dtype], dim).eval(), ("s", 1, 8), pipeline.STAGES
    try:
        pipeline.STAGES = pipeline.with_options(stages, {"merge-launches": {"most": most}})
        return qc.qcompile(
            model, (torch.ones(batch, 7, HEADS * dim, dtype=TYPES[dtype]), torch.arange(7)),
            dynamic_shapes={"x": {1: size}, "position": {0: size}}, device=device,
            buckets=[("decode", {"s": (1, 1)}), ("prompt", {"s": (1, 8)})],
            verify_each="numerics" if (batch, dtype, dim, most) == (1, "f32", 12, 8) else None,
        )  # fmt: skip
    finally:
        pipeline.STAGES = stages


def bits(value: Any) -> np.ndarray[Any, Any]:
    if isinstance(value, torch.Tensor):
        return value.contiguous().view(torch.uint8).numpy()
    return np.ascontiguousarray(value).view(np.uint8)


def steps(batch: int, dtype: str, dim: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A prompt of 7, then single tokens: behind it, and the last row."""
    generator = torch.Generator().manual_seed(3)
    for position in (torch.arange(7), torch.tensor([7]), torch.tensor([LENGTH - 1])):
        yield torch.randn(batch, len(position), HEADS * dim, generator=generator).to(TYPES[dtype]), position


def kinds(program: qc.Program, entry: str) -> Counter[str]:
    specs = {spec.name: spec.template for spec in program.plan.kernels}
    (found,) = [each for each in program.plan.entries if each.name == entry]
    return Counter(specs[step.kernel] for step in found.steps if isinstance(step, Launch))


def normed(program: qc.Program) -> list[tuple[Part, ...]]:
    """The parts of each launch that has a norm in one of them."""
    bodies = [spec.body for spec in program.plan.kernels if isinstance(spec.body, PartsKernel)]
    return [body.parts for body in bodies if any(part.norm is not None for part in body.parts)]


RUNS = [
    pytest.param(batch, dtype, dim, device, marks=() if quick else pytest.mark.slow)
    for device in ("cpu", "sim:0")
    for batch in (1, 3)
    for dtype in TYPES
    for dim in (6, 12, 64, 80, 128)
    for quick in [(batch, dtype, dim, device) == (1, "f32", 12, "cpu")]
]


@pytest.mark.parametrize(("batch", "dtype", "dim", "device"), RUNS)
def test_results_and_caches_have_the_bits_of_the_norms_apart(batch: int, dtype: str, dim: int, device: str) -> None:
    merged, apart = (program_of(batch, dtype, dim, device, most) for most in (8, 1))
    assert kinds(merged, "decode")["norm"] == 0 and kinds(apart, "decode")["norm"] == 2
    one, other = merged.session(), apart.session()
    for x, position in steps(batch, dtype, dim):
        assert (bits(one(x, position)) == bits(other(x, position))).all()
        for name, value in other.states().items():
            assert (bits(one.states()[name]) == bits(value)).all(), name


def test_norms_rotations_and_both_rows_of_the_cache_are_one_launch() -> None:
    merged = program_of(1, "f32", 12, "cpu", 8)
    (parts,) = [each for each in normed(merged) if any(part.index is not None for part in each)]
    assert [(part.norm is not None, part.index is not None) for part in parts] == [
        (True, False), (True, True), (False, True),
    ], "queries; keys, in their row; values, in theirs"  # fmt: skip
    assert kinds(merged, "prompt")["norm"] == 0, "in a prompt, too, norms are where their rows are rotated"


def test_the_report_says_that_rows_are_normalised() -> None:
    assert "2 read rows that they normalise" in str(program_of(1, "f32", 12, "cpu", 8).report())


class Heads(nn.Module):
    """A norm of x in rows of `dim`, which `tail` reads."""

    def __init__(self, wide: int, dim: int, tail: Any) -> None:
        super().__init__()
        self.linear, self.norm, self.dim, self.tail = nn.Linear(24, wide), nn.RMSNorm(dim, eps=1e-6), dim, tail

    def forward(self, x: torch.Tensor) -> Any:
        x = self.linear(x)
        return self.tail(self.norm(x.view(x.shape[0], -1, self.dim)))


def compiled(wide: int, dim: int, tail: Any) -> Counter[str]:
    torch.manual_seed(0)
    model, x = Heads(wide, dim, tail).eval(), torch.randn(3, 24)
    program = qc.qcompile(model, (x,))
    found, wanted = (value if isinstance(value, tuple | list) else [value] for value in (program(x), model(x)))
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, want.detach(), rtol=1e-4, atol=1e-5)
    return kinds(program, "main")


def test_a_norm_of_heads_moves_to_its_loop() -> None:
    assert compiled(60, 12, lambda x: x.exp() + 1)["norm"] == 0


@pytest.mark.parametrize("dim", [60, 300])
def test_a_norm_of_whole_rows_moves_to_its_loop(dim: int) -> None:
    assert compiled(dim, dim, lambda x: x.exp() + 1)["norm"] == 0


def test_a_wide_row_that_a_loop_reads_elsewhere_stays_a_kernel() -> None:
    """Its columns are not where they stand: a block would have to exchange them."""
    assert compiled(300, 300, lambda x: x + x.flip(-1))["norm"] == 1


def test_a_norm_with_two_readers_stays_a_kernel() -> None:
    assert compiled(60, 12, lambda x: (x.exp() + 1, x.cumsum(1)))["norm"] == 1


def test_a_loop_that_mixes_heads_leaves_the_norm_alone() -> None:
    """An element of its result reads two heads."""
    assert compiled(60, 12, lambda x: x + x.flip(1))["norm"] == 1
