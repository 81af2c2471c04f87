"""What CPU kernels take, CUDA kernels take: specs made from the registries, emitted for both.

Templates come from the union of kernel bodies, formats from `formats.FORMATS`, options from the fields of each body
(booleans and literals), element types from `DType`, as far as select-kernels and the ops' verifiers let them through.
A spec that one target refuses and the other takes fails.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import pytest

from qcompiler import formats
from qcompiler.errors import KernelSelectionError
from qcompiler.formats import cache_rows
from qcompiler.formats.cache_rows import row_bytes as cache_row_bytes
from qcompiler.formats.int8_rows import row_bytes
from qcompiler.kernels.cpu import emit as cpu
from qcompiler.kernels.cuda import emit as cuda
from qcompiler.kernels.scalar import FLOATS as ALL_FLOATS
from qcompiler.kernels.select import FLOATS
from qcompiler.passes.lowering.kinds import TEMPLATES
from qcompiler.plan.kernel import DType, FormatRef, KernelSpec, Operand, ScalarOp, ScalarProgram
from qcompiler.plan.kinds import KINDS
from qcompiler.plan.kinds.linear import LinearKernel, RowCodes, RowNorm, Window
from qcompiler.plan.kinds.loop import AffineAccess
from qcompiler.plan.kinds.parts import Part
from qcompiler.plan.kinds.recurrent import GATES
from qcompiler.plan.pairs import PAIR_LAYOUTS

DTYPES: tuple[DType, ...] = get_args(DType)
BODIES: dict[str, Any] = dict(KINDS)
ARCHS = ("sm_75", "sm_90a")
"""bf16 on CUDA cores and on tensor cores; tests/cuda compiles for all architectures."""

LAYOUTS = {"cpu": "cpu_p16_v2", "cuda": "cuda_t16_v1"}
PAIRED = {plain: name for name, plain in PAIR_LAYOUTS.items()}
TARGET_LAYOUT, TARGET_PAIRS = "target", "target's pairs"
"""In place of a layout: the target's own, and that of rows in pairs."""


# --- specs -----------------------------------------------------------------------------------------------------------


def plain(name: str, dtype: DType, shape: Sequence[Any], access: Any = "r", last: int = 1) -> Operand:
    """Row-major, the last stride given."""
    strides: list[Any] = [last]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return Operand(name=name, dtype=dtype, access=access, shape=tuple(shape), strides=tuple(strides))


def options(body: Any) -> Iterator[dict[str, Any]]:
    """Every combination of a body's fields that are booleans or literals, and of those that may be left out."""
    hints = get_type_hints(body)
    chosen: dict[str, tuple[Any, ...]] = {}
    for name, hint in hints.items():
        if get_origin(hint) is Literal:
            chosen[name] = get_args(hint)
        elif hint is bool:
            chosen[name] = (False, True)
    for values in itertools.product(*chosen.values()):
        yield dict(zip(chosen, values, strict=True))


INDICES: tuple[DType, ...] = ("i64", "i32")
"""What the ops' verifiers let indices be."""


def types(*allowed: Sequence[DType]) -> Iterator[tuple[DType, ...]]:
    """Element types of operands: each in turn any that it may have, the others their first; and all alike."""
    alike = [(dtype,) * len(allowed) for dtype in DTYPES if all(dtype in each for each in allowed)]
    first = [each[0] for each in allowed]
    single = [(*first[:i], dtype, *first[i + 1 :]) for i, each in enumerate(allowed) for dtype in each]
    yield from dict.fromkeys([*alike, *single])


def make(name: str, operands: Sequence[Operand], **fields: Any) -> KernelSpec:
    return KernelSpec(name="k", symbols=(), operands=tuple(operands), body=BODIES[name](**fields))


def weights(rows: int, dtype: DType) -> Iterator[Operand]:
    """Every registered format, plain rows, plain columns side by side, and plain weights in the target's layout."""
    for fmt in (cls() for cls in formats.FORMATS.values()):
        ref = FormatRef(name=fmt.name, params=fmt.params)
        yield Operand(name="w", dtype=dtype, access="r", shape=(rows, 256), format=ref, layout=TARGET_LAYOUT)
    yield plain("w", dtype, (rows, 256))
    yield Operand(name="w", dtype=dtype, access="r", shape=(rows, 256), strides=(1, rows))
    yield Operand(name="w", dtype=dtype, access="r", shape=(rows, 256), layout=TARGET_LAYOUT)


def epilogue(extra: DType) -> ScalarProgram:
    extended = ScalarOp(result="b", op="arith.extf", dtype="f32", args=("y",))
    ops = (*((extended,) if extra != "f32" else ()),
           ScalarOp(result="r", op="arith.mulf", dtype="f32", args=("x", "y" if extra == "f32" else "b")))  # fmt: skip
    return ScalarProgram(inputs=(("x", "f32"), ("y", extra)), ops=ops, yields=("r",))


WINDOW = Window(image=(2, 9, 9, 32), size=(9, 9), kernel=(2, 4), strides=(1, 1), padding=(1, 2), dilation=(1, 1))


def linears() -> Iterator[KernelSpec]:
    yield from linears_of_codes()
    yield from linears_of_pairs()
    for x, w, out in types(FLOATS, FLOATS, FLOATS):
        operands = [plain("x", x, (7, 256)), plain("w", w, (24, 256)), plain("out", out, (7, 24), "w")]
        yield make("linear", operands, m=7, n=24, k=256, m_class="large", has_bias=False)
    floats = [choice for choice in options(BODIES["linear"]) if not choice["codes"]]
    for choice, dtype in itertools.product(floats, ("f32", "bf16", "f16")):
        bias = [plain("bias", dtype, (24,))] if choice["has_bias"] else []
        every = choice["has_bias"] and choice["m_class"] in ("2-8", "large")
        for w in weights(24, dtype) if every else [plain("w", dtype, (24, 256))]:
            ends = [plain("x", dtype, (7, 256)), w, *bias, plain("out", dtype, (7, 24), "w")]
            yield make("linear", ends, m=7, n=24, k=256, **choice)
        extra = [*ends[:-1], plain("e", dtype, (7, 24)), ends[-1]]
        yield make("linear", extra, m=7, n=24, k=256, epilogue=epilogue(dtype), **choice)
        yield make("linear", extra, m=7, n=24, k=256, **choice)  # an input too many
        image = [plain("x", dtype, (2, 9, 9, 32)), *ends[1:-1], plain("out", dtype, (162, 24), "w")]
        yield make("linear", image, m=162, n=24, k=256, window=WINDOW, **choice)
    for last, columns in itertools.product((1, 3), (1, 24)):  # columns apart: taken where there is one
        out = plain("out", "f32", (7, columns), "w", last)
        ends = [plain("x", "f32", (7, 256)), plain("w", "f32", (columns, 256)), out]
        yield make("linear", ends, m=7, n=columns, k=256, m_class="2-8", has_bias=False)
    ends = [plain("x", "f32", (7, 1), last=5), plain("w", "f32", (24, 1)), plain("out", "f32", (7, 24), "w")]
    yield make("linear", ends, m=7, n=24, k=1, m_class="2-8", has_bias=False)


def linears_of_codes() -> Iterator[KernelSpec]:
    for choice, (w, out) in itertools.product(options(BODIES["linear"]), types(FLOATS, FLOATS)):
        bias = [plain("bias", w, (24,))] if choice["has_bias"] else []
        every = choice["has_bias"] and choice["m_class"] == "large"
        for weight in weights(24, w) if every else [next(weights(24, w))]:
            x = plain("x", "i8", (7, row_bytes(256)))
            ends = [x, weight, *bias, plain("out", out, (7, 24), "w")]
            yield make("linear", ends, m=7, n=24, k=256, **{**choice, "codes": True})
        image = [plain("x", "i8", (2, 9, 9, row_bytes(32))), *ends[1:-1], plain("out", out, (162, 24), "w")]
        yield make("linear", image, m=162, n=24, k=256, window=WINDOW, **{**choice, "codes": True})
    alone = [choice for choice in options(BODIES["linear"]) if choice["codes"] and not choice["has_bias"]]
    for choice, dtype, made in itertools.product(alone, FLOATS, options(RowCodes)):  # rows that the kernel makes
        kept = [plain("kept_codes", "i8", (7, row_bytes(256)), "w")] * made["keeps"]
        for weight in list(weights(24, dtype))[:: 1 if choice["m_class"] == "2-8" else 9]:
            ends = [plain("x", dtype, (7, 256)), weight, *kept, plain("out", dtype, (7, 24), "w")]
            yield make("linear", ends, m=7, n=24, k=256, rows=RowCodes(**made), **choice)


def linears_of_pairs() -> Iterator[KernelSpec]:
    """Weights in pairs and in plain panels, combined or not, with one sum or two."""
    for choice, layout in itertools.product(options(BODIES["linear"]), (TARGET_PAIRS, TARGET_LAYOUT)):
        bias = [plain("bias", "f32", (24,))] if choice["has_bias"] else []
        for weight, sums, columns in itertools.product(weights(24, "f32"), (1, 2), (12, 24)):
            if weight.layout is None or (columns == 24) == choice["pairs"]:
                continue
            x = plain("x", "i8", (7, row_bytes(256))) if choice["codes"] else plain("x", "f32", (7, 256))
            stored = msgspec.structs.replace(weight, layout=layout)
            inputs = tuple((name, "f32") for name in ("a", "b")[:sums])
            product = ScalarOp(result="r", op="arith.mulf", dtype="f32", args=("a", inputs[-1][0]))
            combined = ScalarProgram(inputs=inputs, ops=(product,), yields=("r",))
            ends = [x, stored, *bias, plain("out", "f32", (7, columns), "w")]
            yield make("linear", ends, m=7, n=24, k=256, epilogue=combined, **choice)


def quantized_rows() -> Iterator[KernelSpec]:
    """Every type, and columns that fill neither their last 64 codes nor their last sum."""
    forms = [*((dtype, last, 256) for dtype in DTYPES for last in (1, 3)), ("f32", 1, 203), ("bf16", 1, 27)]
    for choice, (dtype, last, cols) in itertools.product(options(BODIES["quantize_rows"]), forms):
        columns = [plain("columns", "i1", (cols,))] if choice["kind"] == "outliers" else []
        columns += [plain("largest", "f32", (1,))] if choice["kind"] == "image" else []
        ends = [plain("x", dtype, (7, cols), last=last), *columns, plain("out", "i8", (7, row_bytes(cols)), "w")]
        yield make("quantize_rows", ends, rows=7, cols=cols, value=2.0, each=7, **choice)


def recurrents() -> Iterator[KernelSpec]:
    def operands(choice: dict[str, Any], w: Operand, x: DType, state: DType, cell: DType) -> list[Operand]:
        rows, width = int(w.shape[0]), int(w.shape[1])
        hidden, lstm, made = rows // GATES[choice["kind"]], choice["kind"] == "lstm", []
        made += [plain("projection", w.dtype, (width, hidden))] * choice["projects"]
        made += [plain("bias", x, (rows,))] * choice["has_bias"] + [plain("start", state, (3, width))]
        made += [plain("cell_start", cell, (3, hidden))] * lstm + [plain("out", state, (2, 3, width), "w")]
        made += [plain("cell", cell, (3, hidden), "w")] * lstm
        return [plain("x", x, (2, 3, rows)), w, *made, *[plain("room", "f32", (3, hidden), "w")] * choice["projects"]]

    for choice in options(BODIES["recurrent"]):
        hidden = 300 if choice["projects"] else 256
        rows = GATES[choice["kind"]] * hidden
        every = choice["has_bias"] and (choice["projects"] or not choice["reverse"])
        sizes = {"steps": 2, "batch": 3, "hidden": hidden, "width": 256}
        for dtype in FLOATS:
            for w in weights(rows, dtype) if every else [plain("w", dtype, (rows, 256))]:
                yield make("recurrent", operands(choice, w, dtype, dtype, dtype), **choice, **sizes)
        for kinds in types(FLOATS, FLOATS, FLOATS):
            yield make("recurrent", operands(choice, plain("w", "f32", (rows, 256)), *kinds), **choice, **sizes)


def grouped_linears() -> Iterator[KernelSpec]:
    def spec(x: DType, w: Operand, index: DType, out: DType, rows: int, last: int = 1) -> KernelSpec:
        n = int(w.shape[0]) // 3
        operands = [plain("x", x, (rows, 256)), w, plain("index", index, (2 * rows,)),
                    plain("out", out, (2 * rows, n), "w", last)]  # fmt: skip
        return make("grouped_linear", operands, rows=rows, repeat=2, experts=3, n=n, k=256)

    for x, w, index, out in types(FLOATS, FLOATS, INDICES, FLOATS):
        yield spec(x, plain("w", w, (72, 256)), index, out, 40)
    for dtype, rows in itertools.product(("f32", "bf16", "f16"), (1, 40)):
        for w in weights(72, dtype):
            yield spec(dtype, w, "i32", dtype, rows)
    for rows in (1, 24):
        yield spec("f32", plain("w", "f32", (3 * rows, 256)), "i64", "f32", 40, last=3)


def embeddings() -> Iterator[KernelSpec]:
    for ids, table, out in types(INDICES, FLOATS, FLOATS):
        operands = [plain("ids", ids, (5,)), plain("table", table, (24, 256)), plain("out", out, (5, 256), "w")]
        yield make("embedding", operands, count=5, rows=24, cols=256)
    for dtype, layout in itertools.product(("f32", "bf16", "f16"), (TARGET_LAYOUT, "canonical")):
        for table in weights(24, dtype):
            stored = table if table.format is None else msgspec.structs.replace(table, layout=layout)
            operands = [plain("ids", "i32", (5,)), stored, plain("out", dtype, (5, 256), "w")]
            yield make("embedding", operands, count=5, rows=24, cols=256)


SIZES = ((1, 64, None, None), (40, 64, 8, 30.0), (40, 80, None, None), (40, 160, 8, None))
"""Queries, head size, window, cap: one query, and what tensor cores take and do not."""


def attentions() -> Iterator[KernelSpec]:
    every = options(BODIES["attention"])
    kinds = [(choice, ("f16",) * 4) for choice in every] + [
        (next(options(BODIES["attention"])), dtypes) for dtypes in types(*[FLOATS] * 4)
    ]
    kinds += [
        ({**kinds[0][0], "cache": kind, "last": last, "ring": ring}, (q, "i8", "i8", out))
        for kind, last, ring in (
            ("int8", False, False), ("int8", True, False), ("int8", True, True), ("fp8", False, False),
            ("int4", True, False),
        ) for q, out in types(FLOATS, FLOATS)
    ]  # fmt: skip
    for (choice, dtypes), (queries, size, window, cap) in itertools.product(kinds, SIZES):
        if choice["ring"] and (window is None or not choice["last"] or choice["mask"] != "none"):
            continue  # the contract refuses these
        stored, keys = (
            cache_row_bytes(size, choice["cache"]) if "cache" in choice else size,
            49 if choice["ring"] else 33,
        )
        rows = (("q", 8, queries), ("k", 2, keys), ("v", 2, keys), ("out", 8, queries))
        q, k, v, out = (
            plain(name, dtype, (2, heads, length, stored if name in "kv" else size), "w" if name == "out" else "r")
            for dtype, (name, heads, length) in zip(dtypes, rows, strict=True)
        )
        shape, masks = (2, 8, queries, keys), []
        if choice["mask"] != "none":
            masks = [plain("mask", "i1" if choice["mask"] == "bool" else "f32", shape)]
        last = [plain("last", "i64", (2, queries))] if choice["last"] else []
        yield make(
            "attention", [q, k, v, *masks, *last, out], batch=2, heads=8, kv_heads=2, q_len=queries, kv_len=keys,
            head_dim=size, value_dim=size, scale=0.1, window=window, softcap=cap, **choice,
        )  # fmt: skip


def joins() -> Iterator[KernelSpec]:
    for out, parts, size in itertools.product(FLOATS, (1, 33, 256), (8, 300)):
        ends = [plain("x", "f32", (2, 8, 3, parts, size + 2)), plain("out", out, (2, 8, 3, size), "w")]
        yield make("join_attention", ends, batch=2, heads=8, q_len=3, parts=parts, value_dim=size)


def made_cache_rows() -> Iterator[KernelSpec]:
    for kind, dtype, last in itertools.product(cache_rows.KINDS, DTYPES, (1, 3)):
        ends = [
            plain("x", dtype, (2, 3, 5, 64), last=last),
            plain("out", "i8", (2, 3, 5, cache_row_bytes(64, kind)), "w"),
        ]
        yield make("quantize_cache", ends, outer=2, middle=3, inner=5, cols=64, kind=kind)


def read_cache_rows() -> Iterator[KernelSpec]:
    for kind, dtype, last in itertools.product(cache_rows.KINDS, DTYPES, (1, 3)):
        ends = [
            plain("rows", "i8", (2, 3, 5, cache_row_bytes(64, kind))),
            plain("out", dtype, (2, 3, 5, 64), "w", last=last),
        ]
        yield make("dequantize_cache", ends, outer=2, middle=3, inner=5, cols=64, kind=kind)


def norms() -> Iterator[KernelSpec]:
    for choice in options(BODIES["norm"]):
        count = 2 + choice["has_weight"] + choice["has_bias"]
        for dtypes in types(*[FLOATS] * count):
            vectors = [plain(f"v{i}", dtype, (96,)) for i, dtype in enumerate(dtypes[1:-1])]
            ends = [plain("x", dtypes[0], (7, 96)), *vectors, plain("out", dtypes[-1], (7, 96), "w")]
            yield make("norm", ends, rows=7, cols=96, eps=1e-5, **choice)


def softmaxes() -> Iterator[KernelSpec]:
    for x, out in types(FLOATS, FLOATS):
        yield make("softmax", [plain("x", x, (7, 96)), plain("out", out, (7, 96), "w")], rows=7, cols=96)


def batch_matmuls() -> Iterator[KernelSpec]:
    for a, b, out in types(FLOATS, FLOATS, FLOATS):
        ends = [plain("a", a, (3, 7, 16)), plain("b", b, (3, 16, 9)), plain("out", out, (3, 7, 9), "w")]
        yield make("batch_matmul", ends, batch=(3,), m=7, n=9, k=16)


def gathers() -> Iterator[KernelSpec]:
    for choice, (dtype, index) in itertools.product(options(BODIES["gather"]), types(DTYPES, INDICES)):
        shape = (5,) if choice["mode"] == "take" else (3, 5, 4)
        ends = [plain("x", dtype, (3, 9, 4)), plain("index", index, shape), plain("out", dtype, (3, 5, 4), "w")]
        yield make("gather", ends, outer=3, length=9, count=5, inner=4, **choice)


def index_updates() -> Iterator[KernelSpec]:
    for dtype, index in types(DTYPES, INDICES):
        ends = [plain("x", dtype, (3, 9, 4), "rw"), plain("index", index, (5,)), plain("src", dtype, (3, 5, 4))]
        yield make("index_update", ends, outer=3, length=9, count=5, inner=4)


def scatters() -> Iterator[KernelSpec]:
    for choice, (index, dtype) in itertools.product(options(BODIES["scatter"]), types(INDICES, DTYPES)):
        ends = [plain("index", index, (3, 5, 4)), plain("src", dtype, (3, 5, 4)), plain("out", dtype, (3, 9, 4), "rw")]
        yield make("scatter", ends, outer=3, length=9, count=5, inner=4, **choice)


def scans() -> Iterator[KernelSpec]:
    for choice, (x, out), inner in itertools.product(options(BODIES["scan"]), types(DTYPES, DTYPES), (1, 4)):
        ends = [plain("x", x, (3, 9, inner)), plain("out", out, (3, 9, inner), "w")]
        yield make("scan", ends, outer=3, length=9, inner=inner, **choice)


def orders() -> Iterator[KernelSpec]:
    for choice, dtype in itertools.product(options(BODIES["order"]), DTYPES):
        ends = [plain("x", dtype, (3, 9, 4)), plain("values", dtype, (3, 5, 4), "w")]
        ends.append(plain("indices", "i64", (3, 5, 4), "w"))
        yield make("order", ends, outer=3, length=9, count=5, inner=4, **choice)


def argmaxes() -> Iterator[KernelSpec]:
    for dtype in DTYPES:
        ends = [plain("x", dtype, (3, 9, 4)), plain("out", "i64", (3, 4), "w")]
        yield make("argmax", ends, outer=3, length=9, inner=4)


def top_ps() -> Iterator[KernelSpec]:
    for dtype, share, step in itertools.product(DTYPES, ("f32", "bf16"), (1, 2)):
        ends = [plain("x", dtype, (3, 9), last=step), plain("top", "f32", (3,)), plain("draw", share, (3,), last=step)]
        yield make("top_p", [*ends, plain("out", "i64", (3,), "w")], rows=3, cols=9)


def linear_attentions() -> Iterator[KernelSpec]:
    for choice in options(BODIES["linear_attention"]):
        if choice["decays_columns"] and choice["has_rate"]:
            continue
        for depth, dtype in ((1, "f32"), (19, "f32"), (128, "f32"), (19, "bf16")):
            keys, values = (2, 5, 2, depth), (2, 5, 4, 3)
            ends = [plain("state", "f32", (3, 4, 3, depth), "rw"), plain("query", dtype, keys)]
            ends += [plain("key", "f32", keys), plain("value", "f32", values)]
            ends.append(plain("decay", "f32", (2, 5, 4, depth if choice["decays_columns"] else 1)))
            ends += [plain(name, "i64", (2,)) for name in ("first", "counts")]
            ends += [plain("rate", "f32", (4, depth))] * choice["has_rate"]
            ends += [plain("beta", "f32", (2, 5, 4))] * choice["has_beta"]
            sizes = {"slots": 3, "batch": 2, "steps": 5, "heads": 4, "groups": 2, "width": 3, "depth": depth}
            yield make("linear_attention", [*ends, plain("out", "f32", values, "w")], **choice, **sizes)


def routes() -> Iterator[KernelSpec]:
    """Weights in every float type; the others are refused."""
    forms = (("all", False), ("all", True), ("chosen", False))
    for dtype, made, (scores, normalise), step in itertools.product(DTYPES, ("f32", "bf16"), forms, (1, 2)):
        ends = [plain("x", dtype, (3, 9), last=step), plain("weights", made, (3, 2), "w")]
        ends.append(plain("indices", "i64", (3, 2), "w", last=step))
        yield make("route", ends, rows=3, cols=9, count=2, scores=scores, normalise=normalise)


def samples() -> Iterator[KernelSpec]:
    for dtype, tally, step in itertools.product(DTYPES, ("f32", "i32"), (1, 2)):
        ends = [plain("x", dtype, (3, 9), last=step), plain("how", "i64", (2, 10)), plain("tallies", tally, (2, 9))]
        ends += [plain("bias", "f32", (2, 9), last=step), plain("out", "i64", (2,), "w")]
        yield make("sample", ends, batch=2, rows=3, cols=9)


def hadamards() -> Iterator[KernelSpec]:
    forms = [*((x, out, 256) for x in DTYPES for out in DTYPES), *(("f32", "f32", block) for block in (2, 32, 512))]
    for x, out, block in forms:
        ends = [plain("x", x, (3, 1536)), plain("out", out, (3, 1536), "w")]
        yield make("hadamard", ends, rows=3, cols=1536, block=block)


def loops() -> Iterator[KernelSpec]:
    """A sum of two operands, in every element type: side by side, transposed, folded along either loop; every op."""
    forms = {
        "pointwise": ("parallel", (96, 1), (96, 1)), "transposed": ("parallel", (1, 7), (96, 1)),
        "rows": ("reduction", (96, 1), (1, 0)), "columns": ("reduction", (1, 7), (1, 0)),
    }  # fmt: skip
    for dtype, (kind, read, written) in itertools.product(DTYPES, forms.values()):
        op = "arith.addf" if dtype in ALL_FLOATS else "arith.ori" if dtype == "i1" else "arith.addi"
        reduces = kind == "reduction"
        sum_ = ScalarOp(result="r", op=op, dtype=dtype, args=("x", "acc" if reduces else "x"))
        program = ScalarProgram(inputs=(("x", dtype), ("acc", dtype)), ops=(sum_,), yields=("r",))
        zero = (0.0).hex() if dtype in ALL_FLOATS else "0"
        operands = [plain("x", dtype, (7 * 96,)), plain("y", dtype, (7 if reduces else 7 * 96,), "w")]
        yield make(
            "loop", operands, extents=(7, 96), iterators=("parallel", kind), body=program, init=(zero,) * reduces,
            accesses=tuple(AffineAccess(offset=0, coefficients=c) for c in (read, written)),
        )  # fmt: skip


def launches_of_parts() -> Iterator[KernelSpec]:
    """A loop, and a row that is computed or copied, in every element type and with every type of index."""
    for dtype, index in types(DTYPES, INDICES):
        op = "arith.addf" if dtype in ALL_FLOATS else "arith.ori" if dtype == "i1" else "arith.addi"
        twice = ScalarOp(result="r", op=op, dtype=dtype, args=("x", "x"))
        ends = [plain("x", dtype, (3, 4)), plain("at", index, (1,)), plain("y", dtype, (3, 4), "w")]
        ends += [plain(name, dtype, (3, 9, 4), "rw") for name in ("computed", "copied")]
        loops = {
            (ops, row): BODIES["loop"](
                extents=(3, 4), iterators=("parallel", "parallel"),
                body=ScalarProgram(inputs=(("x", dtype), ("old", dtype)), ops=ops, yields=(("r" if ops else "x"),)),
                accesses=tuple(AffineAccess(offset=0, coefficients=(step, 1)) for step in (4, 36 if row else 4)),
            )
            for ops, row in (((twice,), False), ((twice,), True), ((), True))
        }  # fmt: skip
        apart, computed, copied = loops.values()
        parts = (Part(operands=(0, 2), loop=apart), Part(operands=(0, 3), loop=computed, index=1),
                 Part(operands=(0, 4), loop=copied, index=1))  # fmt: skip
        yield make("parts", ends, parts=parts)


def launches_of_linears() -> Iterator[KernelSpec]:
    """Every format beside the next one, with bias, epilogue and norm; two plain ones; rows of int8; classes and weights
    that a launch of several does not take."""
    norm = RowNorm(kind="rms", eps=1e-5, has_weight=True, has_bias=False)
    for dtype in ("f32", "bf16", "f16"):
        every = [w for w in weights(24, dtype) if w.layout == TARGET_LAYOUT]
        pairs = [*itertools.pairwise(every), (every[-1], every[-1])]
        for m, (first, second) in zip(itertools.cycle((1, 3, 8)), pairs, strict=False):
            x, out = plain("x", dtype, (m, 256)), plain("out", dtype, (m, 24), "w")
            extra, scale = plain("extra0", dtype, (m, 24)), plain("norm_weight", dtype, (256,))
            one = few_rows(m, has_bias=True)
            other = msgspec.structs.replace(few_rows(m), epilogue=epilogue(dtype), norm=norm)
            yield beside((one, [x, first, plain("bias", dtype, (24,)), out]), (other, [x, second, extra, scale, out]))
    packed = next(w for w in weights(24, "f32") if w.format is not None and w.format.name == "int8")
    x, out = plain("x", "f32", (3, 256)), plain("out", "f32", (3, 24), "w")
    made = msgspec.structs.replace(few_rows(3), codes=True, rows=RowCodes(kind="token"))
    yield beside((made, [x, packed, out]), (few_rows(3), [x, packed, out]))
    for m, m_class, w in (
        (9, "2-8", packed),
        (3, "1", packed),
        (3, "9-64", packed),
        (3, "2-8", plain("w", "f32", (24, 256))),
    ):
        ends = [plain("x", "f32", (m, 256)), w, plain("out", "f32", (m, 24), "w")]
        body = msgspec.structs.replace(few_rows(m), m_class=m_class)
        yield beside((body, ends), (body, ends))


def few_rows(m: int, *, has_bias: bool = False) -> LinearKernel:
    return LinearKernel(m=m, n=24, k=256, m_class="1" if m == 1 else "2-8", has_bias=has_bias)


def beside(*given: tuple[LinearKernel, Sequence[Operand]]) -> KernelSpec:
    """The launch of several linears."""
    ends = [msgspec.structs.replace(o, name=f"{o.name}_{i}") for i, (_, own) in enumerate(given) for o in own]
    return make("linears", ends, linears=tuple(body for body, _ in given))


SPECS: dict[str, Callable[[], Iterator[KernelSpec]]] = {
    "argmax": argmaxes, "attention": attentions, "batch_matmul": batch_matmuls,
    "dequantize_cache": read_cache_rows, "embedding": embeddings, "gather": gathers, "grouped_linear": grouped_linears,
    "hadamard": hadamards,
    "index_update": index_updates, "join_attention": joins, "linear": linears, "linear_attention": linear_attentions,
    "linears": launches_of_linears, "loop": loops, "norm": norms,
    "order": orders, "parts": launches_of_parts, "quantize_cache": made_cache_rows, "quantize_rows": quantized_rows,
    "recurrent": recurrents, "route": routes, "sample": samples, "scan": scans, "scatter": scatters,
    "softmax": softmaxes, "top_p": top_ps,
}  # fmt: skip


# --- the comparison --------------------------------------------------------------------------------------------------


def laid_out(spec: KernelSpec, target: str) -> KernelSpec:
    """The spec with the target's own layouts."""
    own = {TARGET_LAYOUT: LAYOUTS[target], TARGET_PAIRS: PAIRED[LAYOUTS[target]]}
    operands = [msgspec.structs.replace(o, layout=own.get(o.layout or "", o.layout)) for o in spec.operands]
    return msgspec.structs.replace(spec, operands=tuple(operands))


def refusal(spec: KernelSpec, target: str) -> str | None:
    """What a target says of a spec, on the first of its instruction sets that refuses it."""
    spec = laid_out(spec, target)
    if target == "cpu" and isinstance(spec.body, LinearKernel) and spec.body.m_class == "9-64":  # CUDA's own class
        spec = msgspec.structs.replace(spec, body=msgspec.structs.replace(spec.body, m_class="large"))
    for isa in ("x86-64-v3",) if target == "cpu" else ARCHS:
        try:
            cpu.emit_kernel(spec, isa) if target == "cpu" else cuda.emit_kernel(spec, isa)
        except KernelSelectionError as error:
            return f"{isa}: {error}"
    return None


def test_both_targets_have_every_template() -> None:
    assert set(cpu.TEMPLATES) == set(cuda.TEMPLATES) == set(BODIES) == set(SPECS)
    assert set(TEMPLATES.values()) | {"linears", "loop", "parts"} == set(BODIES)


SHORT_STEP = {"linear": 7}
"""Of 8,000 specs of linears the short run takes every seventh: each format, class, option and type is among them."""


@pytest.mark.parametrize(
    ("template", "step"),
    [
        *((template, SHORT_STEP.get(template, 1)) for template in sorted(BODIES)),
        *(pytest.param(template, 1, marks=pytest.mark.slow) for template in SHORT_STEP),
    ],
)
def test_what_one_target_takes_the_other_takes(template: str, step: int) -> None:
    taken, apart = 0, []
    for spec in itertools.islice(SPECS[template](), 0, None, step):
        on_cpu, on_cuda = refusal(spec, "cpu"), refusal(spec, "cuda")
        taken += on_cpu is None
        if (on_cpu is None) != (on_cuda is None):
            kinds = ", ".join(f"{o.name} {o.format.name if o.format else o.dtype}" for o in spec.operands)
            apart.append(f"{kinds}; {spec.body}: cpu: {on_cpu or 'takes it'}; cuda: {on_cuda or 'takes it'}")
    assert not apart, f"{len(apart)} specs, the first ones:\n" + "\n".join(apart[:5])
    assert taken >= len(DTYPES) // 4, "hardly a spec is taken by anyone"
