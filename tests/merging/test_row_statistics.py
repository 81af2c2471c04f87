"""A norm of many rows in the linear that reads it, on a GPU: a launch less, torch's numbers, and a reason elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from by_path import load
from torch import nn

import qcompiler as qc
from qcompiler.ir.context import QCContext, Target
from qcompiler.ir.interpreter import run
from qcompiler.ir.text import parse_module
from qcompiler.kernels.cost import device_cost
from qcompiler.kernels.statistics_choice import StatisticsQuery, time_in_linears, time_of_norm, verdict
from qcompiler.passes.pipeline import parse_passes
from qcompiler.plan.kinds.linear import LinearKernel
from qcompiler.plan.kinds.norm import NormKernel

SLOW = pytest.mark.slow
prologue = load("tests/merging/test_norm_prologue.py")


class Layers(nn.Module):
    """Pre-norm layers, as in a ViT: the linear in front of each norm adds a residual."""

    def __init__(self, norm: str, k: int, count: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(k, k)
        self.norms = nn.ModuleList(prologue.NORMS[norm](k) for _ in range(count))
        self.ups = nn.ModuleList(nn.Linear(k, 2 * k + 3) for _ in range(count))
        self.downs = nn.ModuleList(nn.Linear(2 * k + 3, k) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.first(x)
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + down(torch.relu(up(norm(x))))
        return x


def said(program: qc.Program) -> str:
    return "; ".join(
        f"{c.path}: {c.what}: {c.why}" for c in program.report().choices if c.stage == "fuse-row-statistics"
    )


def check(norm: str, k: int, m: tuple[int, ...], dtype: torch.dtype, quant: str, bound: float) -> qc.Program:
    """Two launches less; the numbers are as close to torch's, in float64, as with norms apart."""
    torch.manual_seed(k + m[-1])
    model = Layers(norm, k).eval().to(dtype)
    x = torch.randn(*m, k).to(dtype)
    fused, apart = prologue.both(model, x, quant, device="sim:0")
    bodies = [spec.body for spec in fused.plan.kernels]
    assert prologue.launches(fused) == prologue.launches(apart) - 2 == 5, said(fused)
    assert not any(isinstance(body, NormKernel) for body in bodies)
    linears = [body for body in bodies if isinstance(body, LinearKernel)]
    assert sum(body.given is not None for body in linears) == 2 == sum(body.statistics is not None for body in linears)
    for each in (x, x + 3, torch.zeros_like(x)):
        ours, theirs = fused(each).double(), apart(each).double()
        assert float((ours - theirs).norm() / theirs.norm()) <= bound
    if quant == "float":
        with torch.no_grad():
            exact = model.double()(x.double())
        ours = fused(x).double()
        assert float((ours - exact).norm() / exact.norm()) <= max(bound, 1e-6)
    return fused


@pytest.mark.parametrize(
    ("norm", "k", "m", "dtype", "quant", "bound"),
    [
        ("layer", 64, (1, 17), torch.float32, "float", 1e-6),
        *(
            pytest.param(*each, marks=SLOW)
            for each in (
                ("rms", 97, (9,), torch.bfloat16, "float", 1e-2),
                ("layer", 64, (2, 33), torch.bfloat16, "nf4", 1e-2),
                ("layer_bare", 128, (1, 64), torch.float16, "int8", 2e-3),
                ("rms", 64, (16,), torch.float32, "nf4", 1e-6),
                ("layer_weight", 31, (1, 65), torch.float32, "float", 1e-6),
            )
        ),
    ],
)  # fmt: skip
def test_a_norm_of_many_rows_is_no_launch(
    norm: str, k: int, m: tuple[int, ...], dtype: torch.dtype, quant: str, bound: float
) -> None:
    check(norm, k, m, dtype, quant, bound)


def test_a_saved_program_gives_the_same_bits(tmp_path: Path) -> None:
    torch.manual_seed(1)
    x = torch.randn(1, 9, 64)
    program = qc.qcompile(Layers("rms", 64, 1).eval(), (x,), quant="nf4", device="sim:0", verify_each="numerics")
    assert "statistics of 'first'" in said(program)
    program.save(tmp_path / "layers.qca")
    loaded = qc.load(tmp_path / "layers.qca", verify="full", device="sim:0")
    assert np.array_equal(np.asarray(loaded(x.numpy())), program(x).numpy())


def test_readers_of_the_normalised_rows_keep_the_kernel() -> None:
    """As in BERT, whose residual is the normalised rows; the report says so."""
    torch.manual_seed(2)
    program = qc.qcompile(prologue.PostNorm("layer", 64).eval(), (torch.randn(9, 64),), device="sim:0", quant="nf4")
    assert any(isinstance(spec.body, NormKernel) for spec in program.plan.kernels)
    assert "first: norm: a kernel of its own: no linear writes its rows" in said(program)
    assert "second: norm: a kernel of its own: several ops read it" in said(program)


# --- what the pass leaves alone --------------------------------------------------------------------------------------

LINES = """
builtin.module {{
  func.func @main(%x: tensor<{m}x8xf32>, %v: tensor<8x8xf32>, %w: tensor<6x8xf32>) -> {out} {{
    %h = qc.linear %x, %v : tensor<{m}x8xf32>
    {lines}
  }}
}}
"""
NORM = "%n = qc.rms_norm %h {{eps = 1.000000e-05}} : tensor<{m}x8xf32>"
LINEAR = "%y = qc.linear %n, %w : tensor<{m}x6xf32>"
RETURN = "func.return %y : tensor<{m}x6xf32>"
OUT = "tensor<{m}x6xf32>"
CASES: dict[str, tuple[int, str, list[str], str]] = {
    "few rows": (8, OUT, [NORM, LINEAR, RETURN], "computes the statistics itself"),
    "another reader": (9, f"({OUT}, tensor<{{m}}x8xf32>)", [
        NORM, LINEAR, "func.return %y, %n : tensor<{m}x6xf32>, tensor<{m}x8xf32>"], "several ops read it"),
    "two linears": (9, f"({OUT}, tensor<{{m}}x5xf32>)", [
        NORM, "%u = qc.const @u : tensor<5x8xf32>", LINEAR, "%z = qc.linear %n, %u : tensor<{m}x5xf32>",
        "func.return %y, %z : tensor<{m}x6xf32>, tensor<{m}x5xf32>"], "several ops read it"),
    "no linear in front": (9, OUT, [NORM.replace("%h", "%x"), LINEAR, RETURN], "no linear writes its rows"),
    "no linear behind": (9, "tensor<{m}x8xf32>", [NORM, "func.return %n : tensor<{m}x8xf32>"], "no linear multiplies"),
    "a transposed row": (9, "tensor<8x6xf32>", [
        "%e = tensor.empty() : tensor<8x9xf32>",
        "%t = linalg.transpose ins(%h : tensor<9x8xf32>) outs(%e : tensor<8x9xf32>) permutation = [1, 0]",
        "%u = qc.const @u : tensor<6x9xf32>",
        "%n = qc.rms_norm %t {{eps = 1.000000e-05}} : tensor<8x9xf32>", "%y = qc.linear %n, %u : tensor<8x6xf32>",
        "func.return %y : tensor<8x6xf32>"], "no linear writes its rows"),
    "a wide linear": (4096, OUT.replace("6", "60000"), [
        NORM, "%u = qc.const @u : tensor<60000x8xf32>", "%y = qc.linear %n, %u : tensor<{m}x60000xf32>",
        "func.return %y : tensor<{m}x60000xf32>"], "us in a kernel of its own"),
}  # fmt: skip


def fused(text: str, target: Target, passes: str = "fuse-row-statistics") -> tuple[str, str]:
    """(the text after the pass, what it reports)."""
    ctx = QCContext.default(target=target)
    module = parse_module(text, ctx)
    (made,) = parse_passes(passes)
    made.apply(ctx, module)
    module.verify()
    return str(module), "; ".join(f"{d.what}: {d.why}" for d in ctx.report.of("fuse-row-statistics"))


def text_of(m: int, out: str, lines: list[str]) -> str:
    return LINES.format(m=m, out=out.format(m=m), lines="\n    ".join(line.format(m=m) for line in lines))


GPU = Target("cuda", "sm_90a")


@pytest.mark.parametrize("case", CASES)
def test_a_norm_keeps_its_kernel(case: str) -> None:
    m, out, lines, why = CASES[case]
    text = text_of(m, out, lines)
    after, reported = fused(text, GPU)
    assert why in reported and "statistics" not in after, reported


def test_the_plain_case_is_fused_and_the_interpreter_agrees() -> None:
    """So that what stops the others is their difference from it."""
    plain = text_of(9, OUT, [NORM, LINEAR, RETURN])
    after, reported = fused(plain, GPU)
    assert 'statistics = "rms"' in after and "qc.rms_norm" in after.partition("prologue {")[2]
    assert "estimated for sm_90a" in reported
    assert "statistics" not in fused(plain, Target("cpu", "x86-64-v3"))[0]
    assert "keeps it separate" in fused(plain, GPU, 'fuse-row-statistics{separate="*"}')[1]
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal(shape).astype(np.float32) for shape in ((9, 8), (8, 8), (6, 8))]
    ctx = QCContext.default()
    before, now = (run(parse_module(text, ctx), ctx.weights, inputs)[0] for text in (plain, after))
    np.testing.assert_allclose(now, before, rtol=1e-5, atol=1e-6)


def test_the_estimate_weighs_rows_against_blocks() -> None:
    """ViT-B/16 in bf16 on an H100: with 17 rows the norms pay in q, k and v and in fc1, with 197 they stay apart."""

    def query(m: int, n: int) -> StatisticsQuery:
        return StatisticsQuery(m=m, k=768, n=n, dtype="bf16", kind="layer", vectors=("bf16", "bf16"))

    device = device_cost("sm_90a")
    for n in (2304, 3072):
        assert time_in_linears(query(17, n), device) < time_of_norm(query(17, n), device)
        assert time_in_linears(query(197, n), device) > time_of_norm(query(197, n), device)
        assert verdict(query(17, n), "cuda", ("sm_90a",)).pays and not verdict(query(197, n), "cuda", ("sm_90a",)).pays
    told = verdict(query(197, 2304), "cuda", ("sm_90a",)).why
    assert "us in the linears" in told and "us in a kernel of its own" in told


def test_vectors_that_have_no_room_beside_the_tiles_are_named() -> None:
    given: Any = {"m": 64, "k": 8192, "n": 64, "dtype": "f16", "kind": "layer", "vectors": ("f16", "f16")}
    found = verdict(StatisticsQuery(**given), "cuda", ("sm_75",))
    assert not found.pays and "bytes of shared memory, and sm_75 has" in found.why
