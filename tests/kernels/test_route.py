"""route on the CPU equals its definition at every size, with any number of threads, and the kernels it replaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kernel_cases import PORTABLE_ISAS
from route_cases import FORMS, close, routed, rows, spec

from qcompiler.plan.kernel import Access, DType, KernelSpec, Operand
from qcompiler.plan.kinds.order import OrderKernel
from qcompiler.plan.kinds.route import Scores
from qcompiler.plan.kinds.softmax import SoftmaxKernel
from qcompiler.plan.weights import NUMPY_DTYPES

SIZES = ((1, 1), (8, 8), (13, 3), (60, 4), (257, 32))
TYPES: tuple[tuple[DType, DType], ...] = (("bf16", "f32"), ("f32", "bf16"), ("f16", "f16"))


def operand(name: str, kind: DType, shape: tuple[int, ...], access: Access = "w") -> Operand:
    """Contiguous, with a last dim of 1 if it has three."""
    strides = (shape[1], 1, 1)[: len(shape)]
    return Operand(name=name, dtype=kind, access=access, shape=shape, strides=strides)


def parts(cols: int) -> list[KernelSpec]:
    """A softmax, and a top-k of 3 of its result."""
    ends = (operand("x", "f32", (9, cols), "r"), operand("out", "f32", (9, cols)))
    picked = (operand("values", "f32", (9, 3, 1)), operand("indices", "i64", (9, 3, 1)))
    order = OrderKernel(outer=9, length=cols, count=3, inner=1, descending=True)
    return [
        KernelSpec(name=f"softmax_{cols}", symbols=(), operands=ends, body=SoftmaxKernel(rows=9, cols=cols)),
        KernelSpec(
            name=f"order_{cols}", symbols=(), operands=(operand("x", "f32", (9, cols, 1), "r"), *picked), body=order
        ),
    ]


SPECS = [
    *(spec(f"{form[0]}_{form[1]}_{cols}", 9, cols, count, form) for cols, count in SIZES for form in FORMS),
    *(spec(f"{form[0]}_{form[1]}_{dtype}_{made}", "r", 13, 3, form, dtype=dtype, made=made)
      for dtype, made in TYPES for form in FORMS),
    *(spec(f"apart_{form[0]}", 9, 13, 3, form, apart=2) for form in FORMS[1:]),
    *(spec(f"three_{cols}", 9, cols, 3, ("all", False)) for cols in (13, 128)), *parts(13), *parts(128),
]  # fmt: skip


@pytest.fixture(scope="module", params=PORTABLE_ISAS)
def kernels(build: Callable[..., Any], request: pytest.FixtureRequest) -> Any:
    return build(SPECS, request.param)


def outputs(rows: int, count: int, made: DType = "f32") -> list[np.ndarray]:
    return [np.full((rows, count), -1, NUMPY_DTYPES[made]), np.full((rows, count), -1, np.int64)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("cols", "count"), SIZES)
def test_rows_have_the_defined_experts(kernels: Any, form: tuple[Scores, bool], cols: int, count: int) -> None:
    x = rows("f32", cols, cols)
    _, weights, indices = kernels.run_both(f"{form[0]}_{form[1]}_{cols}", lambda: [x, *outputs(9, count)])
    wanted, places = routed(x, count, form)
    assert np.array_equal(indices, places)
    close(weights, wanted)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "made"), TYPES)
def test_narrow_types_and_any_number_of_rows(
    kernels: Any, form: tuple[Scores, bool], dtype: DType, made: DType
) -> None:
    for count in (1, 9):
        x = rows(dtype, 13)[:count]
        name = f"{form[0]}_{form[1]}_{dtype}_{made}"
        _, weights, indices = kernels.run_both(name, lambda x=x, n=count: [x, *outputs(n, 3, made)], [count])
        wanted, places = routed(x, 3, form)
        assert np.array_equal(indices, places)
        close(weights, wanted, made)


@pytest.mark.parametrize("form", FORMS[1:])
def test_entries_may_lie_apart(kernels: Any, form: tuple[Scores, bool]) -> None:
    x = np.zeros((9, 26), np.float32)
    x[:, ::2] = rows("f32", 13)
    _, weights, indices = kernels.run_both(f"apart_{form[0]}", lambda: [x, *outputs(9, 6)])
    wanted, places = routed(x[:, ::2], 3, form)
    assert np.array_equal(indices[:, ::2], places) and (indices[:, 1::2] == -1).all()
    assert (weights[:, 1::2] == -1).all()
    close(weights[:, ::2], wanted)


@pytest.mark.parametrize("cols", [13, 128])
def test_the_bits_are_those_of_a_softmax_and_a_top_k(kernels: Any, cols: int) -> None:
    x = np.random.default_rng(cols).normal(size=(9, cols)).astype(np.float32) * 3
    _, shares = kernels.run_both(f"softmax_{cols}", lambda: [x, np.zeros_like(x)])
    apart = [np.zeros((9, 3, 1), np.float32), np.zeros((9, 3, 1), np.int64)]
    _, values, places = kernels.run_both(f"order_{cols}", lambda: [shares.reshape(9, cols, 1), *apart])
    _, weights, indices = kernels.run_both(f"three_{cols}", lambda: [x, *outputs(9, 3)])
    assert np.array_equal(indices, places[..., 0])
    assert np.array_equal(weights.view(np.uint32), values[..., 0].view(np.uint32))


def test_sums_run_from_the_largest_weight(kernels: Any) -> None:
    x = np.random.default_rng(5).normal(size=(9, 60)).astype(np.float32)
    _, shares, _ = kernels.run_both("all_False_60", lambda: [x, *outputs(9, 4)])
    _, weights, _ = kernels.run_both("all_True_60", lambda: [x, *outputs(9, 4)])
    total = np.add.accumulate(shares, axis=1)[:, -1:]
    assert np.array_equal(weights, shares / total)
