"""Queries that are multiplied by a constant: attention multiplies the scores, and q, k and v are one linear."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import qcompiler as qc

HEADS = 4


class Attends(nn.Module):
    """Attention as OPT, BART and Whisper write it; `scaled` is what they do to the queries."""

    def __init__(self, depth: int, scaled: Any = None) -> None:
        super().__init__()
        self.depth = depth
        self.scaled = scaled or (lambda q: q * depth**-0.5)
        self.k, self.v, self.q = (nn.Linear(HEADS * depth, HEADS * depth) for _ in "kvq")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            y.view(*x.shape[:2], HEADS, self.depth).transpose(1, 2)
            for y in (self.scaled(self.q(x)), self.k(x), self.v(x))
        )
        y = functional.scaled_dot_product_attention(q, k, v, scale=1.0, is_causal=True)
        return y.transpose(1, 2).reshape(x.shape) + x


def text_of(program: qc.Program, stage: str) -> str:
    return str(program.ir(stage))


@pytest.mark.parametrize(
    ("batch", "length", "depth", "dtype", "dynamic"),
    [
        (1, 1, 16, torch.float32, False), (3, 7, 20, torch.float32, False), (1, 7, 16, torch.bfloat16, True),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (
            (1, 1, 20, torch.bfloat16, False), (3, 1, 64, torch.float32, True), (2, 8, 64, torch.float16, False),
        )),
    ],
)  # fmt: skip
def test_scores_are_scaled_and_the_linears_are_one(
    batch: int, length: int, depth: int, dtype: torch.dtype, dynamic: bool
) -> None:
    torch.manual_seed(2)
    model, x = Attends(depth).eval().to(dtype), torch.randn(batch, length, HEADS * depth).to(dtype)
    shapes = {"x": {1: ("s", 1, 9)}} if dynamic else None
    program = qc.qcompile(model, (x,), dynamic_shapes=shapes)
    text = text_of(program, "merge-linears")
    assert text.count("qc.linear") == 1 and "arith.mulf" not in text and "scale = 1.0" not in text
    wanted = model.double()(x.double())
    ours, eager = (program(x).double() - wanted).norm(), (model.to(dtype)(x).double() - wanted).norm()
    assert ours <= max(1.5 * eager, 1e-6 * wanted.norm())


@pytest.mark.parametrize(
    "scaled",
    [lambda q: q * q, lambda q: q * q.detach()[..., :1], lambda q: q * 0.25 + 1],
    ids=["itself", "a column", "and more"],
)
def test_other_queries_stay(scaled: Any) -> None:
    torch.manual_seed(3)
    model, x = Attends(16, scaled).eval(), torch.randn(1, 3, 64)
    program = qc.qcompile(model, (x,))
    assert "scale = 1.000000e+00" in text_of(program, "merge-linears")
    torch.testing.assert_close(program(x), model(x), rtol=1e-4, atol=1e-5)


def test_two_entries_that_name_the_linears_in_another_order_share_one_weight() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 16), nn.Linear(32, 48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.relu(self.b(x)).sum(-1) + functional.relu(self.a(x)).sum(-1)

    model, x = Both().eval(), torch.randn(5, 32)
    program = qc.qcompile(
        model, (x,), dynamic_shapes={"x": {0: ("s", 1, 9)}}, buckets=[("one", {"s": (1, 1)}), ("more", {"s": (2, 9)})]
    )
    assert text_of(program, "merge-linears").count("qc.linear") == 2  # one in each entry
    for rows in (1, 5, 9):
        given = torch.randn(rows, 32)
        torch.testing.assert_close(program(given), model(given), rtol=1e-5, atol=1e-5)
