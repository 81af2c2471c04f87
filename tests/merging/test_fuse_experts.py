"""Experts whose GLU and weighted sum are in their kernels: the same bits, fewer launches, and a reason where not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import qcompiler as qc
from qcompiler.ir.context import QCContext
from qcompiler.ir.text import parse_module
from qcompiler.passes.pipeline import parse_passes
from qcompiler.plan.kinds.grouped_linear import GroupedLinearKernel

transformers = pytest.importorskip("transformers")
from transformers.models.qwen3_moe import modeling_qwen3_moe  # noqa: E402

SLOW = pytest.mark.slow


class Block(nn.Module):
    """Qwen3-MoE's experts behind a norm, and the residual around both."""

    def __init__(self, experts: int = 4, top: int = 2, k: int = 64, width: int = 32, norms_top: bool = True) -> None:
        super().__init__()
        sizes = transformers.Qwen3MoeConfig(
            hidden_size=k, moe_intermediate_size=width, num_experts=experts, num_experts_per_tok=top,
            norm_topk_prob=norms_top,
        )  # fmt: skip
        sizes._experts_implementation = "eager"
        self.norm, self.moe = nn.RMSNorm(k), modeling_qwen3_moe.Qwen3MoeSparseMoeBlock(sizes)
        generator = torch.Generator().manual_seed(3)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.moe(self.norm(x))
        return x + (out[0] if isinstance(out, tuple) else out)


def forms(program: qc.Program) -> list[str]:
    """Of the grouped linears in the order of the plan."""
    bodies = [spec.body for spec in program.plan.kernels if isinstance(spec.body, GroupedLinearKernel)]
    return ["pairs" if body.pairs else "mixed" if body.top else "plain" for body in bodies]


def both(
    model: nn.Module, x: torch.Tensor, quant: str = "nf4", activations: str | None = None, **options: Any
) -> list[qc.Program]:
    """The program, and the one whose experts stay apart."""
    recipes = (
        qc.QuantConfig(quant, activations=activations, separate=separate, promise_bits=None)
        for separate in ((), ("moe.experts*",))
    )
    return [qc.qcompile(model, (x,), quant=recipe, **options) for recipe in recipes]


def inputs(size: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(*size, 64, generator=generator).to(dtype)
    return [x, x[..., :1, :].expand_as(x).contiguous()]  # the second: all rows choose the same experts


def said(program: qc.Program) -> str:
    return " ".join(f"{c.what}: {c.why}" for c in program.report().choices if c.stage == "fuse-experts")


def check(model: Block, size: tuple[int, ...], quant: str, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    """The experts are combined. For one token in fp32 on the CPU no bit differs from the program in which they are not;
    else other rows are multiplied together, or other warps share K, and sums have another order; or factors are
    rounded in one program alone."""
    x = inputs(size, dtype)[0]
    fused, apart = both(model.eval().to(dtype), x, quant, **options)
    assert set(forms(fused)) == {"pairs", "mixed"} and set(forms(apart)) == {"plain"}, said(fused)
    assert len(fused.plan.entries[0].steps) <= len(apart.plan.entries[0].steps) - 2
    for each in inputs(size, dtype):
        ours, theirs = fused(each), apart(each)
        if options or size != (1, 1) or dtype != torch.float32:
            bound = 1e-5 if dtype == torch.float32 else 2e-2
            assert (ours.float() - theirs.float()).norm() <= bound * theirs.float().norm()
        else:
            assert torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))


FORMATS = ("nf4", "q4_K", "int8", "q8_0", "float")


@pytest.mark.parametrize(("size", "quant", "dtype"), [
    ((1, 1), "nf4", torch.float32),
    *(pytest.param((1, 1), quant, dtype, marks=SLOW) for quant in FORMATS for dtype in (torch.float32, torch.bfloat16)),
])  # fmt: skip
def test_one_token_gives_the_same_bits_in_fp32(size: tuple[int, ...], quant: str, dtype: torch.dtype) -> None:
    k = 256 if quant == "q4_K" else 64
    if k == 64:
        check(Block(), size, quant, dtype)
        return
    model = Block(width=256).eval().to(dtype)
    fused, apart = both(model, inputs(size, dtype)[0], quant)
    for each in inputs(size, dtype):
        ours, theirs = fused(each), apart(each)
        if dtype == torch.float32:
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
        else:
            assert (ours.float() - theirs.float()).norm() <= 2e-2 * theirs.float().norm()


@pytest.mark.parametrize(("experts", "top", "size"), [
    (8, 2, (3, 1)), pytest.param(60, 8, (1, 7), marks=SLOW), pytest.param(60, 2, (3, 1), marks=SLOW),
])  # fmt: skip
def test_some_rows_of_many_experts(experts: int, top: int, size: tuple[int, ...]) -> None:
    """Most experts have no rows; then all rows have the same ones."""
    check(Block(experts, top), size, "nf4")


@pytest.mark.parametrize(("experts", "top", "size", "dtype"), [
    (4, 2, (1, 1), torch.float32), pytest.param(8, 8, (1, 1), torch.bfloat16, marks=SLOW),
    pytest.param(4, 2, (3, 1), torch.bfloat16, marks=SLOW),
])  # fmt: skip
def test_on_the_simulated_gpu(experts: int, top: int, size: tuple[int, ...], dtype: torch.dtype) -> None:
    check(Block(experts, top), size, "nf4", dtype, device="sim:0")


@pytest.mark.parametrize(("experts", "top", "size", "quant", "device"), [
    (4, 2, (1, 1), "int8", "cpu"), (4, 2, (1, 1), "int4", "sim:0"), pytest.param(12, 9, (1, 1), "int8", "sim:0"),
    pytest.param(8, 2, (3, 1), "q4_K", "cpu", marks=SLOW), pytest.param(60, 8, (1, 7), "q6_K", "cpu", marks=SLOW),
    pytest.param(8, 2, (3, 1), "q4_K", "sim:0", marks=SLOW), pytest.param(8, 8, (1, 1), "mxfp4", "sim:0", marks=SLOW),
])  # fmt: skip
def test_rows_of_int8_give_the_same_bits_on_every_device(
    experts: int, top: int, size: tuple[int, ...], quant: str, device: str
) -> None:
    """Sums of codes are exact, so neither the number of rows nor that of warps changes them. More than eight experts of
    a row are summed by several threads of the loop that the other program has on a GPU, in another order."""
    model = Block(experts, top, width=256 if quant.startswith("q") else 32).eval()
    fused, apart = both(model, inputs(size, torch.float32)[0], quant, "int8", device=device)
    assert set(forms(fused)) == {"pairs", "mixed"} and set(forms(apart)) == {"plain"}, said(fused)
    codes = [spec.body.codes for spec in fused.plan.kernels if isinstance(spec.body, GroupedLinearKernel)]
    assert any(codes)
    assert len(fused.plan.entries[0].steps) <= len(apart.plan.entries[0].steps) - 2
    for each in inputs(size, torch.float32):
        ours, theirs = fused(each), apart(each)
        if top <= 8:
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
        else:
            assert (ours - theirs).norm() <= 1e-6 * theirs.norm()


@pytest.mark.parametrize(("model", "size", "what", "why"), [
    (Block(4, 2), (3, 1), ["pairs", "plain"], "6 pairs share 4 experts"),
    pytest.param(Block(8, 2), (3, 7), ["plain", "plain"], "21 rows with 42 pairs are more than 8 rows", marks=SLOW),
    pytest.param(Block(4, 2, width=24), (1, 1), ["plain", "mixed"], "are no multiple of 32", marks=SLOW),
])  # fmt: skip
def test_what_stays_apart_says_why(model: Block, size: tuple[int, ...], what: list[str], why: str) -> None:
    x = inputs(size, torch.float32)[0]
    program = qc.qcompile(model.eval(), (x,), quant="int8", verify_each="numerics")
    assert sorted(forms(program)) == sorted(what) and why in said(program)
    with torch.no_grad():
        torch.testing.assert_close(program(x), program.oracle(x), rtol=1e-4, atol=1e-5)


GLU = """
module {
  func.func @main(%x: tensor<1x32xf32>, %w: tensor<128x32xf32>, %i: tensor<2xi64>) -> tensor<2x16xf32> {
    %h = qc.grouped_linear %x, %w, %i {experts = 4, repeat = 2} : tensor<2x32xf32>
    %g = tensor.extract_slice %h[0, 0] [2, 16] [1, 1] : tensor<2x32xf32> to tensor<2x16xf32>
    %u = tensor.extract_slice %h[0, 16] [2, 16] [1, 1] : tensor<2x32xf32> to tensor<2x16xf32>
    %e = tensor.empty() : tensor<2x16xf32>
    %y = linalg.generic {indexing_maps = [affine_map<(a, b) -> (a, b)>, affine_map<(a, b) -> (a, b)>, affine_map<(a, b) -> (a, b)>], iterator_types = ["parallel", "parallel"]} ins(%g, %u : tensor<2x16xf32>, tensor<2x16xf32>) outs(%e : tensor<2x16xf32>) {
    ^bb0(%a: f32, %b: f32, %c: f32):
      %m = arith.mulf %a, %b : f32
      linalg.yield %m : f32
    } -> tensor<2x16xf32>
    func.return %y : tensor<2x16xf32>
  }
}
"""  # noqa: E501


def test_a_weight_that_is_computed_stays_apart() -> None:
    ctx = QCContext.default()
    module = parse_module(GLU, ctx)
    (made,) = parse_passes("fuse-experts")
    made.apply(ctx, module)
    module.verify()
    assert "{experts = 4, repeat = 2} :" in str(module)
    assert [d.why for d in ctx.report.of("fuse-experts")] == ["its weight is computed"]


class Sums(nn.Module):
    """Products with chosen weights, weighed, and summed over an axis that a reshape makes."""

    def __init__(self, shape: tuple[int, ...], axis: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.router, self.shape, self.axis = nn.Linear(64, 8, bias=False), shape, axis
        self.w = nn.Parameter(torch.randn(8, 64, 64, generator=generator) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares, chosen = torch.topk(torch.softmax(self.router(x), -1), 4)
        rows = x.repeat_interleave(4, 0)
        made = torch.bmm(self.w[chosen.reshape(-1)], rows.unsqueeze(-1)).squeeze(-1)
        return (made * shares.reshape(-1, 1)).view(self.shape).sum(self.axis)


@pytest.mark.parametrize(
    ("rows", "shape", "axis", "combined"),
    [
        (1, (4, 4, 16), 1, False),  # over parts of a pair's columns: as many of them as a row has experts
        pytest.param(1, (4, 2, 32), 1, False, marks=SLOW),
        pytest.param(1, (4, 16, 4), 2, False, marks=SLOW),
        pytest.param(2, (4, 2, 64), 1, True, marks=SLOW),  # over halves of a row's experts
        pytest.param(2, (2, 4, 64), 1, True, marks=SLOW),
        pytest.param(2, (2, 4, 64), 0, False, marks=SLOW),  # over rows
    ],
)
def test_a_sum_over_anything_but_experts_stays_apart(
    rows: int, shape: tuple[int, ...], axis: int, combined: bool
) -> None:
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows))
    program = qc.qcompile(Sums(shape, axis).eval(), (x,), quant=qc.QuantConfig("q8_0", promise_bits=None))
    assert ("mixed" in forms(program)) == combined, said(program)
    wanted = program.oracle(x)
    assert (program(x) - wanted).norm() <= 1e-5 * wanted.norm()
