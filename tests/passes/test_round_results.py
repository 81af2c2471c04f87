"""Which results are stored in bf16, that they have the bits their readers made of them, and who keeps them in fp32."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from xdsl.dialects import math as elementary

import qcompiler as qc
from qcompiler.ir import build
from qcompiler.ir import qc as dialect
from qcompiler.ir.types import tensor, tensor_dtype
from qcompiler.passes.checks.answers import answers

Array = np.ndarray[Any, Any]


def weight(make: Any, rows: int, columns: int, dtype: Any = ml_dtypes.bfloat16) -> Any:
    """A matrix in bf16, by which a linear says that it rounds its rows."""
    return make.const(values=(make.rng.standard_normal((rows, columns)) / 4).astype(dtype))


def linear(make: Any, x: Any, w: Any) -> Any:
    shape = (*x.type.get_shape()[:-1], w.type.get_shape()[0])
    return make.op(dialect.LinearOp(x, w, None, tensor(shape, "f32")))


def checked(make: Any, x: Array) -> list[str]:
    """Runs the pass, holds that it changes no bit, and returns the types of linears and attention, in order."""
    before = answers(make.module, make.ctx, [x], {})["main"]
    make.run(["round-results"], [x])
    after = answers(make.module, make.ctx, [x], {})["main"]
    assert [a.tobytes() for a in after] == [b.tobytes() for b in before]
    kinds = dialect.LinearOp, dialect.AttentionOp
    return [tensor_dtype(op.result.type) for op in make.module.walk() if isinstance(op, kinds)]


def rows(*shape: int) -> Array:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("dtype, stored", [(ml_dtypes.bfloat16, "bf16"), (np.float32, "f32"), (np.float16, "f32")])
def test_what_a_linear_rounds_is_stored_rounded(make: Any, dtype: Any, stored: str) -> None:
    x = make.arg((3, 32))
    y = linear(make, x, weight(make, 16, 32))
    make.finish(linear(make, y, weight(make, 8, 16, dtype)))
    assert checked(make, rows(3, 32)) == [stored, "f32"]


def test_an_epilogue_rounds_its_last_value(make: Any) -> None:
    x = make.arg((3, 32))
    y = make.pointwise(elementary.ErfOp, linear(make, x, weight(make, 16, 32)))
    make.finish(linear(make, y, weight(make, 8, 16)))
    make.run(["fuse-epilogues"])
    assert checked(make, rows(3, 32)) == ["bf16", "f32"]
    assert "math.erf" in str(make.module) and "arith.truncf" in str(make.module)


def test_results_of_the_program_and_residuals_stay_in_fp32(make: Any) -> None:
    x = make.arg((3, 32))
    y = linear(make, x, weight(make, 32, 32))
    z = linear(make, y, weight(make, 32, 32))
    make.finish(linear(make, z, weight(make, 8, 32)), make.pointwise(elementary.ErfOp, y), z)
    assert checked(make, rows(3, 32)) == ["f32", "f32", "f32"]


def test_a_result_that_is_a_weight_as_well_stays_in_fp32(make: Any) -> None:
    x = make.arg((32, 32))
    y = linear(make, x, weight(make, 32, 32))
    make.finish(make.op(dialect.LinearOp(y, y, None, tensor((32, 32), "f32"))))
    assert checked(make, rows(32, 32)) == ["f32", "f32"]


def test_a_result_that_is_a_bias_as_well_stays_in_fp32(make: Any) -> None:
    y = linear(make, make.arg((16,)), weight(make, 16, 16))
    make.finish(make.op(dialect.LinearOp(y, weight(make, 16, 16), y, tensor((16,), "f32"))))
    assert checked(make, rows(16)) == ["f32", "f32"]


@pytest.mark.parametrize("place", ["mask", "sinks"])
def test_a_result_that_is_a_mask_or_a_sink_as_well_stays_in_fp32(make: Any, place: str) -> None:
    y = linear(make, make.arg((1, 1, 1, 16)), weight(make, 1 if place == "sinks" else 16, 16))
    heads = [make.const(1, 1, n, y.type.get_shape()[-1]) for n in (1, 1)]
    extra = {"mask": build.extract_slice(make.builder, y, (0, 0, 0, 0), (1, 1, 1, 1), (1, 1, 1, 1)), "sinks": None}
    extra = {**extra, "sinks": y, "mask": None} if place == "sinks" else extra
    op = dialect.AttentionOp(y, *heads, extra["mask"], tensor(y.type.get_shape(), "f32"), scale=0.25, compute="bf16",
                             sinks=extra["sinks"])  # fmt: skip
    make.finish(make.op(op))
    assert checked(make, rows(1, 1, 1, 16)) == ["f32", "f32"]


def test_one_reader_that_does_not_round_keeps_joined_results_in_fp32(make: Any) -> None:
    """q, k and v are columns of one result, and something is done with q."""
    x = make.arg((1, 1, 5, 16))
    whole = linear(make, x, weight(make, 48, 16))
    parts = [build.extract_slice(make.builder, whole, (0, 0, 0, 16 * i), (1, 1, 5, 16), (1, 1, 1, 1)) for i in range(3)]
    q = make.pointwise(elementary.ErfOp, parts[0])
    make.finish(make.op(dialect.AttentionOp(q, *parts[1:], None, parts[0].type, scale=0.25, compute="bf16")))
    assert checked(make, rows(1, 1, 5, 16)) == ["f32", "f32"]


def test_repeated_heads_are_read_through_broadcasts(make: Any) -> None:
    x = make.arg((2, 5, 32))
    q, k, v = (linear(make, x, weight(make, n, 32)) for n in (32, 16, 16))
    heads = [build.transpose(make.builder, build.reshape(make.builder, p, (2, 5, n, 16)), (0, 2, 1, 3))
             for p, n in ((q, 2), (k, 1), (v, 1))]  # fmt: skip
    wide = [build.broadcast_to(make.builder, each, (2, 2, 5, 16)) for each in heads[1:]]
    make.finish(make.op(dialect.AttentionOp(heads[0], *wide, None, heads[0].type, scale=0.25, compute="bf16")))
    assert checked(make, rows(2, 5, 32)) == ["bf16", "bf16", "bf16", "f32"]


@pytest.mark.parametrize("compute, stored", [("bf16", "bf16"), (None, "f32")])
def test_attention_reads_through_views(make: Any, compute: str | None, stored: str) -> None:
    x = make.arg((2, 5, 32))
    whole = linear(make, x, weight(make, 96, 32))
    parts = [build.extract_slice(make.builder, whole, (0, 0, 32 * i), (2, 5, 32), (1, 1, 1)) for i in range(3)]
    heads = [build.transpose(make.builder, build.reshape(make.builder, p, (2, 5, 2, 16)), (0, 2, 1, 3)) for p in parts]
    shape = tensor((2, 2, 5, 16), "f32")
    mixed = make.op(dialect.AttentionOp(*heads, None, shape, scale=0.25, compute=compute))
    joined = build.reshape(make.builder, build.transpose(make.builder, mixed, (0, 2, 1, 3)), (2, 5, 32))
    make.finish(linear(make, joined, weight(make, 8, 32)))
    assert checked(make, rows(2, 5, 32)) == [stored, "bf16", "f32"]


class Block(nn.Module):
    """A block of an encoder; its norm is behind the addition, or in front of the linears."""

    def __init__(self, *, gated: bool = False, norm_first: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(64, 64) for _ in range(4))
        self.up, self.gate, self.down = nn.Linear(64, 128), nn.Linear(64, 128), nn.Linear(128, 64)
        self.norm, self.gated, self.norm_first = nn.LayerNorm(64), gated, norm_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x) if self.norm_first else x
        q, k, v = (m(y).unflatten(-1, (4, 16)).transpose(1, 2) for m in (self.q, self.k, self.v))
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        y = self.norm(x)
        wide = functional.silu(self.gate(y)) * self.up(y) if self.gated else functional.gelu(self.up(y))
        return self.down(wide) + (x if self.norm_first else y)


def results_in_bf16(program: Any) -> int:
    """How many launches of linears and of attention write bf16."""
    bodies = ("linear", "int_linear", "attention")
    kernels = [kernel for kernel in program.plan.kernels if kernel.template.startswith(bodies)]
    return sum(kernel.operands[-1].dtype == "bf16" for kernel in kernels)


SOME = [("cpu", {}, "nf4"), ("cpu", {"gated": True}, "int8"), ("cpu", {"norm_first": True}, "int8"),
        ("sim:0", {}, "int8")]  # fmt: skip
OTHERS = [(device, options, form) for device in ("cpu", "sim:0") for options in ({}, {"gated": True},
          {"norm_first": True}) for form in ("nf4", "int8") if (device, options, form) not in SOME]  # fmt: skip


@pytest.mark.parametrize("device, options, form", [*SOME, *(pytest.param(*o, marks=pytest.mark.slow) for o in OTHERS)])
def test_programs_compute_what_their_recipe_says(device: str, options: dict[str, bool], form: str) -> None:
    torch.manual_seed(3)
    model, x = Block(**options).eval(), torch.randn(2, 9, 64)
    for compute in ("bf16", *(("int8",) if form == "int8" else ())):
        program = qc.qcompile(model, (x,), quant=qc.QuantConfig(form, compute=compute), device=device)
        exact = qc.qcompile(model, (x,), quant=qc.QuantConfig(form, compute="exact"), device=device)
        found, wanted = np.asarray(program(x)), np.asarray(exact(x))
        limit = 0.02 if compute == "bf16" else 0.05
        assert np.abs(found - wanted).max() <= limit * np.abs(wanted).max()
        assert results_in_bf16(exact) == 0
        # q, k and v, attention, and what the gate or the gelu makes. A GPU's linears read rows that a loop has rounded,
        # and the loop reads what attention gives.
        rounded = {"cpu": 3, "sim:0": 2}[device]
        assert results_in_bf16(program) == (rounded if compute == "bf16" else 1)
