"""An MLIR that nobody here wrote compiles what qc ops lower to, and agrees with the reference interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from xdsl.builder import Builder
from xdsl.dialects import arith, func, math
from xdsl.dialects.builtin import FunctionType, ModuleOp
from xdsl.ir import Block, Region, SSAValue
from xdsl.rewriter import InsertPoint

from qcompiler import formats
from qcompiler.ir import build, qc, types
from qcompiler.ir.context import QCContext
from qcompiler.ir.interpreter import run
from qcompiler.ir.mlir_oracle import run_with_mlir
from qcompiler.passes.lower_qc_to_linalg import LowerQcToLinalgPass
from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel import DType, FormatRef
from qcompiler.plan.weights import StoredTensor, WeightStore

T = types.tensor
Body = Callable[[Builder, Sequence[SSAValue]], Sequence[SSAValue]]
rng = np.random.default_rng(11)


def module_of(arguments: Sequence[tuple[tuple[Dim, ...], DType]], body: Body) -> ModuleOp:
    inputs = [T(shape, dtype) for shape, dtype in arguments]
    block = Block(arg_types=inputs)
    builder = Builder(InsertPoint.at_end(block))
    results = list(body(builder, block.args))
    builder.insert(func.ReturnOp(*results))
    module = ModuleOp([func.FuncOp("main", FunctionType.from_lists(inputs, [r.type for r in results]), Region(block))])
    module.verify()
    return module


def agree(
    module: ModuleOp, inputs: Sequence[np.ndarray], weights: WeightStore | None = None, tol: float = 2e-6
) -> None:
    """Interpreter and MLIR give the same results, within 2e-6 of the largest (one rounding for 16-bit results)."""
    store, tol = weights or WeightStore(), 2e-6
    wanted = run(module, store, inputs)
    lowered = module.clone()
    LowerQcToLinalgPass().apply(QCContext.default(), lowered)
    lowered.verify()
    assert not any(op.name.startswith("qc.") for op in lowered.walk())
    got = run_with_mlir(lowered, store, inputs)
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        narrow = {"bfloat16": 2**-8, "float16": 2**-11}.get(a.dtype.name, 0.0)
        x, y = a.astype(np.float64), b.astype(np.float64)
        np.testing.assert_allclose(x, y, rtol=2 * narrow + tol, atol=tol * np.abs(y).max())


def values(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32).astype(dtype)


def one(make: Callable[..., Any]) -> Body:
    return lambda b, a: b.insert(make(*a)).results


DTYPES = [("f32", np.float32), ("bf16", ml_dtypes.bfloat16)]


@pytest.mark.parametrize(("dtype", "numpy"), DTYPES)
def test_linear(dtype: DType, numpy: Any) -> None:
    out = T(("b", "s", 7), dtype)
    module = module_of(
        [(("b", "s", 19), dtype), ((7, 19), dtype), ((7,), dtype)], one(lambda x, w, c: qc.LinearOp(x, w, c, out))
    )
    agree(module, [values(2, 5, 19, dtype=numpy), values(7, 19, dtype=numpy), values(7, dtype=numpy)])


def test_linear_with_epilogue() -> None:
    def make(x: Any, w: Any, c: Any, e: Any) -> qc.LinearOp:
        block = Block(arg_types=[types.ELEMENT_TYPES["f32"]] * 2)
        i = Builder(InsertPoint.at_end(block))
        erf = i.insert(math.ErfOp(i.insert(arith.MulfOp(block.args[0], build.scalar(i, 0.70710678, "f32"))).result))
        half = i.insert(arith.MulfOp(block.args[0], build.scalar(i, 0.5, "f32"))).result
        gelu = i.insert(arith.MulfOp(half, i.insert(arith.AddfOp(erf.result, build.scalar(i, 1.0, "f32"))).result))
        i.insert(qc.YieldOp(i.insert(arith.AddfOp(gelu, block.args[1]))))
        return qc.LinearOp(x, w, c, T(("s", 7), "f32"), [e], Region(block))

    module = module_of([(("s", 19), "f32"), ((7, 19), "f32"), ((7,), "f32"), ((1, 7), "f32")], one(make))
    agree(module, [values(5, 19), values(7, 19), values(7), values(1, 7)])


@pytest.mark.parametrize(
    ("name", "params"),
    [("nf4", {"block": 64}), ("nf4", {"block": 128}), ("int8", {}), ("int4", {"group": 32, "symmetric": True}),
     ("int4", {"group": 32, "symmetric": False})],
)  # fmt: skip
@pytest.mark.parametrize(("dtype", "numpy"), DTYPES)
def test_linear_of_packed_weights_decoded_by_mlir(name: str, params: dict[str, Any], dtype: DType, numpy: Any) -> None:
    """K = 96: nf4's flat blocks run across rows."""
    fmt, w, weights = formats.get(name, **params), values(9, 96), WeightStore()
    weights.add(StoredTensor("w", dtype, (9, 96), fmt.encode(w).data, FormatRef(name=name, params=dict(fmt.params))))
    weights.add_array("bias", values(9, dtype=numpy))
    packed = types.QTensorType.of((9, 96), dtype, weights["w"].format)

    def body(b: Builder, a: Any) -> Any:
        const, bias = b.insert(qc.ConstOp("w", packed)).result, b.insert(qc.ConstOp("bias", T((9,), dtype))).result
        return [
            b.insert(qc.LinearOp(a[0], const, bias, T(("s", 9), dtype))).result,
            b.insert(qc.DequantizeOp(const, T((9, 96), dtype))).result,
            b.insert(qc.EmbeddingOp(a[1], const, T(("s", 96), dtype))).result,
        ]

    module = module_of([(("s", 96), dtype), (("s",), "i64")], body)
    agree(module, [values(5, 96, dtype=numpy), np.array([0, 8, 3, 3, 1])], weights)


@pytest.mark.parametrize(("dtype", "numpy"), DTYPES)
def test_norms_and_softmax(dtype: DType, numpy: Any) -> None:
    def body(b: Builder, a: Any) -> Any:
        x, w, c = a
        kind = T(("b", "s", 33), dtype)
        return [
            b.insert(qc.LayerNormOp(x, w, c, kind, eps=1e-5)).result,
            b.insert(qc.LayerNormOp(x, None, c, kind, eps=1e-5)).result,
            b.insert(qc.RmsNormOp(x, w, kind, eps=1e-6)).result,
            b.insert(qc.RmsNormOp(x, None, kind, eps=1e-6)).result,
            b.insert(qc.SoftmaxOp(x, kind, axis=2)).result,
            b.insert(qc.SoftmaxOp(x, kind, axis=1)).result,
        ]

    module = module_of([(("b", "s", 33), dtype), ((33,), dtype), ((33,), dtype)], body)
    agree(module, [values(2, 5, 33, dtype=numpy), values(33, dtype=numpy), values(33, dtype=numpy)])


@pytest.mark.parametrize("mask", ["none", "bool", "float"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("limits", [{}, {"window": 3, "softcap": 1.5}], ids=["", "window and softcap"])
@pytest.mark.parametrize(("dtype", "numpy"), DTYPES)
def test_attention(mask: str, causal: bool, limits: dict[str, Any], dtype: DType, numpy: Any) -> None:
    q, kv = (("b", 4, "s", 8), dtype), (("b", 2, "t", 8), dtype)
    masks: dict[str, list[Any]] = {
        "none": [], "bool": [(("b", 1, 1, "t"), "i1")], "float": [((1, 1, "s", "t"), "f32")],
    }  # fmt: skip

    def make(q: Any, k: Any, v: Any, m: Any = None) -> qc.AttentionOp:
        return qc.AttentionOp(q, k, v, m, T(("b", 4, "s", 8), dtype), scale=0.3, causal=causal, **limits)

    keep = rng.random((2, 1, 1, 7)) > 0.4
    keep[1] = False  # a batch entry that sees no key
    extra: dict[str, list[np.ndarray]] = {"none": [], "bool": [keep], "float": [values(1, 1, 5, 7)]}
    inputs = [values(2, 4, 5, 8, dtype=numpy), values(2, 2, 7, 8, dtype=numpy), values(2, 2, 7, 8, dtype=numpy)]
    agree(module_of([q, kv, kv, *masks[mask]], one(make)), [*inputs, *extra[mask]])


def test_batch_matmul_and_rope() -> None:
    def body(b: Builder, a: Any) -> Any:
        x, y, cos, sin = a
        kind = T(("b", 2, "s", 8), "f32")
        return [
            b.insert(qc.BatchMatmulOp(x, y, T(("b", 2, "s", 3), "f32"))).result,
            b.insert(qc.RopeOp(x, cos, sin, kind)).result,
            b.insert(qc.RopeOp(x, cos, sin, kind, interleaved=True)).result,
        ]

    angles = ((1, 1, "s", 8), "f32")
    module = module_of([(("b", 2, "s", 8), "f32"), (("b", 2, 8, 3), "f32"), angles, angles], body)
    agree(module, [values(3, 2, 5, 8), values(3, 2, 8, 3), values(1, 1, 5, 8), values(1, 1, 5, 8)])


def test_gather_and_cumsum() -> None:
    def body(b: Builder, a: Any) -> Any:
        x, take, along, flags = a
        return [
            b.insert(qc.GatherOp(x, take, T((3, 2, "n", 4), "f32"), axis=1)).result,
            b.insert(qc.GatherOp(x, along, T((3, "n", 4), "f32"), axis=1, mode="along")).result,
            b.insert(qc.CumsumOp(x, T((3, "s", 4), "f32"), axis=1)).result,
            b.insert(qc.CumsumOp(flags, T(("s",), "i64"), axis=0)).result,
        ]

    module = module_of([((3, "s", 4), "f32"), ((2, "n"), "i64"), ((3, "n", 4), "i64"), (("s",), "i1")], body)
    inputs = [values(3, 5, 4), np.array([[0, -1], [4, 2]]), rng.integers(-5, 5, (3, 2, 4)), rng.random(5) > 0.5]
    agree(module, inputs)


def test_views_and_sizes() -> None:
    """What importers build out of tensor ops is valid and means the same in stock MLIR."""

    def body(b: Builder, a: Any) -> Any:
        x = build.reshape(b, a[0], ("b", "s", 2, 3))
        x = build.transpose(b, x, [0, 2, 1, 3])
        part = build.extract_slice(b, x, [0, 1, 0, 0], ["b", 1, "s", 2], [1, 1, 1, 2])
        flat = build.reshape(b, part, ("b*s", 2))
        wide = build.broadcast_to(b, flat, (2, "b*s", 2))
        total = build.reduce(b, x, [1, 3], "max")
        units = build.reshape(b, build.reshape(b, build.reduce(b, x, [0, 1, 2, 3], "min"), (1, 1)), ())
        return [build.concat(b, [wide, wide], 2), flat, total, units, build.fill(b, 2.0, ("b", "(s + 1) // 2"), "f32")]

    agree(module_of([(("b", "s", 6), "f32")], body), [values(2, 5, 6)])
