"""Random loop nests (fixed seeds) against NumPy: permuted, broadcast, offset and padded operands, reductions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from qcompiler.plan.dims import Dim, dim
from qcompiler.plan.kernel import DType, KernelSpec, Operand, ScalarOp, ScalarProgram
from qcompiler.plan.kinds.loop import AffineAccess, LoopKernel
from qcompiler.plan.weights import NUMPY_DTYPES

COUNT = 60
SYMBOLS = {"a": 3, "b": 18, "c": 47}


@dataclass(frozen=True)
class Nest:
    """`operands`: (dtype, offset, strides as numbers); the last one is the output."""

    spec: KernelSpec
    sizes: tuple[int, ...]
    reduced: tuple[int, ...]
    operands: tuple[tuple[DType, int, tuple[int, ...]], ...]
    maximum: bool


def random_nest(seed: int) -> Nest:
    rng = np.random.default_rng(seed)
    rank = int(rng.integers(1, 5))
    choices: list[Dim] = [1, 2, 5, 16, 17, 33, "a", "b", "c"]
    extents = tuple(choices[i] for i in rng.integers(0, len(choices), rank))
    sizes = tuple(SYMBOLS[e] if isinstance(e, str) else int(e) for e in extents)
    reduces = rank > 1 and rng.random() < 0.45
    parallel = int(rng.integers(1, rank)) if reduces else rank
    iterators = ("parallel",) * parallel + ("reduction",) * (rank - parallel)
    maximum = bool(rng.random() < 0.3)
    inputs = int(rng.integers(1, 4))
    dtypes: list[DType] = ["f32", "f32", "f32", "bf16", "f16"]
    accesses, operands = [], []
    for i in range(inputs + 1):
        output = i == inputs
        axes = list(range(parallel if output else rank))
        dropped = [] if output else [a for a in axes if rng.random() < 0.2]
        order = [int(a) for a in rng.permutation([a for a in axes if a not in dropped])]
        if rng.random() < 0.6:
            order.sort()
        offset, padding = int(rng.integers(0, 4)), int(rng.integers(0, 3)) if rng.random() < 0.3 else 0
        coefficients: list[Dim] = [0] * rank
        step = dim(int(rng.integers(1, 3)) if rng.random() < 0.15 else 1)
        for axis in reversed(order):
            coefficients[axis] = step.to_dim()
            step = step * dim(extents[axis]) + padding
        accesses.append(AffineAccess(offset=offset, coefficients=tuple(coefficients)))
        dtype: DType = "f32" if output else dtypes[int(rng.integers(0, len(dtypes)))]
        operands.append((dtype, offset, tuple(dim(c).evaluate(SYMBOLS) for c in coefficients)))
    spec = KernelSpec(
        name=f"random_{seed}",
        symbols=tuple(SYMBOLS),
        operands=tuple(
            Operand(name=f"x{i}", dtype=d, access="w" if i == inputs else "r", shape=())
            for i, (d, _, _) in enumerate(operands)
        ),
        body=LoopKernel(
            extents=extents,
            iterators=iterators,  # type: ignore[arg-type]
            accesses=tuple(accesses),
            body=program([d for d, _, _ in operands], reduces, maximum),
            init=(("-inf" if maximum else "0x0p+0"),) if reduces else (),
        ),
    )
    return Nest(spec, sizes, tuple(range(parallel, rank)), tuple(operands), maximum)


def program(dtypes: list[DType], reduces: bool, maximum: bool) -> ScalarProgram:
    """x0 + x1 * x2 (as many as there are), widened to f32, then folded into the accumulator if there is one."""
    count = len(dtypes) - 1
    ops: list[ScalarOp] = []
    values = []
    for i in range(count):
        if dtypes[i] != "f32":
            ops.append(ScalarOp(result=f"w{i}", op="arith.extf", dtype="f32", args=(f"in{i}",)))
        values.append(f"in{i}" if dtypes[i] == "f32" else f"w{i}")
    result = values[0]
    if count == 3:
        ops.append(ScalarOp(result="m", op="arith.mulf", dtype="f32", args=(values[1], values[2])))
        values[1] = "m"
    if count > 1:
        ops.append(ScalarOp(result="s", op="arith.addf", dtype="f32", args=(values[0], values[1])))
        result = "s"
    if reduces:
        fold = "arith.maximumf" if maximum else "arith.addf"
        ops.append(ScalarOp(result="f", op=fold, dtype="f32", args=(result, "acc")))
        result = "f"
    inputs = tuple((f"in{i}" if i < count else "acc", d) for i, d in enumerate(dtypes))
    return ScalarProgram(inputs=inputs, ops=tuple(ops), yields=(result,))


NESTS = [random_nest(seed) for seed in range(COUNT)]


@pytest.fixture(scope="module")
def kernels(build: Callable[..., Any], isa: str) -> Any:
    return build([nest.spec for nest in NESTS], isa)


def view(memory: np.ndarray, offset: int, strides: tuple[int, ...], sizes: tuple[int, ...]) -> np.ndarray:
    steps = [s * memory.itemsize for s in strides]
    return np.lib.stride_tricks.as_strided(memory[offset:], sizes, steps)


@pytest.mark.parametrize("nest", NESTS, ids=lambda n: n.spec.name)
def test_random_nest_matches_numpy(kernels: Any, nest: Nest) -> None:
    rng = np.random.default_rng(99)
    arrays = []
    for dtype, offset, strides in nest.operands:
        size = offset + 1 + sum((n - 1) * s for n, s in zip(nest.sizes, strides, strict=True))
        arrays.append(rng.normal(size=size).astype(NUMPY_DTYPES[dtype]))
    got = kernels.run_both(nest.spec.name, lambda: [a.copy() for a in arrays], list(SYMBOLS.values()))[-1]
    x = [view(a, o, s, nest.sizes).astype(np.float32) for a, (_, o, s) in zip(arrays, nest.operands, strict=True)][:-1]
    value = x[0] + x[1] * x[2] if len(x) == 3 else x[0] + x[1] if len(x) == 2 else x[0]
    if nest.reduced:
        value = value.max(nest.reduced) if nest.maximum else value.astype(np.float64).sum(nest.reduced)
    want = arrays[-1].copy()
    _, offset, strides = nest.operands[-1]
    kept = len(nest.sizes) - len(nest.reduced)
    view(want, offset, strides[:kept], nest.sizes[:kept])[...] = value
    if nest.reduced and not nest.maximum:
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-3)
    else:
        assert got.tobytes() == want.tobytes()


def test_the_nests_reach_every_form(kernels: Any) -> None:
    """The seeds are worth their time: each form of loop kernel stands in the source."""
    for note in ("// 16 lanes along", "// 16 x 16 tiles", "// 16 partial results", "// 16 outputs at once",
                 "// scalar, in order"):  # fmt: skip
        assert note in kernels.source, note
