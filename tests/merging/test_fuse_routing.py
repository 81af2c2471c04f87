"""The routing of a mixture of experts is one launch: the same experts and bits, and a reason where it stays apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import qcompiler as qc

SLOW = pytest.mark.slow
EXPERTS, TOP = 12, 4


class Router(nn.Module):
    """A linear, and what `choose` makes of its result: weights and experts."""

    def __init__(self, choose: Callable[[torch.Tensor], tuple[torch.Tensor, ...]], experts: int = EXPERTS) -> None:
        super().__init__()
        self.gate, self.choose = nn.Linear(64, experts, bias=False), choose
        self.gate.weight.data = torch.randn(experts, 64, generator=torch.Generator().manual_seed(3)) / 4

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.choose(self.gate(x))


def mixtral(logits: torch.Tensor, top: int = TOP) -> tuple[torch.Tensor, ...]:
    weights, experts = torch.topk(torch.softmax(logits.float(), -1), top, -1)
    return (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), experts


def two_of_mixtral(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return mixtral(logits, 2)


def qwen(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.topk(torch.softmax(logits, -1, dtype=torch.float32), TOP, -1)


def gpt_oss(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    scores, experts = torch.topk(logits, TOP, -1)
    return torch.softmax(scores, -1, dtype=scores.dtype), experts


def deepseek(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    scores = logits.sigmoid()
    _, experts = torch.topk(scores + 0.25, TOP, -1)
    weights = scores.gather(1, experts)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20), experts


def with_an_epsilon(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    weights, experts = qwen(logits)
    return weights / (weights.sum(-1, keepdim=True) + 1e-3), experts


def of_another_sum(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    weights, experts = qwen(logits)
    return weights / weights.sum(0, keepdim=True), experts


def upside_down(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    weights, experts = qwen(logits)
    return weights.sum(-1, keepdim=True) / weights, experts


def squares(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    weights, experts = qwen(logits)
    return weights / (weights * weights).sum(-1, keepdim=True), experts


def also_returned(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    shares = torch.softmax(logits, -1)
    return (*torch.topk(shares, TOP, -1), shares)


def over_rows(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.topk(torch.softmax(logits, 0), TOP, -1)


def of_rows(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.topk(torch.softmax(logits, 0), 2, 0)


def rounded_before(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.topk(torch.softmax(logits, -1), TOP, -1)


def inputs(size: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(*size, 64, generator=generator).to(dtype), torch.zeros(*size, 64).to(dtype)]


def compiled(model: nn.Module, x: torch.Tensor, *, apart: bool = False, **options: Any) -> qc.Program:
    recipe = qc.QuantConfig("int8", separate=("*",) if apart else (), promise_bits=None)
    return qc.qcompile(model.eval(), (x,), quant=recipe, **options)


def bodies(program: qc.Program) -> list[str]:
    return [spec.body.__struct_config__.tag for spec in program.plan.kernels]


def said(program: qc.Program) -> str:
    return " ".join(f"{c.what}: {c.why}" for c in program.report().choices if c.stage == "fuse-routing")


def same_choice(ours: Any, theirs: Any, tolerance: float) -> None:
    """Weights and experts; equal scores, as those of rows of zeros, are chosen by their numbers."""
    assert torch.equal(ours[1], theirs[1])
    torch.testing.assert_close(ours[0], theirs[0], rtol=tolerance, atol=1e-7)


CASES = [
    (choose, size, dtype)
    for choose in (mixtral, two_of_mixtral, qwen, gpt_oss)
    for size in ((1, 1), (3, 1), (1, 7), (3, 7)) for dtype in (torch.float32, torch.bfloat16)
]  # fmt: skip
QUICK = ((mixtral, (1, 1), torch.float32), (gpt_oss, (3, 7), torch.bfloat16))


@pytest.mark.parametrize(
    ("choose", "size", "dtype"), [pytest.param(*case, marks=() if case in QUICK else SLOW) for case in CASES]
)
def test_routing_is_one_launch(choose: Any, size: tuple[int, ...], dtype: torch.dtype) -> None:
    """With two experts or without a sum the bits are those of kernels apart; with more, sums have another order."""
    model = Router(choose).to(dtype)
    x = inputs(size, dtype)
    fused, apart = compiled(model, x[0], verify_each="numerics"), compiled(model, x[0], apart=True)
    assert sorted(bodies(fused)) == ["linear", "route"], said(fused)
    assert "route" not in bodies(apart) and "the recipe keeps it separate" in said(apart)
    for each in x:
        ours, theirs = fused(each), apart(each)
        if choose is mixtral:
            same_choice(ours, theirs, 3e-7 if dtype == torch.float32 else 2.0**-7)
        else:
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("choose", "size", "dtype"),
    [
        pytest.param(*case, marks=() if case[:2] == (mixtral, (3, 1)) else SLOW)
        for case in CASES
        if case[2].itemsize == 4
    ],
)
def test_on_the_simulated_gpu(choose: Any, size: tuple[int, ...], dtype: torch.dtype) -> None:
    model = Router(choose)
    x = inputs(size, dtype)
    program = compiled(model, x[0], device="sim:0")
    assert sorted(bodies(program)) == ["linear", "route"], said(program)
    with torch.no_grad():
        for each in x:
            same_choice(program(each), compiled(model, x[0])(each), 1e-5)


@pytest.mark.parametrize(("choose", "why"), [
    pytest.param(with_an_epsilon, "a softmax, and its largest entries", marks=SLOW),
    (squares, "a softmax, and its largest entries"),
    pytest.param(upside_down, "a softmax, and its largest entries", marks=SLOW),
    pytest.param(of_another_sum, "a softmax, and its largest entries", marks=SLOW),
])  # fmt: skip
def test_another_division_stays_in_loops(choose: Any, why: str) -> None:
    model, x = Router(choose), inputs((7,))[0]
    program = compiled(model, x, verify_each="numerics")
    assert said(program) == f"routing of experts: {why}" and "loop" in bodies(program)
    with torch.no_grad():
        wanted = program.oracle(x)
    assert torch.equal(program(x)[1], wanted[1])
    torch.testing.assert_close(program(x)[0], wanted[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("choose", "dtype", "why"), [
    (also_returned, torch.float32, "other ops read the softmax, too"),
    pytest.param(over_rows, torch.float32, "runs along another dim", marks=SLOW),
    pytest.param(of_rows, torch.float32, "not made along the last dim", marks=SLOW),
    pytest.param(rounded_before, torch.bfloat16, "its softmax is bf16", marks=SLOW),
    pytest.param(deepseek, torch.float32, "", marks=SLOW),
])  # fmt: skip
def test_what_stays_apart_says_why(choose: Any, dtype: torch.dtype, why: str) -> None:
    """Sigmoids that choose no experts here are no routing; test_sigmoids_are_no_softmax has those that do."""
    model, x = Router(choose).to(dtype), inputs((7,), dtype)[0]
    program = compiled(model, x, verify_each="numerics")
    assert "route" not in bodies(program) and why in said(program) and bool(why) == bool(said(program))
    with torch.no_grad():
        wanted = program.oracle(x)
    assert torch.equal(program(x)[1], wanted[1])
    torch.testing.assert_close(program(x)[0], wanted[0], rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=1e-6)


class Experts(nn.Module):
    """Products with experts that sigmoids choose."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router(deepseek)
        self.w = nn.Parameter(torch.randn(EXPERTS, 32, 64, generator=torch.Generator().manual_seed(5)) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, experts = self.router(x)
        made = torch.bmm(self.w[experts.reshape(-1)], x.repeat_interleave(TOP, 0).unsqueeze(-1)).squeeze(-1)
        return (made.view(-1, TOP, 32) * weights.unsqueeze(-1)).sum(1)


def test_sigmoids_are_no_softmax() -> None:
    x = inputs((3,))[0]
    program = compiled(Experts(), x)
    assert "route" not in bodies(program)
    assert said(program) == "routing of experts: apart: its scores are no softmax"
