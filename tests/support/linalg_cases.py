"""Small functions of one qc op each, with inputs: what linalg must mean for them, by the interpreter and by MLIR.

`case(name)` builds a case; `NAMES` lists them. Together they hold every op that has a lowering.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import cache_cases
import ml_dtypes
import numpy as np
import sample_cases
import top_p_cases
from xdsl.builder import Builder
from xdsl.dialects import arith, func
from xdsl.dialects.builtin import FunctionType, ModuleOp
from xdsl.ir import Block, Region, SSAValue
from xdsl.rewriter import InsertPoint

from qcompiler import formats
from qcompiler.formats import cache_rows, int8_rows
from qcompiler.ir import build, qc, types
from qcompiler.ir.qc_index import RouteOp, SampleOp, TopPOp
from qcompiler.ir.qc_norm import statistics_type
from qcompiler.ir.qc_prologue import prologue_region
from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel import DType, FormatRef
from qcompiler.plan.kinds.recurrent import GATES
from qcompiler.plan.weights import NUMPY_DTYPES, StoredTensor, WeightStore

Array = np.ndarray[Any, Any]
Body = Callable[[Builder, Sequence[SSAValue]], Sequence[SSAValue]]
T = types.tensor


@dataclass
class Case:
    """`tolerance` is relative to the largest result; 0 asks for equal bits. `states` are initial values."""

    module: ModuleOp
    inputs: list[Array]
    weights: WeightStore = field(default_factory=WeightStore)
    states: dict[str, Array] = field(default_factory=dict)
    tolerance: float = 2e-6


def module_of(arguments: Sequence[tuple[tuple[Dim, ...], DType]], body: Body) -> ModuleOp:
    """A module with one function @main; `body(builder, arguments)` returns what is returned."""
    inputs = [T(shape, dtype) for shape, dtype in arguments]
    block = Block(arg_types=inputs)
    builder = Builder(InsertPoint.at_end(block))
    results = list(body(builder, block.args))
    builder.insert(func.ReturnOp(*results))
    module = ModuleOp([func.FuncOp("main", FunctionType.from_lists(inputs, [r.type for r in results]), Region(block))])
    module.verify()
    return module


def one(make: Callable[..., Any]) -> Body:
    """The results of one op, made of the arguments."""
    return lambda b, a: b.insert(make(*a)).results


def values(*shape: int, dtype: DType = "f32", seed: int = 5) -> Array:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(NUMPY_DTYPES[dtype])


def packed(
    store: WeightStore, key: str, shape: tuple[int, int], name: str, dtype: DType = "f32", **params: Any
) -> types.QTensorType:
    """The type of a weight that is added to the store, encoded from random values."""
    fmt = formats.get(name, **params)
    data = fmt.encode(values(*shape, seed=len(key))).data
    store.add(StoredTensor(key, dtype, shape, data, FormatRef(name=name, params=dict(fmt.params))))
    return types.QTensorType.of(shape, dtype, store[key].format)  # type: ignore[arg-type]


def decoded(name: str, shape: tuple[int, int], data: Array, dtype: DType = "f32", **params: Any) -> Case:
    """A packed weight, decoded."""
    fmt, store = formats.get(name, **params), WeightStore()
    store.add(StoredTensor("w", dtype, shape, data, FormatRef(name=name, params=dict(fmt.params))))
    type_ = types.QTensorType.of(shape, dtype, store["w"].format)  # type: ignore[arg-type]

    def body(b: Builder, _: Any) -> Any:
        return b.insert(qc.DequantizeOp(b.insert(qc.ConstOp("w", type_)).result, T(shape, dtype))).results

    return Case(module_of([], body), [], store, tolerance=0)


# --- ops that order and write ----------------------------------------------------------------------------------------

_ORDERED: dict[str, Array] = {
    "f32": np.array([[2, np.nan, -1, 2, 0, -0.0], [5, 5, np.inf, -np.inf, np.nan, np.nan]], np.float32),
    "bf16": np.array([[2, np.nan, -1, 2, 0, -0.0], [5, 5, 1, -np.inf, 7, 7]], ml_dtypes.bfloat16),
    "i64": np.array([[2, 7, -1, 2, 0, 0], [5, 5, 1, -9, 7, 7]]),
    "ui8": np.array([[2, 7, 255, 2, 0, 0], [5, 5, 1, 200, 7, 7]], np.uint8),
    "i1": np.array([[1, 0, 1, 1, 0, 0], [0, 0, 0, 0, 1, 0]], np.bool_),
}


def orders(dtype: DType) -> Case:
    """sort both ways, topk and argmax along both axes."""
    x = _ORDERED[dtype]

    def body(b: Builder, a: Any) -> Any:
        kind, places = T(("m", 6), dtype), T(("m", 6), "i64")
        down = b.insert(qc.SortOp(a[0], [kind, places], axis=1, descending=True)).results
        up = b.insert(qc.SortOp(a[0], [kind, places], axis=0, descending=False)).results
        top = b.insert(qc.TopkOp(a[0], [T(("m", 3), dtype), T(("m", 3), "i64")], k=3, axis=1)).results
        first = b.insert(qc.ArgmaxOp(a[0], T(("m",), "i64"), axis=1)).results
        other = b.insert(qc.ArgmaxOp(a[0], T((6,), "i64"), axis=0)).results
        return [*down, *up, *top, *first, *other]

    return Case(module_of([(("m", 6), dtype)], body), [x], tolerance=0)


def scans(dtype: DType) -> Case:
    x = values(2, 5, dtype=dtype) if dtype in ("f32", "bf16") else _ORDERED[dtype][:, :5]
    folds = ["add", "mul", "max", "min", *(["logaddexp"] if dtype in ("f32", "bf16") else [])]

    def body(b: Builder, a: Any) -> Any:
        return [b.insert(qc.CumsumOp(a[0], T((2, "s"), dtype), axis=1, reduce=fold)).result for fold in folds]

    return Case(module_of([((2, "s"), dtype)], body), [x])


def scatters(dtype: DType) -> Case:
    """Every fold, with equal and negative indices, on an index that is smaller than x."""
    whole = (np.arange(60).reshape(3, 5, 4) - 30).astype(NUMPY_DTYPES[dtype])
    x = values(3, 5, 4, dtype=dtype) if dtype in ("f32", "bf16") else whole
    src = (x[:, ::-1] * 2 - 1)[:, :4].astype(x.dtype)
    index = np.array([[[0, 1, -1], [0, 4, -1], [0, 1, 2]]]).transpose(0, 1, 2).repeat(2, axis=0)

    def body(b: Builder, a: Any) -> Any:
        kind = T((3, "n", 4), dtype)
        return [
            b.insert(qc.ScatterOp(*a, kind, axis=1, reduce=fold)).result
            for fold in ("none", "add", "mul", "max", "min")
        ]

    arguments = [((3, "n", 4), dtype), ((2, 3, 3), "i64"), ((3, 4, 4), dtype)]
    return Case(module_of(arguments, body), [x, index, src])  # type: ignore[arg-type]


def updates() -> Case:
    """index_update of a state, and what the state was."""

    def body(b: Builder, a: Any) -> Any:
        state = b.insert(qc.StateOp("cache", T((2, 6, 3), "f32"))).result
        new = b.insert(qc.IndexUpdateOp(state, a[0], a[1], T((2, 6, 3), "f32"), axis=1)).result
        b.insert(qc.StateUpdateOp("cache", new))
        return [b.insert(qc.CopyOp(new, source="cpu", target="cuda:0")).result, state]

    module = module_of([(("n",), "i64"), ((2, "n", 3), "f32")], body)
    return Case(module, [np.array([4, 1, 4]), values(2, 3, 3)], states={"cache": values(2, 6, 3, seed=1)}, tolerance=0)


def positions() -> Case:
    def body(b: Builder, a: Any) -> Any:
        x, cos, sin, index, along = a
        kind = T(("b", 2, "s", 8), "f32")
        return [
            b.insert(qc.RopeOp(x, cos, sin, kind)).result,
            b.insert(qc.RopeOp(x, cos, sin, kind, interleaved=True)).result,
            b.insert(qc.GatherOp(x, index, T(("b", 2, "s", 3), "f32"), axis=3)).result,
            b.insert(qc.GatherOp(x, along, T(("b", 2, "s", 8), "f32"), axis=1, mode="along")).result,
        ]

    angles = ((1, 1, "s", 8), "f32")
    arguments: Any = [(("b", 2, "s", 8), "f32"), angles, angles, ((3,), "i32"), (("b", 2, "s", 8), "i64")]
    along = np.random.default_rng(2).integers(-2, 2, (3, 2, 5, 8))
    inputs = [values(3, 2, 5, 8), values(1, 1, 5, 8), values(1, 1, 5, 8, seed=2), np.array([7, -8, 3], np.int32), along]
    return Case(module_of(arguments, body), inputs)


# --- draws and experts -----------------------------------------------------------------------------------------------


def draw(dtype: DType) -> Case:
    x = top_p_cases.rows(dtype, 23, 4)
    make = one(lambda x, top, draw: TopPOp(x, top, draw, T(("r",), "i64")))
    module = module_of([(("r", 23), dtype), (("r",), "f32"), (("r",), "f32")], make)
    return Case(module, [x, *top_p_cases.shares(len(x), 4)], tolerance=0)


def sampled(dtype: DType, seed: int) -> Case:
    inputs = sample_cases.case(dtype, 40, 19, seed)
    make = one(lambda *a: SampleOp(*a, T(("b",), "i64")))
    arguments: Any = [((sample_cases.ROWS, 19), dtype), (("b", 10), "i64"), (("b", 19), "f32"), (("b", 19), "f32")]
    return Case(module_of(arguments, make), inputs, tolerance=0)


def routed(dtype: DType) -> Case:
    def body(b: Builder, a: Any) -> Any:
        kinds = [T(("t", 3), dtype), T(("t", 3), "i64")]
        found: list[Any] = []
        for scores, normalise in (("all", False), ("all", True), ("chosen", False)):
            found += b.insert(RouteOp(a[0], kinds, k=3, scores=scores, normalise=normalise)).results
        return found

    return Case(module_of([(("t", 7), dtype)], body), [values(4, 7, dtype=dtype)])


def _yields(block: Block, make: Callable[[Builder, Sequence[SSAValue]], Any]) -> Region:
    i = Builder(InsertPoint.at_end(block))
    i.insert(qc.YieldOp(make(i, block.args)))
    return Region(block)


def _f32(count: int) -> Block:
    return Block(arg_types=[types.ELEMENT_TYPES["f32"]] * count)


def _product(i: Builder, s: Sequence[SSAValue]) -> Any:
    return i.insert(arith.MulfOp(s[0], s[1]))


def experts(format_: str | None) -> Case:
    """Pairs of rows, then a mix of each row's experts."""
    store, x = WeightStore(), values(4, 32)

    def weight(b: Builder, key: str, shape: tuple[int, int]) -> SSAValue:
        if format_ is None:
            store.add_array(key, values(*shape))
            return b.insert(qc.ConstOp(key, T(shape, "f32"))).result
        return b.insert(qc.ConstOp(key, packed(store, key, shape, format_))).result

    def body(b: Builder, a: Any) -> Any:
        x, index, weights, rest = a
        glu, down = weight(b, "glu", (3 * 64, 32)), weight(b, "down", (3 * 16, 32))
        plain = b.insert(qc.GroupedLinearOp(x, down, index, T((8, 16), "f32"), experts=3, repeat=2)).result
        hidden = b.insert(
            qc.GroupedLinearOp(
                x, glu, index, T((8, 32), "f32"), experts=3, repeat=2, pairs=True, epilogue=_yields(_f32(2), _product)
            )
        ).result

        def mixed(i: Builder, s: Sequence[SSAValue]) -> Any:
            return i.insert(arith.AddfOp(s[2], _product(i, s)))

        out = b.insert(
            qc.GroupedLinearOp(
                hidden, down, index, T((4, 16), "f32"), experts=3, top=2, weights=weights, extras=[rest],
                mix=_yields(_f32(3), mixed),
                epilogue=_yields(_f32(2), lambda i, s: i.insert(arith.AddfOp(s[0], s[1]))),
            )
        )  # fmt: skip
        return [plain, hidden, *out.results]

    arguments: Any = [((4, 32), "f32"), ((8,), "i64"), ((4, 2), "f32"), ((4, 16), "f32")]
    inputs = [x, np.array([0, 2, 1, 1, 2, 0, 2, 1]), values(4, 2), values(4, 16)]
    return Case(module_of(arguments, body), inputs, store)


# --- convolutions ----------------------------------------------------------------------------------------------------


def convolved(groups: int, dtype: DType, weight: DType | None = None) -> Case:
    """A convolution whose weight has the type `weight`, or that of x, and windows."""

    def body(b: Builder, a: Any) -> Any:
        given: Any = {"strides": (2, 1), "padding": (1, 0, 2, 1), "dilation": (1, 2)}
        out = T((2, 4, 5, "w - 3"), dtype)
        windows = T((2, 5, "w - 3", 36), dtype)
        moved = build.transpose(b, a[0], [0, 2, 3, 1])
        return [
            b.insert(qc.Conv2dOp(*a, out, groups=groups, **given)).result,
            b.insert(qc.WindowsOp(moved, windows, kernel=(3, 3), **given)).result,
        ]

    shapes = [(2, 4, 8, 7), (4, 4 // groups, 3, 3), (4,)]
    types = (dtype, weight or dtype, dtype)
    arguments: Any = [((2, 4, 8, "w"), dtype), (shapes[1], types[1]), ((4,), dtype)]
    given = [values(*shape, dtype=kind) for shape, kind in zip(shapes, types, strict=True)]
    return Case(module_of(arguments, body), given)


def convolved_integers(channels: int) -> Case:
    """Windows of an image of int8 rows, and their product with a packed weight."""
    store, given = WeightStore(), {"strides": (2, 1), "padding": (1, 0, 2, 1), "dilation": (1, 2)}
    columns, pixel = 9 * channels, int8_rows.row_bytes(channels)

    def body(b: Builder, a: Any) -> Any:
        x, largest = a
        rows = qc.QuantizeRowsOp(x, None, T((2, 8, "w", pixel), "i8"), kind="image", largest=largest)
        made = T((2, 5, "w - 3", int8_rows.row_bytes(columns)), "i8")
        windows = qc.WindowsOp(b.insert(rows).result, made, kernel=(3, 3), channels=channels, **given)
        w = b.insert(qc.ConstOp("w", packed(store, "w", (4, columns), "int8"))).result
        out = b.insert(qc.LinearOp(b.insert(windows).result, w, None, T((2, 5, "w - 3", 4), "f32")))
        return [windows.result, out.result]

    x = values(2, 8, 7, channels)
    largest = np.abs(x).reshape(2, -1).max(axis=1)
    arguments: Any = [((2, 8, "w", channels), "f32"), ((2,), "f32")]
    return Case(module_of(arguments, body), [x, largest], store, tolerance=5e-6)


# --- rows of bytes ---------------------------------------------------------------------------------------------------


def int8_row_case(kind: str, dtype: DType) -> Case:
    x, cols = cache_cases.numbers(27, dtype)[:3], 27
    value = {"tensor": 2.5, "outliers": 6.0}.get(kind, 0.0)
    largest = np.array([np.abs(each.astype(np.float32)).max() for each in x], np.float32)
    columns = (np.arange(cols) % 5 == 0).reshape(1, 1, cols)
    made = T(("t", 3, int8_rows.row_bytes(cols)), "i8")

    def body(b: Builder, a: Any) -> Any:
        rows = b.insert(
            qc.QuantizeRowsOp(
                a[0], a[1] if kind == "outliers" else None, made, kind=kind, value=value,
                largest=a[2] if kind == "image" else None,
            )
        ).result  # fmt: skip
        return [rows, b.insert(qc.DequantizeRowsOp(rows, T(("t", 3, cols), dtype))).result]

    arguments: Any = [(("t", 3, cols), dtype), ((1, 1, cols), "i1"), (("t",), "f32")]
    return Case(module_of(arguments, body), [x, columns, largest], tolerance=0)


def hadamard_case(dtype: DType) -> Case:
    def body(b: Builder, a: Any) -> Any:
        return [b.insert(qc.HadamardOp(a[0], block=8)).result]

    return Case(module_of([(("t", 3, 24), dtype)], body), [values(2, 3, 24, dtype=dtype)], tolerance=0)


def cache_row_case(kind: cache_rows.Kind, cols: int, dtype: DType) -> Case:
    def body(b: Builder, a: Any) -> Any:
        made = T(("t", 3, cache_rows.row_bytes(cols, kind)), "i8")
        rows = b.insert(qc.QuantizeCacheOp(a[0], made, kind=kind)).result
        return [rows, b.insert(qc.DequantizeCacheOp(rows, T(("t", 3, cols), dtype), kind=kind)).result]

    return Case(module_of([(("t", 3, cols), dtype)], body), [cache_cases.numbers(cols, dtype)], tolerance=0)


def attention(cache: cache_rows.Kind | None, limits: dict[str, Any], *, sinks: bool = False) -> Case:
    """Over a cache, with the position of each query."""
    k, v = values(2, 2, 7, 32), values(2, 2, 7, 8, seed=9)
    dtypes: DType = "f32"
    if cache is not None:
        k, v, dtypes = cache_rows.quantise(k, cache), cache_rows.quantise(v, cache), "i8"

    def make(q: Any, k: Any, v: Any, last: Any, lone: Any = None) -> qc.AttentionOp:
        given = {"last": last, "sinks": lone, "cache": cache, **limits}
        return qc.AttentionOp(q, k, v, None, T((2, 4, 3, 8), "f32"), scale=0.2, **given)

    arguments: Any = [
        ((2, 4, 3, 32), "f32"),
        (k.shape, dtypes),
        (v.shape, dtypes),
        ((2, 3), "i64"),
        *([((1, 4, 1, 1), "f32")] if sinks else []),
    ]
    last = np.array([[2, 3, 4], [-1, 0, 1]]) if "ring" not in limits else np.array([[9, 10, 11], [3, 4, 5]])
    lone = [values(1, 4, 1, 1)] if sinks else []
    for each in lone:
        each[0, 1] = -np.inf  # as good as none, also where a query sees no key
    return Case(module_of(arguments, one(make)), [values(2, 4, 3, 32), k, v, last, *lone])


# --- linears ---------------------------------------------------------------------------------------------------------


def integer_linear(name: str, cols: int, params: dict[str, Any]) -> Case:
    """Rows of int8, given and made in the prologue behind a norm, times a packed weight."""
    store = WeightStore()
    wide = T(("m", int8_rows.row_bytes(cols)), "i8")

    def body(b: Builder, a: Any) -> Any:
        x, norm, bias = a
        w = b.insert(qc.ConstOp("w", packed(store, "w", (9, cols), name, "bf16", **params))).result
        rows = b.insert(qc.QuantizeRowsOp(x, None, wide, kind="token")).result
        given = b.insert(qc.LinearOp(rows, w, bias, T(("m", 9), "f32"))).result
        prologue = prologue_region(
            [qc.RmsNormOp(x, norm, x.type, eps=1e-6)],
            qc.QuantizeRowsOp(x, None, wide, kind="token"), x, [norm], keeps="codes",
        )  # fmt: skip
        made = b.insert(qc.LinearOp(x, w, None, T(("m", 9), "f32"), affine=[norm], prologue=prologue))
        return [given, made.result]

    arguments: Any = [(("m", cols), "f32"), ((cols,), "f32"), ((9,), "f32")]
    return Case(module_of(arguments, body), [values(3, cols), values(cols), values(9)], store, tolerance=5e-6)


def integer_experts(name: str, cols: int, dtype: DType, repeat: int) -> Case:
    """Rows of int8 times the codes of chosen experts."""
    store, rows = WeightStore(), 4

    def body(b: Builder, a: Any) -> Any:
        x, index = a
        w = b.insert(qc.ConstOp("w", packed(store, "w", (3 * 5, cols), name, dtype))).result
        codes = b.insert(qc.QuantizeRowsOp(x, None, T((rows, int8_rows.row_bytes(cols)), "i8"), kind="token")).result
        made = qc.GroupedLinearOp(codes, w, index, T((rows * repeat, 5), dtype), experts=3, repeat=repeat)
        return [b.insert(made).result]

    arguments: Any = [((rows, cols), "f32"), ((rows * repeat,), "i64")]
    index = np.array([0, 2, 1, 1, 2, 0, 2, 1])[: rows * repeat]
    tolerance = 5e-6 if dtype == "f32" else 1e-2
    return Case(module_of(arguments, body), [values(rows, cols), index], store, tolerance=tolerance)


def statistics(kind: str, dtype: DType) -> Case:
    """A linear that writes statistics of its rows, and one with a norm that reads them; a last group of 8 columns."""

    def body(b: Builder, a: Any) -> Any:
        x, w, v, scale, residual = a
        rows = T(("m", 40), dtype)
        first = b.insert(qc.LinearOp(x, w, None, rows, statistics=kind))  # type: ignore[arg-type]
        made, parts = first.results
        norm: Any = (
            qc.RmsNormOp(made, scale, rows, eps=1e-6, statistics=parts)
            if kind == "rms"
            else qc.LayerNormOp(made, scale, None, rows, eps=1e-6, statistics=parts)
        )
        prologue = prologue_region([norm], None, made, [scale, parts], keeps="norm")
        second = b.insert(qc.LinearOp(made, v, None, T(("m", 5), dtype), affine=[scale, parts], prologue=prologue))
        normed = b.insert(qc.RmsNormOp(made, scale, rows, eps=1e-6, residual=residual)).result
        return [made, parts, *second.results, normed]

    assert statistics_type(T(("m", 40), dtype), kind)
    arguments: Any = [
        (("m", 16), dtype), ((40, 16), dtype), ((5, 40), dtype), ((40,), dtype), (("m", 40), dtype),
    ]  # fmt: skip
    shapes = [(3, 16), (40, 16), (5, 40), (40,), (3, 40)]
    return Case(module_of(arguments, body), [values(*shape, dtype=dtype) for shape in shapes], tolerance=1e-5)


def recurrent(kind: str, dtype: DType, *, reverse: bool = False, projected: bool = False) -> Case:
    hidden, gates = 6, GATES[kind]
    width = 4 if projected else hidden
    names: list[tuple[str, tuple[Dim, ...]]] = [
        ("x", ("t", 3, gates * hidden)), ("w", (gates * hidden, width)), ("start", (3, width)),
        ("bias", (gates * hidden,)), *([("cell_start", (3, hidden))] if kind == "lstm" else []),
        *([("projection", (width, hidden))] if projected else []),
    ]  # fmt: skip

    def body(b: Builder, a: Any) -> Any:
        given = dict(zip([name for name, _ in names], a, strict=True))
        kinds = [T(("t", 3, width), dtype), *([T((3, hidden), dtype)] if kind == "lstm" else [])]
        kinds += [T((3, hidden), "f32")] if projected else []
        op = qc.RecurrentOp(
            given.pop("x"), given.pop("w"), given.pop("start"), kinds, kind=kind, reverse=reverse, **given
        )
        return b.insert(op).results

    inputs = [
        values(*(5 if size == "t" else int(size) for size in shape), dtype=dtype, seed=n)
        for n, (_, shape) in enumerate(names)
    ]
    return Case(module_of([(shape, dtype) for _, shape in names], body), inputs)


def linear_attention(*, columns: bool = False, rate: bool = False, beta: bool = False) -> Case:
    """Sequences that go on, that begin, and that read nothing; more slots than sequences."""
    names: list[tuple[str, tuple[Dim, ...]]] = [
        ("state", (5, 4, 3, 6)), ("query", ("b", "t", 2, 6)), ("key", ("b", "t", 2, 6)), ("value", ("b", "t", 4, 3)),
        ("decay", ("b", "t", 4, 6 if columns else 1)), ("first", ("b",)), ("counts", ("b",)),
        *([("rate", (4, 6))] if rate else []), *([("beta", ("b", "t", 4))] if beta else []),
    ]  # fmt: skip

    def body(b: Builder, a: Any) -> Any:
        return b.insert(qc.LinearAttentionOp(**dict(zip([name for name, _ in names], a, strict=True)))).results

    sizes = {"b": 4, "t": 5}
    inputs = [
        values(*(size if isinstance(size, int) else sizes[str(size)] for size in shape), seed=n)
        for n, (_, shape) in enumerate(names)
    ]
    inputs[4] = -np.abs(inputs[4])
    if rate:
        inputs[7] = np.abs(inputs[7])
    inputs[5], inputs[6] = np.array([0, 0, 3, 7]), np.array([5, 0, 3, 5])
    kinds: list[DType] = ["i64" if name in ("first", "counts") else "f32" for name, _ in names]
    return Case(module_of([(shape, kind) for (_, shape), kind in zip(names, kinds, strict=True)], body), inputs)


_FLOATS: tuple[DType, ...] = ("f32", "bf16")
_CACHES: tuple[cache_rows.Kind, ...] = cache_rows.KINDS
_LIMITS: dict[str, dict[str, Any]] = {"": {}, " window": {"window": 2}, " ring": {"window": 3, "ring": True}}

_CASES: dict[str, Callable[[], Case]] = {
    **{f"orders {t}": lambda t=t: orders(t) for t in ("f32", "bf16", "i64", "ui8", "i1")},
    **{f"scans {t}": lambda t=t: scans(t) for t in ("f32", "bf16", "i64", "ui8")},
    **{f"scatters {t}": lambda t=t: scatters(t) for t in ("f32", "bf16", "i64", "ui8")},
    "updates": updates,
    "positions": positions,
    **{f"draw {t}": lambda t=t: draw(t) for t in _FLOATS},
    **{f"sample {t} {n}": lambda t=t, n=n: sampled(t, n) for t, n in (("f32", 0), ("bf16", 1))},
    **{f"routed {t}": lambda t=t: routed(t) for t in _FLOATS},
    **{f"experts {f}": lambda f=f: experts(f) for f in (None, "int8")},
    **{f"convolved {g} {t}": lambda g=g, t=t: convolved(g, t) for g, t in ((1, "f32"), (2, "f32"), (1, "bf16"))},
    "convolved in bf16": lambda: convolved(1, "f32", "bf16"),
    "convolved from bf16": lambda: convolved(1, "bf16", "f32"),
    **{f"convolved integers {c}": lambda c=c: convolved_integers(c) for c in (5, 32)},
    **{f"int8 rows {k} {t}": lambda k=k, t=t: int8_row_case(k, t) for k in int8_rows.KINDS for t in _FLOATS},
    **{
        f"cache {k} {c} {t}": lambda k=k, c=c, t=t: cache_row_case(k, c, t)
        for k in _CACHES for c, t in ((27, "f32"), (64, "bf16"))
    },
    **{f"attention {k}{n}": lambda k=k, v=v: attention(k, v) for k in (None, *_CACHES) for n, v in _LIMITS.items()},
    **{f"hadamard {t}": lambda t=t: hadamard_case(t) for t in _FLOATS},
    "integers int8": lambda: integer_linear("int8", 64, {}),
    "integers int4": lambda: integer_linear("int4", 96, {"symmetric": False}),
    "integers q4_K": lambda: integer_linear("q4_K", 256, {}),
    "integer experts int8": lambda: integer_experts("int8", 64, "f32", 2),
    "integer experts q4_0": lambda: integer_experts("q4_0", 96, "bf16", 1),
    **{f"statistics {k} {t}": lambda k=k, t=t: statistics(k, t) for k in ("rms", "layer") for t in _FLOATS},
}  # fmt: skip

_LOOPS: dict[str, Callable[[], Case]] = {
    **{f"recurrent {k} {t}": lambda k=k, t=t: recurrent(k, t) for k in GATES for t in _FLOATS},
    "recurrent reverse": lambda: recurrent("gru", "f32", reverse=True),
    "recurrent projected": lambda: recurrent("lstm", "f32", projected=True),
    "attention with sinks": lambda: attention(None, {}, sinks=True),
    "attention with sinks over a cache": lambda: attention("int8", {"window": 2}, sinks=True),
    "linear attention": linear_attention,
    "linear attention rate": lambda: linear_attention(rate=True),
    "linear attention delta": lambda: linear_attention(columns=True, beta=True),
}  # fmt: skip

NAMES = tuple(_CASES)
"""Cases that the interpreter runs after lowering."""

LOOPS = tuple(_LOOPS)
"""Cases whose lowering has control flow: MLIR runs them."""


def case(name: str) -> Case:
    return (_CASES | _LOOPS)[name]()


def same(a: Array, b: Array, tolerance: float) -> None:
    """Asserts that two results are equal, or within the tolerance and two roundings of a 16-bit type."""
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    if tolerance == 0 or a.dtype.kind in "ib":
        wide = [x.astype(np.float64) if x.dtype.kind in "fV" else x for x in (a, b)]
        np.testing.assert_array_equal(*wide)
        return
    narrow = {"bfloat16": 2**-8, "float16": 2**-11}.get(a.dtype.name, 0.0)
    x, y = a.astype(np.float64), b.astype(np.float64)
    np.testing.assert_allclose(x, y, rtol=2 * narrow + tolerance, atol=tolerance * np.abs(y).max())
