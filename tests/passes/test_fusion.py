"""What fusion joins, what it leaves alone, and that it keeps the numbers."""

from __future__ import annotations

import cProfile
import pstats
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from xdsl.dialects import arith, math

from qcompiler.ir import build, qc
from qcompiler.ir.types import shape_of, tensor
from qcompiler.passes.checks.numerics import count_roundings
from qcompiler.passes.pipeline import STAGES, run_pipeline

MIDDLE = [
    "canonicalize", "cse", "dce", "fold-views", "raise-idioms", "specialize", "hoist-constant-masks",
    "fuse-dequant-matmul", "fuse-epilogues", "fuse-elementwise",
]  # fmt: skip


def sample(*shape: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return np.random.default_rng(3).standard_normal(shape).astype(dtype)


def test_later_linear_takes_the_sum_of_two(make: Any) -> None:
    x = make.arg(("b", "s", 8))
    first, second = make.linear(x, make.const(6, 8)), make.linear(x, make.const(6, 8))
    make.finish(make.pointwise(arith.AddfOp, first, second))
    make.run(MIDDLE, [sample(2, 3, 8)])
    assert make.ops() == ["qc.linear", "qc.linear"]
    linears = [op for op in make.module.walk() if isinstance(op, qc.LinearOp)]
    assert [len(op.extras) for op in linears] == [0, 1]


def test_activation_written_as_a_diamond_reaches_the_epilogue(make: Any) -> None:
    x = make.arg(("s", 8))
    y = make.linear(x, make.const(6, 8), make.const(6))
    cube = make.pointwise(arith.MulfOp, y, make.pointwise(arith.MulfOp, y, y))
    wave = make.pointwise(math.TanhOp, make.scaled(make.pointwise(arith.AddfOp, y, make.scaled(cube, 0.044715)), 0.8))
    make.finish(make.pointwise(arith.MulfOp, make.scaled(y, 0.5), make.scaled(wave, 1.0, arith.AddfOp)))
    make.run(MIDDLE, [sample(5, 8)])
    assert make.ops() == ["qc.linear"]


def test_residual_that_is_read_twice_stays_a_tensor(make: Any) -> None:
    x = make.arg(("s", 8))
    h = make.pointwise(arith.AddfOp, x, make.linear(x, make.const(8, 8)))
    make.finish(make.pointwise(arith.AddfOp, h, make.linear(h, make.const(8, 8))))
    make.run(MIDDLE, [sample(5, 8)])
    assert make.ops() == ["qc.linear", "qc.linear"]


def test_matmul_of_joined_rows_is_a_linear_of_its_own_rank(make: Any) -> None:
    x = make.arg(("b", "s", 8))
    rows = build.reshape(make.builder, x, ("b*s", 8))
    y = make.op(qc.BatchMatmulOp(rows, make.const(8, 6), tensor(("b*s", 6), "f32")))
    y = make.pointwise(arith.AddfOp, y, make.const(6))
    make.finish(make.pointwise(math.TanhOp, build.reshape(make.builder, y, ("b", "s", 6))))
    make.run(MIDDLE, [sample(2, 3, 8)])
    assert "qc.batch_matmul" not in make.ops()
    assert "linalg.generic" not in make.ops()


def test_dear_producer_is_not_computed_again_for_each_column(make: Any) -> None:
    x, row = make.arg(("s", 8)), make.arg((8,))
    make.finish(make.pointwise(arith.MulfOp, x, make.pointwise(math.ExpOp, row)))
    make.run(MIDDLE, [sample(5, 8), sample(8)])
    assert make.ops() == ["linalg.generic", "linalg.generic"]


def test_loop_keeps_its_size_when_its_last_full_operand_is_fused(make: Any) -> None:
    row = make.arg((8,))
    wide = build.broadcast_to(make.builder, row, ("s", 8))
    y = make.arg(("s",))
    make.finish(build.reduce(make.builder, make.scaled(wide, 2.0), [0], "add"), y)
    make.run(MIDDLE, [sample(8), sample(5)])


def test_bf16_linear_loses_one_rounding_per_fused_op(make: Any) -> None:
    x, r = make.arg(("s", 8), "bf16"), make.arg(("s", 6), "bf16")
    w = make.const(values=sample(6, 8, dtype=ml_dtypes.bfloat16))
    y = make.pointwise(math.TanhOp, make.linear(x, w))
    make.finish(make.pointwise(arith.AddfOp, y, r))
    before = count_roundings(make.module).total()
    make.run(MIDDLE, [sample(5, 8, dtype=ml_dtypes.bfloat16), sample(5, 6, dtype=ml_dtypes.bfloat16)])
    assert (before, count_roundings(make.module).total()) == (3, 1)
    assert make.ops() == ["qc.linear"]


UNARY = [math.TanhOp, math.ExpOp, arith.NegfOp, math.AbsFOp]
BINARY = [arith.AddfOp, arith.MulfOp, arith.MaximumfOp]
STEP = st.tuples(
    st.sampled_from(["unary", "binary", "linear", "reshape", "transpose", "mean", "slice"]), *[st.integers(0, 99)] * 3
)


def grow(make: Any, steps: list[tuple[str, int, int, int]], dtype: str) -> None:
    """A random program over (b, s, 8) tensors and small views of them."""
    values = [make.arg(("b", "s", 8), dtype), make.arg(("b", "s", 8), dtype)]
    for kind, a, b, c in steps:
        x, y = values[a % len(values)], values[b % len(values)]
        match kind:
            case "unary":
                made = make.pointwise(math.TanhOp, make.pointwise(UNARY[c % 4], x))
            case "binary":
                made = make.pointwise(BINARY[c % 3], x, y)
            case "linear":
                weight = sample(8, 8, dtype=ml_dtypes.bfloat16 if dtype == "bf16" else np.float32) / 4
                made = make.linear(x, make.const(values=weight.astype(weight.dtype)))
            case "reshape":
                flat = make.pointwise(math.TanhOp, build.reshape(make.builder, x, ("b*s", 8)))
                made = build.reshape(make.builder, flat, ("b", "s", 8))
            case "transpose":
                turned = make.pointwise(math.AbsFOp, build.transpose(make.builder, x, (1, 0, 2)))
                made = build.transpose(make.builder, turned, (1, 0, 2))
            case "mean":
                total = build.reshape(make.builder, build.reduce(make.builder, y, [2], "max"), ("b", "s", 1))
                made = make.pointwise(arith.SubfOp, x, total)
            case _:
                half = build.extract_slice(make.builder, x, [0, 0, 4 * (c % 2)], ("b", "s", 4))
                made = build.concat(make.builder, [make.pointwise(arith.NegfOp, half), half], 2)
        values.append(made)
    assert all(shape_of(v.type) == ("b", "s", 8) for v in values)
    make.finish(values[-1], values[len(values) // 2])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(steps=st.lists(STEP, min_size=1, max_size=10), dtype=st.sampled_from(["f32", "f32", "bf16"]))
def test_random_programs_keep_their_answers_through_the_middle(maker: Any, steps: Any, dtype: str) -> None:
    make = maker()
    grow(make, steps, dtype)
    kind = ml_dtypes.bfloat16 if dtype == "bf16" else np.float32
    make.run(MIDDLE, [sample(2, 3, 8, dtype=kind), sample(2, 3, 8, dtype=kind) + kind(1)])


@pytest.mark.parametrize(("shape", "size"), [("chain", 520), ("layers", 25)])
def test_fusing_twice_as_many_ops_takes_twice_the_work(maker: Any, shape: str, size: int) -> None:
    def calls(count: int) -> int:
        make = maker()
        x = h = make.arg(("s", 8))
        w = make.const(8, 8)
        for n in range(count):
            h = make.scaled(h, 1.0 + n)
            if shape == "layers":
                h = make.pointwise(arith.AddfOp, x, make.pointwise(math.TanhOp, make.linear(h, w)))
        module = make.finish(h)
        chosen = ["fold-views", "raise-idioms", "fuse-dequant-matmul", "fuse-epilogues", "fuse-elementwise"]
        profile = cProfile.Profile()
        profile.runcall(run_pipeline, module, make.ctx, stages=[s for s in STAGES if s.name in chosen])
        return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]

    calls(2)  # what is computed once
    assert calls(2 * size) < 2.2 * calls(size)


@pytest.mark.parametrize(
    ("step", "pairs"), [(math.FloorOp, 1), (math.TruncOp, 1), (math.RoundEvenOp, 1), (math.AbsFOp, 0)]
)
def test_a_rounding_in_front_of_a_step_stays(make: Any, step: Any, pairs: int) -> None:
    """17.98 is 18 in bf16, and its floor is not that of 17.98; of what does not jump the rounding may go."""
    x, y = make.arg((64,), "bf16"), make.arg((64,), "bf16")
    make.finish(make.pointwise(step, make.pointwise(arith.DivfOp, x, y)))
    inputs = [
        np.abs(sample(64, dtype=np.float32) * 40).astype(ml_dtypes.bfloat16),
        np.full(64, 0.3, ml_dtypes.bfloat16),
    ]
    make.run(MIDDLE, inputs)
    (nest,) = (op for op in make.module.walk() if op.name == "linalg.generic")
    kept = [op for op in nest.walk() if isinstance(op, arith.TruncFOp) and op.result.uses]
    assert len(kept) == 1 + pairs
