"""linalg and tensor ops, and the scalar table, mean what NumPy, torch and IEEE say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from xdsl.builder import Builder
from xdsl.dialects import arith, math, tensor
from xdsl.dialects.builtin import IndexType
from xdsl.dialects.linalg.ops import IndexOp
from xdsl.ir import Block, Region, SSAValue
from xdsl.ir.affine import AffineExpr, AffineMap
from xdsl.rewriter import InsertPoint

from qcompiler.errors import InterpreterError
from qcompiler.ir import build, types
from qcompiler.ir.interpreter import evaluate_op, run
from qcompiler.ir.interpreter_scalar import evaluate_scalar
from qcompiler.ir.scalar_ops import ErfcOp, RemFOp
from qcompiler.ir.types import ELEMENT_TYPES
from qcompiler.plan.weights import WeightStore

ModuleOf = Callable[..., Any]
D = AffineExpr.dimension
C = AffineExpr.constant


def call(module: Any, *inputs: np.ndarray) -> np.ndarray:
    module.verify()
    (result,) = run(module, WeightStore(), inputs)
    return result


def f32(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).standard_normal(shape).astype(np.float32)


def test_operands_with_offset_stride_and_broadcast(module_of: ModuleOf) -> None:
    """(d0, d1) over x[d1 * 2 + 1], y[0, d0], z[d0, 3 - d1]."""

    def body(b: Builder, args: Any) -> Any:
        maps = [
            AffineMap(2, 0, (D(1) * 2 + 1,)),
            AffineMap(2, 0, (C(0), D(0))),
            AffineMap(2, 0, (D(0), D(1) * -1 + 3)),
            AffineMap.identity(2),
        ]

        def scalars(i: Builder, s: Sequence[SSAValue]) -> Any:
            return i.insert(arith.AddfOp(i.insert(arith.MulfOp(s[0], s[1])), s[2]))

        return [build.generic(b, args, maps, (3, 4), "f32", ["parallel"] * 2, scalars)]

    x, y, z = f32(8), f32(1, 3), f32(3, 4)
    got = call(module_of([((8,), "f32"), ((1, 3), "f32"), ((3, 4), "f32")], body), x, y, z)
    assert np.array_equal(got, x[1::2][None, :] * y[0][:, None] + z[:, ::-1])


def test_reading_past_an_operand_is_an_error(module_of: ModuleOf) -> None:
    def body(b: Builder, args: Any) -> Any:
        maps = [AffineMap(1, 0, (D(0) + 1,)), AffineMap.identity(1)]
        return [build.generic(b, args, maps, ("n",), "f32", ["parallel"], lambda _i, s: s[0])]

    with pytest.raises(InterpreterError, match=r"reads \[1, 4\] of axis 0, which has size 4"):
        call(module_of([(("n",), "f32")], body), f32(4))


def test_maps_that_divide(module_of: ModuleOf) -> None:
    def body(b: Builder, args: Any) -> Any:
        maps = [AffineMap(1, 0, (D(0) // 3, D(0) % 3)), AffineMap.identity(1)]
        return [build.generic(b, args, maps, (6,), "f32", ["parallel"], lambda _i, s: s[0])]

    x = f32(2, 3)
    assert np.array_equal(call(module_of([((2, 3), "f32")], body), x), x.reshape(-1))


def test_linalg_index(module_of: ModuleOf) -> None:
    def body(b: Builder, args: Any) -> Any:
        def scalars(i: Builder, _s: Any) -> Any:
            row, col = (i.insert(IndexOp(axis)).result for axis in (0, 1))
            return i.insert(arith.CmpiOp(col, row, "sle"))

        return [build.pointwise(b, args, ("s", "s"), "i1", scalars)]

    got = call(module_of([(("s", 1), "f32")], body), f32(4, 1))
    assert np.array_equal(got, np.tri(4, dtype=bool))


@pytest.mark.parametrize("kind", ["add", "mul", "max", "min"])
@pytest.mark.parametrize("axes", [[0], [1], [2], [0, 2], [0, 1, 2]])
def test_reductions(module_of: ModuleOf, kind: str, axes: list[int]) -> None:
    x = f32(3, 4, 5)
    got = call(module_of([(x.shape, "f32")], lambda b, a: [build.reduce(b, a[0], axes, kind)]), x)
    ufunc = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}[kind]
    np.testing.assert_allclose(got, ufunc.reduce(x, axis=tuple(axes)), rtol=1e-5)


def test_reduction_that_is_no_plain_accumulation(module_of: ModuleOf) -> None:
    """acc = acc * 0.5 + x, step by step along axis 0."""

    def body(b: Builder, args: Any) -> Any:
        maps = [AffineMap(2, 0, (D(1), D(0))), AffineMap(2, 0, (D(0),))]

        def scalars(i: Builder, s: Sequence[SSAValue]) -> Any:
            return i.insert(arith.AddfOp(i.insert(arith.MulfOp(s[1], build.scalar(i, 0.5, "f32"))), s[0]))

        start = build.fill(b, 1.0, (2,), "f32")
        return [build.generic(b, args, maps, (2,), "f32", ["parallel", "reduction"], scalars, init=start)]

    x = f32(3, 2)
    wanted = np.ones(2, np.float32)
    for row in x:
        wanted = wanted * np.float32(0.5) + row
    np.testing.assert_allclose(call(module_of([((3, 2), "f32")], body), x), wanted, rtol=1e-6)


def test_reduction_over_an_empty_axis_gives_its_start(module_of: ModuleOf) -> None:
    module = module_of([(("n", 3), "f32")], lambda b, a: [build.reduce(b, a[0], [0], "add")])
    assert call(module, np.empty((0, 3), np.float32)).tolist() == [0, 0, 0]
    module = module_of([(("n", 3), "f32")], lambda b, a: [build.reduce(b, a[0], [0], "max")])
    assert call(module, np.empty((0, 3), np.float32)).tolist() == [-np.inf] * 3


def test_views(module_of: ModuleOf) -> None:
    def body(b: Builder, args: Any) -> Any:
        x = build.reshape(b, args[0], ("b", "s", 2, 3))
        x = build.transpose(b, x, [0, 2, 1, 3])
        x = build.extract_slice(b, x, [0, 1, 0, 0], ["b", 1, "s", 2], [1, 1, 1, 2])
        x = build.reshape(b, x, ("b*s", 2))
        y = build.broadcast_to(b, x, (2, "b*s", 2))
        return [build.concat(b, [y, y], 2)]

    x = f32(2, 5, 6)
    part = x.reshape(2, 5, 2, 3).transpose(0, 2, 1, 3)[:, 1:2, :, ::2].reshape(10, 2)
    wanted = np.concatenate([np.broadcast_to(part, (2, 10, 2))] * 2, 2)
    assert np.array_equal(call(module_of([(("b", "s", 6), "f32")], body), x), wanted)


def test_insert_slice_and_pad(module_of: ModuleOf) -> None:
    def body(b: Builder, args: Any) -> Any:
        x, y = args
        put = b.insert(tensor.InsertSliceOp.from_static_parameters(y, x, [1, 0], [1, 2], [1, 2])).result
        block = Block(arg_types=[IndexType(), IndexType()])
        inner = Builder(InsertPoint.at_end(block))
        inner.insert(tensor.YieldOp(build.scalar(inner, 9.0, "f32")))
        pad = tensor.PadOp(put, [], [], Region(block), [0, 1], [2, 0], types.tensor((4, 4), "f32"))
        return [b.insert(pad).result]

    x, y = f32(2, 3), f32(1, 2) + 5
    wanted = np.full((4, 4), 9, np.float32)
    wanted[:2, 1:] = x
    wanted[1, 1::2] = y
    assert np.array_equal(call(module_of([((2, 3), "f32"), ((1, 2), "f32")], body), x, y), wanted)


def test_reading_an_empty_tensor_shows(module_of: ModuleOf) -> None:
    assert np.isnan(call(module_of([], lambda b, _a: [build.empty(b, (2,), "f32")]))).all()


# --- the scalar table ------------------------------------------------------------------------------------------------


def scalar_value(op_class: Any, dtype: str, *operands: Any, result: str | None = None, **kw: Any) -> np.ndarray:
    """One op on arrays, evaluated alone."""
    numpy = {"f32": np.float32, "f64": np.float64, "bf16": ml_dtypes.bfloat16, "f16": np.float16, "i1": np.bool_,
             "i8": np.int8, "i32": np.int32, "i64": np.int64}  # fmt: skip
    arrays = [np.asarray(x).astype(numpy[dtype]) for x in operands]
    block = Block(arg_types=[ELEMENT_TYPES[dtype]] * len(arrays))
    extra = [ELEMENT_TYPES[result]] if result else []
    op = op_class(*block.args, *extra, **kw)
    block.add_op(op)
    block.verify()
    shapes = {x.shape for x in arrays}
    assert len(shapes) == 1
    # rank 0 is what the type says; run it once for each element
    rows = [evaluate_op(op, list(row), {})[0] for row in zip(*(x.reshape(-1) for x in arrays), strict=True)]
    return np.array([np.asarray(r)[()] for r in rows])


UNARY = {
    math.ExpOp: torch.exp, math.Exp2Op: torch.exp2, math.ExpM1Op: torch.expm1, math.LogOp: torch.log,
    math.Log2Op: torch.log2, math.Log10Op: torch.log10, math.Log1pOp: torch.log1p, math.SqrtOp: torch.sqrt,
    math.RsqrtOp: torch.rsqrt, math.SinOp: torch.sin, math.CosOp: torch.cos, math.TanOp: torch.tan,
    math.TanhOp: torch.tanh, math.ErfOp: torch.erf, math.AbsFOp: torch.abs, math.FloorOp: torch.floor,
    ErfcOp: torch.erfc,
    math.CeilOp: torch.ceil, math.TruncOp: torch.trunc, math.RoundEvenOp: torch.round, math.AtanOp: torch.atan,
    math.SinhOp: torch.sinh, math.CoshOp: torch.cosh, math.AsinhOp: torch.asinh, math.AtanhOp: torch.atanh,
    math.AsinOp: torch.asin, math.AcosOp: torch.acos, math.AcoshOp: torch.acosh, arith.NegfOp: torch.neg,
}  # fmt: skip


@pytest.mark.parametrize("op_class", UNARY, ids=lambda c: c.name)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f64"])
def test_unary_functions_are_within_an_ulp_of_torch_in_f64(op_class: Any, dtype: str) -> None:
    values = np.array([0.1, 0.37, 0.5, 0.99, 1.0, 1.5, 2.5, 7.25, -0.5, -1.5, 0.0])
    numpy = {"f32": np.float32, "f64": np.float64, "bf16": ml_dtypes.bfloat16}[dtype]
    rounded = values.astype(numpy)
    exact = UNARY[op_class](torch.from_numpy(rounded.astype(np.float64))).numpy()
    got = scalar_value(op_class, dtype, values)
    assert got.dtype == numpy
    if dtype == "f64":
        np.testing.assert_allclose(got, exact, rtol=1e-14)
    else:
        assert np.array_equal(got, exact.astype(np.float32).astype(numpy), equal_nan=True)


def test_truncf_rounds_to_nearest_even() -> None:
    got = scalar_value(arith.TruncFOp, "f32", [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20], result="bf16")
    assert got.astype(np.float32).tolist() == [1.0, 1 + 4 * 2**-8, 1 + 2**-7]


def test_the_remainder_of_floats_is_exact() -> None:
    inf = float("inf")
    a, b = [7.5, -7.5, 1.0, -1.0, 3e38, inf], [2.0, 2.0, inf, -inf, 0.5 + 2**-24, 2.0]
    got = scalar_value(RemFOp, "f32", a, b)
    exact = np.fmod(np.float64(np.float32(3e38)), np.float64(0.5 + 2**-24)).astype(np.float32)
    assert np.array_equal(got, np.array([1.5, -1.5, 1.0, -1.0, exact, np.nan], np.float32), equal_nan=True)


def test_signed_and_unsigned_integers() -> None:
    a, b = [7, -7, 7, -7], [2, 2, -2, -2]
    assert scalar_value(arith.DivSIOp, "i32", a, b).tolist() == [3, -3, -3, 3]
    assert scalar_value(arith.RemSIOp, "i32", a, b).tolist() == [1, -1, 1, -1]
    assert scalar_value(arith.FloorDivSIOp, "i32", a, b).tolist() == [3, -4, -4, 3]
    assert scalar_value(arith.CeilDivSIOp, "i32", a, b).tolist() == [4, -3, -3, 4]
    assert scalar_value(arith.DivUIOp, "i8", [-1], [2]).tolist() == [127]
    assert scalar_value(arith.ShRUIOp, "i8", [-1], [4]).tolist() == [15]
    assert scalar_value(arith.ShRSIOp, "i8", [-16], [2]).tolist() == [-4]
    assert scalar_value(arith.AddiOp, "i8", [127], [1]).tolist() == [-128]
    assert scalar_value(arith.AddiOp, "i1", [True, True], [True, False]).tolist() == [False, True]


@pytest.mark.parametrize(
    ("op_class", "source", "value", "result", "wanted"),
    [
        (arith.ExtUIOp, "i8", -1, "i32", 255),
        (arith.ExtSIOp, "i8", -1, "i32", -1),
        (arith.ExtUIOp, "i1", True, "i64", 1),
        (arith.ExtSIOp, "i1", True, "i64", -1),
        (arith.UIToFPOp, "i1", True, "f32", 1.0),
        (arith.SIToFPOp, "i8", -3, "bf16", -3.0),
        (arith.FPToSIOp, "f32", -2.7, "i64", -2),
        (arith.TruncIOp, "i32", 258, "i8", 2),
        (arith.TruncIOp, "i32", 3, "i1", True),
        (arith.BitcastOp, "f32", 1.0, "i32", 0x3F800000),
    ],
)
def test_casts(op_class: Any, source: str, value: Any, result: str, wanted: Any) -> None:
    assert scalar_value(op_class, source, [value], result=result).tolist() == [wanted]


NAN = float("nan")


@pytest.mark.parametrize(
    ("predicate", "wanted"),
    [
        ("false", [0, 0, 0, 0]), ("oeq", [0, 1, 0, 0]), ("ogt", [0, 0, 1, 0]), ("oge", [0, 1, 1, 0]),
        ("olt", [1, 0, 0, 0]), ("ole", [1, 1, 0, 0]), ("one", [1, 0, 1, 0]), ("ord", [1, 1, 1, 0]),
        ("ueq", [0, 1, 0, 1]), ("ugt", [0, 0, 1, 1]), ("uge", [0, 1, 1, 1]), ("ult", [1, 0, 0, 1]),
        ("ule", [1, 1, 0, 1]), ("une", [1, 0, 1, 1]), ("uno", [0, 0, 0, 1]), ("true", [1, 1, 1, 1]),
    ],
)  # fmt: skip
def test_float_comparisons_and_nan(predicate: str, wanted: list[int]) -> None:
    got = scalar_value(lambda a, b: arith.CmpfOp(a, b, predicate), "f32", [1, 2, 3, NAN], [2, 2, 2, 2])
    assert got.astype(int).tolist() == wanted


def test_integer_comparisons() -> None:
    def compare(predicate: str) -> list[bool]:
        return scalar_value(lambda a, b: arith.CmpiOp(a, b, predicate), "i8", [-1, 1], [1, 1]).tolist()

    assert [compare(p) for p in ("eq", "ne", "slt", "sle", "sgt", "sge", "ult", "ule", "ugt", "uge")] == [
        [False, True], [True, False], [True, False], [True, True], [False, False], [False, True],
        [False, False], [False, True], [True, False], [True, True],
    ]  # fmt: skip


def test_maximum_propagates_nan_and_maxnum_does_not() -> None:
    assert np.isnan(scalar_value(arith.MaximumfOp, "f32", [NAN], [1.0]))[0]
    assert scalar_value(arith.MaxnumfOp, "f32", [NAN], [1.0]).tolist() == [1.0]


def test_fma_rounds_once() -> None:
    a = np.float32(1 + 2**-12)
    got = scalar_value(math.FmaOp, "f32", [a], [a], [-1.0])
    assert got[0] == np.float32(float(a) * float(a) - 1.0)


def test_transpose_of_bf16(module_of: ModuleOf) -> None:
    module = module_of([(("a", "b"), "bf16")], lambda b, a: [build.transpose(b, a[0], [1, 0])])
    x = f32(2, 3).astype(ml_dtypes.bfloat16)
    assert np.array_equal(call(module, x), x.T)


def test_floats_saturate_as_integers_as_in_kernels() -> None:
    x = np.array([300, -300, np.nan, np.inf, -1.9, 1e19], np.float32)
    block = Block(arg_types=[ELEMENT_TYPES["f32"]])
    wanted = {
        (arith.FPToSIOp, "i8"): [127, -128, 0, 127, -1, 127],
        (arith.FPToSIOp, "i64"): [300, -300, 0, 2**63 - 1, -1, 2**63 - 1],
        (arith.FPToUIOp, "i8"): [-1, 0, 0, -1, 0, -1],  # the bits of 255
        (arith.FPToUIOp, "i64"): [300, 0, 0, -1, 0, int(np.float32(1e19)) - 2**64],
    }
    for (make, dtype), numbers in wanted.items():
        found = evaluate_scalar(make(block.args[0], ELEMENT_TYPES[dtype]), (x,))
        assert found is not None and found.tolist() == numbers, (make.name, dtype, found)
