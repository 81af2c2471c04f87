"""The sound programs that are mutated: one for each way in which a template is written, for the CPU and for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
from handmade import ONE, Maker, loop, op, operand, replace, view_of

from qcompiler import formats
from qcompiler.formats import cache_rows, int8_rows
from qcompiler.kernels import layouts
from qcompiler.plan.kernel import FormatRef, KernelBody, KernelSpec, Operand, ScalarProgram
from qcompiler.plan.kinds.argmax import ArgmaxKernel
from qcompiler.plan.kinds.attention import AttentionKernel
from qcompiler.plan.kinds.batch_matmul import BatchMatmulKernel
from qcompiler.plan.kinds.dequantize_cache import DequantizeCacheKernel
from qcompiler.plan.kinds.embedding import EmbeddingKernel
from qcompiler.plan.kinds.gather import GatherKernel
from qcompiler.plan.kinds.grouped_linear import GroupedLinearKernel
from qcompiler.plan.kinds.hadamard import HadamardKernel
from qcompiler.plan.kinds.index_update import IndexUpdateKernel
from qcompiler.plan.kinds.join_attention import JoinAttentionKernel
from qcompiler.plan.kinds.linear import LinearKernel, RowCodes, RowNorm, Window
from qcompiler.plan.kinds.linear_attention import LinearAttentionKernel
from qcompiler.plan.kinds.linears import LinearsKernel
from qcompiler.plan.kinds.norm import NormKernel
from qcompiler.plan.kinds.order import OrderKernel
from qcompiler.plan.kinds.parts import Part, PartNorm, PartsKernel
from qcompiler.plan.kinds.quantize_cache import QuantizeCacheKernel
from qcompiler.plan.kinds.quantize_rows import QuantizeRowsKernel
from qcompiler.plan.kinds.recurrent import RecurrentKernel
from qcompiler.plan.kinds.route import RouteKernel
from qcompiler.plan.kinds.sample import WORDS, SampleKernel
from qcompiler.plan.kinds.scan import ScanKernel
from qcompiler.plan.kinds.scatter import ScatterKernel
from qcompiler.plan.kinds.softmax import SoftmaxKernel
from qcompiler.plan.kinds.top_p import TopPKernel
from qcompiler.plan.pairs import PAIR_LAYOUTS
from qcompiler.plan.plan import Copy, Launch, Select, SelectCase, View
from qcompiler.plan.weights import StoredTensor
from qcompiler.runtime.image import ProgramImage

LAYOUTS = {"cpu": "cpu_p16_v2", "cuda": "cuda_t16_v1"}
ARCHS = {"cpu": "x86-64-v3", "cuda": "sm_80"}
B, S = (1, 5), (1, 9)


def spec(name: str, body: KernelBody, operands: tuple[Operand, ...], *symbols: str) -> KernelSpec:
    return KernelSpec(name=name, symbols=symbols, operands=operands, body=body)


def packed(kind: str, name: str, rows: int, cols: int, fmt: str = "nf4", layout: str | None = None) -> Any:
    """(operand, stored tensor) of a weight in a format."""
    declared = formats.get(fmt)
    ref = FormatRef(name=fmt, params=dict(declared.params))
    data = declared.encode(np.random.default_rng(0).standard_normal((rows, cols), np.float32))
    where = layout or LAYOUTS[kind]
    stored = layouts.get(where).pack(declared, "f32", rows, cols, data.data)
    tensor = StoredTensor(name, "f32", (rows, cols), stored, ref, where)
    return operand(name, (rows, cols), format=ref, layout=where), tensor


def epilogue(extra: str) -> ScalarProgram:
    """silu(sum) * extra, roughly: sum / (1 + exp(-sum)) * extra."""
    ops = (
        op("n", "arith.negf", "acc"), op("e", "math.exp", "n"), op("one", "arith.constant", value=(1.0).hex()),
        op("d", "arith.addf", "e", "one"), op("q", "arith.divf", "acc", "d"), op("w", "arith.extf", "x0"),
        op("y", "arith.mulf", "q", "w"),
    )  # fmt: skip
    return ScalarProgram(inputs=(("acc", "f32"), ("x0", extra)), ops=ops, yields=("y",))  # type: ignore[arg-type]


# --- loops -----------------------------------------------------------------------------------------------------------


def add_row(kind: str) -> ProgramImage:
    operands = (operand("x", ("b", "s", 24)), operand("row", (24,)), operand("y", ("b", "s", 24), "w"))
    ops = (op("a", "arith.addf", "in0", "in1"), op("z", "math.tanh", "a"))
    k = loop("add", ("b", "s", 24), operands, (("24*s", 24, 1), (0, 0, 1), ("24*s", 24, 1)), ops, symbols=("b", "s"))
    return Maker({"b": B, "s": S}, kind).kernel(k).image(ARCHS[kind])


def transposed(kind: str) -> ProgramImage:
    operands = (operand("x", ("s", 40)), operand("y", (40, "s"), "w"))
    k = loop("turn", (40, "s"), operands, ((1, 40), ("s", 1)), (op("a", "arith.negf", "in0"),), symbols=("s",))
    return Maker({"s": (1, 33)}, kind).kernel(k).image(ARCHS[kind])


def reduced(kind: str) -> ProgramImage:
    operands = (operand("x", ("b", 50)), operand("y", ("b",), "w"))
    k = loop("sum", ("b", 50), operands, ((50, 1), (1, 0)), (op("a", "arith.addf", "in1", "in0"),), symbols=("b",),
             iterators=("parallel", "reduction"), init=("0x0.0p+0",))  # fmt: skip
    return Maker({"b": B}, kind).kernel(k).image(ARCHS[kind])


def reduced_beside(kind: str) -> ProgramImage:
    operands = (operand("x", (7, "s")), operand("y", ("s",), "w"))
    k = loop("top", ("s", 7), operands, ((1, "s"), (1, 0)), (op("a", "arith.maximumf", "in1", "in0"),), symbols=("s",),
             iterators=("parallel", "reduction"), init=("-inf",))  # fmt: skip
    return Maker({"s": (1, 40)}, kind).kernel(k).image(ARCHS[kind])


def integers(kind: str) -> ProgramImage:
    operands = (operand("x", ("s",), dtype="i64"), operand("m", ("s",), dtype="i1"), operand("y", ("s",), "w", "i32"),
                operand("z", ("s",), "w", "i1"))  # fmt: skip
    ops = (
        op("i", "linalg.index", dtype="index", axis=0), op("c", "arith.index_cast", "i", dtype="i64"),
        op("d", "arith.muli", "in0", "c", dtype="i64"), op("three", "arith.constant", dtype="i64", value="3"),
        op("r", "arith.divsi", "d", "three", dtype="i64"), op("t", "arith.trunci", "r", dtype="i32"),
        op("zero", "arith.constant", dtype="i32", value="0"), op("p", "arith.select", "in1", "t", "zero", dtype="i32"),
        op("q", "arith.cmpi", "in0", "c", dtype="i1", predicate="slt"),
    )  # fmt: skip
    k = loop("ints", ("s",), operands, ((1,),) * 4, ops, symbols=("s",), yields=("p", "q"))
    return Maker({"s": (0, 70)}, kind).kernel(k).image(ARCHS[kind])


def sliced(kind: str) -> ProgramImage:
    """Two kernels fill the halves of one activation; a third reads all of it."""
    maker = Maker({"b": B}, kind)
    whole = operand("y", ("b", 32), "w")
    left = operand("y", ("b", 16), "w", strides=(32, 1))
    x = operand("x", ("b", 16))
    maker.input("x", x.shape)
    maker.activation("a", 5 * 128)
    maker.output("y", whole.shape)
    half = loop("half", ("b", 16), (x, left), ((16, 1), (32, 1)), (op("n", "arith.negf", "in0"),), symbols=("b",))
    for offset in (0, 16):
        maker.launch(half, (view_of(x, "x"), view_of(left, "a", offset)))
    read = operand("x", ("b", 32))
    copy = loop("all", ("b", 32), (read, whole), ((32, 1), (32, 1)), (op("n", "math.exp", "in0"),), symbols=("b",))
    maker.launch(copy, (view_of(read, "a"), view_of(whole, "y")))
    return maker.image(ARCHS[kind])


# --- products --------------------------------------------------------------------------------------------------------


def linear(kind: str) -> ProgramImage:
    w, stored = packed(kind, "w", 24, 64)
    operands = (operand("x", ("b", 64)), w, operand("bias", (24,)), operand("out", ("b", 24), "w"))
    body = LinearKernel(m="b", n=24, k=64, m_class="large", has_bias=True)
    return Maker({"b": (1, 20)}, kind).kernel(spec("linear", body, operands, "b"), {"w": stored}).image(ARCHS[kind])


def linear_bf16(kind: str) -> ProgramImage:
    """Factors in bf16, which x is rounded to: straight from codes for few rows, by panels for more."""
    w, stored = packed(kind, "w", 24, 64)
    narrow = replace(w, dtype="bf16")
    operands = (operand("x", ("b", 64)), narrow, operand("out", ("b", 24), "w"))
    body = LinearKernel(m="b", n=24, k=64, m_class="large", has_bias=False)
    return Maker({"b": (1, 70)}, kind).kernel(spec("linear", body, operands, "b"), {"w": stored}).image(ARCHS[kind])


def linear_bf16_few(kind: str) -> ProgramImage:
    """The same with offsets, and rows in bf16."""
    w, stored = packed(kind, "w", 24, 96, "q4_1")
    narrow = replace(w, dtype="bf16")
    operands = (operand("x", (3, 96), dtype="bf16"), narrow, operand("out", (3, 24), "w", dtype="bf16"))
    body = LinearKernel(m=3, n=24, k=96, m_class="2-8", has_bias=False)
    return Maker({}, kind).kernel(spec("linear", body, operands), {"w": stored}).image(ARCHS[kind])


def linear_few(kind: str) -> ProgramImage:
    w, stored = packed(kind, "w", 24, 64, "q8_0")
    operands = (operand("x", (3, 64)), w, operand("extra", (3, 24), dtype="bf16"), operand("out", (3, 24), "w"))
    body = LinearKernel(m=3, n=24, k=64, m_class="2-8", has_bias=False, epilogue=epilogue("bf16"))
    return Maker({}, kind).kernel(spec("linear", body, operands), {"w": stored}).image(ARCHS[kind])


def linear_trellis(kind: str) -> ProgramImage:
    """A weight whose values are functions of several codes each, in blocks that are circles; a last panel of 4 rows."""
    w, stored = packed(kind, "w", 20, 512, "tq")
    operands = (operand("x", ("b", 512)), w, operand("out", ("b", 20), "w"))
    body = LinearKernel(m="b", n=20, k=512, m_class="1", has_bias=False)
    return Maker({"b": B}, kind).kernel(spec("linear", body, operands, "b"), {"w": stored}).image(ARCHS[kind])


def linear_pairs(kind: str) -> ProgramImage:
    """Rows of two halves of 20, combined: the last panel of each is half full."""
    layout = next(name for name, plain in PAIR_LAYOUTS.items() if plain == LAYOUTS[kind])
    w, stored = packed(kind, "w", 40, 64, layout=layout)
    operands = (operand("x", ("b", 64)), w, operand("bias", (40,)), operand("out", ("b", 20), "w"))
    product = ScalarProgram(inputs=(("g", "f32"), ("u", "f32")), ops=(op("y", "arith.mulf", "g", "u"),), yields=("y",))
    body = LinearKernel(m="b", n=40, k=64, m_class="large", has_bias=True, epilogue=product, pairs=True)
    return Maker({"b": (1, 20)}, kind).kernel(spec("linear", body, operands, "b"), {"w": stored}).image(ARCHS[kind])


def linear_norm(kind: str) -> ProgramImage:
    """Rows that are normalised first and kept, with all operands that a norm may have."""
    w, stored = packed(kind, "w", 24, 64)
    vectors = (operand("norm_weight", (64,)), operand("norm_bias", (64,)))
    written = (operand("rows", (3, 64), "w"), operand("out", (3, 24), "w"))
    operands = (operand("x", (3, 64)), w, operand("bias", (24,)), *vectors, *written)
    norm = RowNorm(kind="layer", eps=1e-5, has_weight=True, has_bias=True, keeps=True)
    body = LinearKernel(m=3, n=24, k=64, m_class="2-8", has_bias=True, norm=norm)
    return Maker({}, kind).kernel(spec("linear", body, operands), {"w": stored}).image(ARCHS[kind])


def linear_added(kind: str) -> ProgramImage:
    """Rows that are normalised, added to a residual, kept and normalised again."""
    w, stored = packed(kind, "w", 24, 64)
    affine = (operand("residual_weight", (64,)), operand("residual", (3, 64)), operand("norm_weight", (64,)))
    written = (operand("rows", (3, 64), "w"), operand("out", (3, 24), "w"))
    norm = RowNorm(kind="rms", eps=1e-5, has_weight=True, has_bias=False)
    body = LinearKernel(m=3, n=24, k=64, m_class="2-8", has_bias=False, norm=norm,
                        added=replace(norm, keeps=True, has_residual=True))  # fmt: skip
    operands = (operand("x", (3, 64)), w, *affine, *written)
    return Maker({}, kind).kernel(spec("linear", body, operands), {"w": stored}).image(ARCHS[kind])


def linear_made(kind: str) -> ProgramImage:
    """Rows that are normalised and kept, and of which the linear makes the rows of int8 that it multiplies."""
    w, stored = packed(kind, "w", 24, 96, "q8_0")
    written = (operand("rows", (3, 96), "w"), operand("out", (3, 24), "w"))
    norm = RowNorm(kind="rms", eps=1e-5, has_weight=True, has_bias=False, keeps=True)
    body = LinearKernel(m=3, n=24, k=96, m_class="2-8", has_bias=False, norm=norm, codes=True,
                        rows=RowCodes(kind="tensor", value=2.5))  # fmt: skip
    operands = (operand("x", (3, 96)), w, operand("norm_weight", (96,)), *written)
    return Maker({}, kind).kernel(spec("linear", body, operands), {"w": stored}).image(ARCHS[kind])


def linear_kept_codes(kind: str) -> ProgramImage:
    """Rows that are normalised, and of which the linear makes rows of int8 that another one multiplies as well."""
    maker, row = Maker({}, kind), int8_rows.row_bytes(96)
    first, stored = packed(kind, "w", 24, 96, "q8_0")
    second, kept = packed(kind, "v", 20, 96, "int8")
    x, scale = operand("x", (3, 96)), operand("norm_weight", (96,))
    codes, read = operand("kept_codes", (3, row), "w", "i8"), operand("x", (3, row), dtype="i8")
    out, beside = operand("y", (3, 24), "w"), operand("z", (3, 20), "w")
    for each in (x, scale):
        maker.input(each.name, each.shape)
    maker.activation("rows", 3 * row)
    for each in (out, beside):
        maker.output(each.name, each.shape)
    for each in (stored, kept):
        maker.store.add(each)
    body = LinearKernel(m=3, n=24, k=96, m_class="2-8", has_bias=False, codes=True,
                        norm=RowNorm(kind="layer", eps=1e-5, has_weight=True, has_bias=False),
                        rows=RowCodes(kind="token", keeps=True))  # fmt: skip
    made = spec("made", body, (x, first, scale, codes, replace(out, name="out")))
    views = (view_of(x, "x"), view_of(first, "weight w"), view_of(scale, "norm_weight"), view_of(codes, "rows"))
    maker.launch(made, (*views, view_of(out, "y")))
    body = LinearKernel(m=3, n=20, k=96, m_class="2-8", has_bias=False, codes=True)
    product = spec("product", body, (read, second, replace(beside, name="out")))
    maker.launch(product, (view_of(read, "rows"), view_of(second, "weight v"), view_of(beside, "z")))
    return maker.image(ARCHS[kind])


def linear_writes(kind: str) -> ProgramImage:
    """Rows with their statistics, in two groups of columns of which the second is shorter. A CPU has no such kernel."""
    w, stored = packed(kind, "w", 40, 64)
    written = (operand("parts", (9, 4), "w"), operand("out", (9, 40), "w"))
    body = LinearKernel(m=9, n=40, k=64, m_class="9-64", has_bias=False, statistics="layer")
    operands = (operand("x", (9, 64)), w, *written)
    return Maker({}, kind).kernel(spec("linear", body, operands), {"w": stored}).image(ARCHS[kind])


def linear_given(kind: str) -> ProgramImage:
    """Rows that are normalised by statistics that are an operand."""
    w, stored = packed(kind, "w", 24, 64)
    read = (operand("norm_weight", (64,)), operand("statistics", (9, 2)))
    norm = RowNorm(kind="rms", eps=1e-5, has_weight=True, has_bias=False, given=True)
    body = LinearKernel(m=9, n=24, k=64, m_class="9-64", has_bias=False, norm=norm)
    operands = (operand("x", (9, 64)), w, *read, operand("out", (9, 24), "w"))
    return Maker({}, kind).kernel(spec("linear", body, operands), {"w": stored}).image(ARCHS[kind])


def linears(kind: str) -> ProgramImage:
    """Two formats on the same rows: one linear with a norm whose rows it keeps, one with a bias and rows of int8."""
    first, kept = packed(kind, "w_0", 24, 96)
    second, stored = packed(kind, "w_1", 20, 96, "q8_0")
    norm = RowNorm(kind="rms", eps=1e-5, has_weight=True, has_bias=False, keeps=True)
    bodies = (
        LinearKernel(m=3, n=24, k=96, m_class="2-8", has_bias=False, norm=norm),
        LinearKernel(m=3, n=20, k=96, m_class="2-8", has_bias=True, codes=True, rows=RowCodes(kind="token")),
    )
    operands = (
        operand("x_0", (3, 96)), first, operand("norm_weight_0", (96,)), operand("rows_0", (3, 96), "w"),
        operand("out_0", (3, 24), "w"), operand("x_1", (3, 96)), second, operand("bias_1", (20,)),
        operand("out_1", (3, 20), "w"),
    )  # fmt: skip
    made = spec("linears", LinearsKernel(linears=bodies), operands)
    return Maker({}, kind).kernel(made, {"w_0": kept, "w_1": stored}).image(ARCHS[kind])


def linear_plain(kind: str) -> ProgramImage:
    operands = (operand("x", ("b", 20), dtype="bf16"), operand("w", (12, 20), dtype="bf16"),
                operand("out", ("b", 12), "w", "bf16"))  # fmt: skip
    body = LinearKernel(m="b", n=12, k=20, m_class="large", has_bias=False)
    return Maker({"b": B}, kind).kernel(spec("linear", body, operands, "b")).image(ARCHS[kind])


def convolution(kind: str) -> ProgramImage:
    window = Window(image=("b", 6, 7, 4), size=(3, 4), kernel=(3, 3), strides=(2, 2), padding=(1, 1), dilation=(1, 1))
    operands = (operand("x", ("b", 6, 7, 4)), operand("w", (8, 36)), operand("out", ("12*b", 8), "w"))
    body = LinearKernel(m="12*b", n=8, k=36, m_class="large", has_bias=False, window=window)
    return Maker({"b": (1, 3)}, kind).kernel(spec("conv", body, operands, "b")).image(ARCHS[kind])


def linear_codes(kind: str) -> ProgramImage:
    """Rows to int8, and a product of integers."""
    maker = Maker({"b": B}, kind)
    w, stored = packed(kind, "w", 16, 64, "q8_0")
    x, row = operand("x", ("b", 64)), int8_rows.row_bytes(64)
    codes, read = operand("codes", ("b", row), "w", "i8"), operand("x", ("b", row), dtype="i8")
    out = operand("out", ("b", 16), "w")
    maker.input("x", x.shape)
    maker.activation("rows", 5 * row)
    maker.output("out", out.shape)
    maker.store.add(stored)
    rows = spec("rows", QuantizeRowsKernel(rows="b", cols=64, kind="token"), (x, codes), "b")
    maker.launch(rows, (view_of(x, "x"), view_of(codes, "rows")))
    body = LinearKernel(m="b", n=16, k=64, m_class="large", has_bias=False, codes=True)
    maker.launch(
        spec("product", body, (read, w, out), "b"),
        (view_of(read, "rows"), view_of(w, "weight w"), view_of(out, "out")),
    )
    return maker.image(ARCHS[kind])


def convolution_codes(kind: str) -> ProgramImage:
    """The pixels of an image to int8, and a product of integers of its windows."""
    maker, row = Maker({"b": (1, 3)}, kind), int8_rows.row_bytes(32)
    w, stored = packed(kind, "w", 8, 288, "int8")
    window = Window(image=("b", 6, 7, 32), size=(3, 4), kernel=(3, 3), strides=(2, 2), padding=(1, 1), dilation=(1, 1))
    x, largest = operand("x", ("42*b", 32)), operand("largest", ("b",))
    codes, image = operand("codes", ("42*b", row), "w", "i8"), operand("x", ("b", 6, 7, row), dtype="i8")
    out = operand("out", ("12*b", 8), "w")
    for each in (x, largest):
        maker.input(each.name, each.shape)
    maker.activation("pixels", 3 * 42 * row)
    maker.output("out", out.shape)
    maker.store.add(stored)
    rows = QuantizeRowsKernel(rows="42*b", cols=32, kind="image", images="b", each=42)
    maker.launch(
        spec("pixels", rows, (x, largest, codes), "b"),
        (view_of(x, "x"), view_of(largest, "largest"), view_of(codes, "pixels")),
    )
    body = LinearKernel(m="12*b", n=8, k=288, m_class="large", has_bias=False, codes=True, window=window)
    maker.launch(
        spec("product", body, (image, w, out), "b"),
        (view_of(image, "pixels"), view_of(w, "weight w"), view_of(out, "out")),
    )
    return maker.image(ARCHS[kind])


def grouped(kind: str) -> ProgramImage:
    w, stored = packed(kind, "w", 4 * 16, 64, "q8_0")
    operands = (operand("x", ("b", 64)), w, operand("index", ("2*b",), dtype="i64"), operand("out", ("2*b", 16), "w"))
    body = GroupedLinearKernel(rows="b", repeat=2, experts=4, n=16, k=64)
    return Maker({"b": B}, kind).kernel(spec("grouped", body, operands, "b"), {"w": stored}).image(ARCHS[kind])


def grouped_codes(kind: str) -> ProgramImage:
    """Rows to int8, and products of integers with chosen experts."""
    w, stored = packed(kind, "w", 4 * 16, 64, "q8_0")
    operands = (w, operand("index", ("2*b",), dtype="i64"), operand("out", ("2*b", 16), "w"))
    body = GroupedLinearKernel(rows="b", repeat=2, experts=4, n=16, k=64, codes=True)
    return _of_rows(Maker({"b": B}, kind), 5, body, operands, stored, "b")


def _of_rows(
    maker: Maker,
    most: int,
    body: GroupedLinearKernel,
    operands: tuple[Operand, ...],
    stored: StoredTensor,
    *symbols: str,
) -> ProgramImage:
    """A kernel that makes rows of int8, at most so many, and one that multiplies them: its operands without x."""
    width = int8_rows.row_bytes(body.k)
    x, codes = operand("x", (body.rows, body.k)), operand("codes", (body.rows, width), "w", "i8")
    read = operand("x", (body.rows, width), dtype="i8")
    views = [view_of(read, "rows")]
    maker.input("x", x.shape, x.dtype)
    maker.activation("rows", most * width)
    maker.store.add(stored)
    for each in operands:
        if each.name == "w":
            views.append(view_of(each, "weight w"))
            continue
        if each.access == "w":
            maker.output(each.name, each.shape, each.dtype)
        else:
            maker.input(each.name, each.shape, each.dtype)
        views.append(view_of(each, each.name))
    rows = spec("rows", QuantizeRowsKernel(rows=body.rows, cols=body.k, kind="token"), (x, codes), *symbols)
    maker.launch(rows, (view_of(x, "x"), view_of(codes, "rows")))
    maker.launch(spec("product", body, (read, *operands), *symbols), tuple(views))
    return maker.image(ARCHS[maker.kind])


def grouped_pairs(kind: str) -> ProgramImage:
    """The halves of experts, combined."""
    w, stored = packed(kind, "w", 4 * 64, 64, "q8_0")
    operands = (operand("x", (2, 64)), w, operand("index", (4,), dtype="i64"), operand("out", (4, 32), "w"))
    product = ScalarProgram(inputs=(("g", "f32"), ("u", "f32")), ops=(op("y", "arith.mulf", "g", "u"),), yields=("y",))
    body = GroupedLinearKernel(rows=2, repeat=2, experts=4, n=64, k=64, pairs=True, epilogue=product)
    return Maker({}, kind).kernel(spec("glu", body, operands), {"w": stored}).image(ARCHS[kind])


WEIGHED = ScalarProgram(
    inputs=(("s", "f32"), ("w", "f32"), ("t", "f32")),
    ops=(op("p", "arith.mulf", "s", "w"), op("n", "arith.addf", "t", "p")), yields=("n",),
)  # fmt: skip
"""The next total of a row's experts: what a pair's sum, times its weight, is added to."""


def grouped_mixed(kind: str) -> ProgramImage:
    """The experts of a row, weighed and summed, and a residual."""
    w, stored = packed(kind, "w", 4 * 48, 64, "q8_0")
    operands = (operand("x", (4, 64)), w, operand("index", (4,), dtype="i64"), operand("weights", (2, 2)),
                operand("extra0", (2, 48), dtype="bf16"), operand("out", (2, 48), "w"))  # fmt: skip
    body = GroupedLinearKernel(rows=4, repeat=1, experts=4, n=48, k=64, top=2, mix=WEIGHED, epilogue=epilogue("bf16"))
    return Maker({}, kind).kernel(spec("mixed", body, operands), {"w": stored}).image(ARCHS[kind])


def grouped_codes_pairs(kind: str) -> ProgramImage:
    """The halves of experts, combined from sums of integers."""
    w, stored = packed(kind, "w", 4 * 64, 64, "int8")
    operands = (w, operand("index", (4,), dtype="i64"), operand("out", (4, 32), "w"))
    product = ScalarProgram(inputs=(("g", "f32"), ("u", "f32")), ops=(op("y", "arith.mulf", "g", "u"),), yields=("y",))
    body = GroupedLinearKernel(rows=2, repeat=2, experts=4, n=64, k=64, pairs=True, epilogue=product, codes=True)
    return _of_rows(Maker({}, kind), 2, body, operands, stored)


def grouped_codes_mixed(kind: str) -> ProgramImage:
    """The experts of a row, weighed and summed from sums of integers; on a GPU in turns."""
    top = 6
    w, stored = packed(kind, "w", 8 * 48, 96, "q4_0")
    operands = (w, operand("index", (2 * top,), dtype="i32"), operand("weights", (2, top)),
                operand("out", (2, 48), "w", "bf16"))  # fmt: skip
    last = ScalarProgram(
        inputs=(("t", "f32"),), ops=(op("r", "arith.truncf", "t", dtype="bf16"),), yields=("r",)
    )  # fmt: skip
    body = GroupedLinearKernel(
        rows=2 * top, repeat=1, experts=8, n=48, k=96, top=top, mix=WEIGHED, epilogue=last, codes=True
    )
    return _of_rows(Maker({}, kind), 2 * top, body, operands, stored)


def recurrent(kind: str) -> ProgramImage:
    """An LSTM with a projection: all operands that the template knows."""
    (w, stored), (p, projection) = packed(kind, "w", 4 * 20, 64, "q8_0"), packed(kind, "projection", 64, 20, "int8")
    operands = (
        operand("x", ("s", "b", 80)), w, p, operand("bias", (80,)), operand("start", ("b", 64)),
        operand("cell_start", ("b", 20)), operand("out", ("s", "b", 64), "w"), operand("cell", ("b", 20), "w"),
        operand("room", ("b", 20), "w"),
    )  # fmt: skip
    body = RecurrentKernel(kind="lstm", steps="s", batch="b", hidden=20, width=64, projects=True, has_bias=True)
    made = spec("recurrent", body, operands, "b", "s")
    return Maker({"b": B, "s": S}, kind).kernel(made, {"w": stored, "projection": projection}).image(ARCHS[kind])


def batch_matmul(kind: str) -> ProgramImage:
    operands = (operand("a", ("b", "s", 12)), operand("b", ("b", 12, 10)), operand("out", ("b", "s", 10), "w"))
    body = BatchMatmulKernel(batch=("b",), m="s", n=10, k=12)
    return Maker({"b": (1, 3), "s": S}, kind).kernel(spec("bmm", body, operands, "b", "s")).image(ARCHS[kind])


def attention(kind: str) -> ProgramImage:
    shape = ("b", 4, "s", 8)
    few = ("b", 2, "s", 8)
    operands = (operand("q", shape), operand("k", few), operand("v", few), operand("out", shape, "w"))
    body = AttentionKernel(batch="b", heads=4, kv_heads=2, q_len="s", kv_len="s", head_dim=8, value_dim=8, scale=0.5,
                           causal=True, mask="none", window=4)  # fmt: skip
    return Maker({"b": (1, 2), "s": S}, kind).kernel(spec("attend", body, operands, "b", "s")).image(ARCHS[kind])


def attention_decode(kind: str) -> ProgramImage:
    q, kv = ("b", 2, 1, 8), ("b", 1, 12, 8)
    operands = (operand("q", q), operand("k", kv), operand("v", kv), operand("mask", ("b", 2, 1, 12), dtype="i1"),
                operand("last", ("b", 1), dtype="i64"), operand("out", q, "w"))  # fmt: skip
    body = AttentionKernel(batch="b", heads=2, kv_heads=1, q_len=1, kv_len=12, head_dim=8, value_dim=8, scale=0.5,
                           causal=False, mask="bool", last=True)  # fmt: skip
    return Maker({"b": (1, 3)}, kind).kernel(spec("decode", body, operands, "b")).image(ARCHS[kind])


def attention_parts(kind: str) -> ProgramImage:
    """Keys in parts, and what joins them: of a CPU, whose kernels divide no keys, the joining alone."""
    q, kv = ("b", 2, 1, 8), ("b", 1, 12, 8)
    reads = [operand("q", q), operand("k", kv), operand("v", kv), operand("last", ("b", 1), dtype="i64")]
    joins = JoinAttentionKernel(batch="b", heads=2, q_len=1, parts=3, value_dim=8)
    if kind == "cpu":
        ends = (operand("x", ("b", 2, 1, 3, 10)), operand("out", q, "w"))
        return Maker({"b": (1, 3)}, kind).kernel(spec("join", joins, ends, "b")).image(ARCHS[kind])
    maker = Maker({"b": (1, 3)}, kind)
    for each in reads:
        maker.input(each.name, each.shape, each.dtype)
    maker.activation("parts", 3 * 2 * 3 * 10 * 4)
    maker.output("out", q)
    made = operand("out", ("b", 2, 1, 3, 10), "w")
    body = AttentionKernel(batch="b", heads=2, kv_heads=1, q_len=1, kv_len=12, head_dim=8, value_dim=8, scale=0.5,
                           causal=False, mask="none", last=True, parts=3)  # fmt: skip
    places = [view_of(each, each.name) for each in reads]
    maker.launch(spec("parts", body, (*reads, made), "b"), [*places, view_of(made, "parts")])
    x, out = replace(made, name="x", access="r"), operand("out", q, "w")
    maker.launch(spec("join", joins, (x, out), "b"), [view_of(x, "parts"), view_of(out, "out")])
    return maker.image(ARCHS[kind])


def attention_ring(kind: str) -> ProgramImage:
    """A ring of as few rows as the window and the queries of one launch allow."""
    q, kv = ("b", 4, "s", 8), ("b", 2, 12, 8)
    operands = (operand("q", q), operand("k", kv), operand("v", kv), operand("last", ("b", "s"), dtype="i64"),
                operand("out", q, "w"))  # fmt: skip
    body = AttentionKernel(batch="b", heads=4, kv_heads=2, q_len="s", kv_len=12, head_dim=8, value_dim=8, scale=0.5,
                           causal=False, mask="none", last=True, ring=True, window=13 - S[1])  # fmt: skip
    return Maker({"b": (1, 2), "s": S}, kind).kernel(spec("ring", body, operands, "b", "s")).image(ARCHS[kind])


def attention_sinks(kind: str) -> ProgramImage:
    """One number for each head beside the scores."""
    q, kv = ("b", 4, "s", 8), ("b", 2, 12, 8)
    operands = (operand("q", q), operand("k", kv), operand("v", kv), operand("last", ("b", "s"), dtype="i64"),
                operand("sinks", ("b", 4, "s", 1)), operand("out", q, "w"))  # fmt: skip
    body = AttentionKernel(batch="b", heads=4, kv_heads=2, q_len="s", kv_len=12, head_dim=8, value_dim=8, scale=0.5,
                           causal=False, mask="none", last=True, sinks=True)  # fmt: skip
    return Maker({"b": (1, 2), "s": S}, kind).kernel(spec("sinks", body, operands, "b", "s")).image(ARCHS[kind])


def attention_cache(kind: str) -> ProgramImage:
    """Keys become the rows of a cache, which attention reads as keys and as values."""
    maker, rows = Maker({"b": (1, 3)}, kind), ("b", 2, 12)
    width = cache_rows.row_bytes(20, "int8")
    x, made = operand("x", (*rows, 20)), operand("made", (*rows, width), "w", "i8")
    keys, values = (operand(name, (*rows, width), dtype="i8") for name in "kv")
    q, out = operand("q", ("b", 4, 3, 20)), operand("out", ("b", 4, 3, 20), "w")
    last = operand("last", ("b", 3), dtype="i64")
    for each in (x, q, last):
        maker.input(each.name, each.shape, each.dtype)
    maker.activation("rows", 3 * 2 * 12 * width)
    maker.output("out", out.shape)
    body = QuantizeCacheKernel(outer="b", middle=2, inner=12, cols=20)
    maker.launch(spec("make", body, (x, made), "b"), (view_of(x, "x"), view_of(made, "rows")))
    attends = AttentionKernel(batch="b", heads=4, kv_heads=2, q_len=3, kv_len=12, head_dim=20, value_dim=20, scale=0.5,
                              causal=False, mask="none", last=True, cache="int8")  # fmt: skip
    places = [
        view_of(each, at) for each, at in ((q, "q"), (keys, "rows"), (values, "rows"), (last, "last"), (out, "out"))
    ]
    maker.launch(spec("attend", attends, (q, keys, values, last, out), "b"), places)
    return maker.image(ARCHS[kind])


def cache_values(kind: str) -> ProgramImage:
    """Rows of a cache of 4 bits, and what they mean."""
    maker, rows, width = Maker({"s": S}, kind), (1, 3, "s"), cache_rows.row_bytes(20, "int4")
    x, made = operand("x", (*rows, 20)), operand("made", (*rows, width), "w", "i8")
    read, out = replace(made, name="rows", access="r"), operand("out", (*rows, 20), "w")
    maker.input("x", x.shape)
    maker.activation("rows", 3 * S[1] * width)
    maker.output("out", out.shape)
    sizes = {"outer": 1, "middle": 3, "inner": "s", "cols": 20, "kind": "int4"}
    maker.launch(spec("make", QuantizeCacheKernel(**sizes), (x, made), "s"), (view_of(x, "x"), view_of(made, "rows")))
    maker.launch(
        spec("read", DequantizeCacheKernel(**sizes), (read, out), "s"), (view_of(read, "rows"), view_of(out, "out"))
    )
    return maker.image(ARCHS[kind])


# --- rows and places -------------------------------------------------------------------------------------------------


def norm(kind: str) -> ProgramImage:
    vectors = (operand("weight", (20,)), operand("bias", (20,)))
    operands = (operand("x", ("b", 20)), *vectors, operand("out", ("b", 20), "w"))
    body = NormKernel(kind="layer", rows="b", cols=20, eps=1e-5, has_weight=True, has_bias=True)
    return Maker({"b": B}, kind).kernel(spec("norm", body, operands, "b")).image(ARCHS[kind])


def norm_added(kind: str) -> ProgramImage:
    """A norm that is added to a residual."""
    operands = (operand("x", ("b", 20)), operand("weight", (20,)), operand("residual", ("b", 20)),
                operand("out", ("b", 20), "w"))  # fmt: skip
    body = NormKernel(kind="rms", rows="b", cols=20, eps=1e-5, has_weight=True, has_bias=False, has_residual=True)
    return Maker({"b": B}, kind).kernel(spec("norm", body, operands, "b")).image(ARCHS[kind])


def norm_heads(kind: str) -> ProgramImage:
    """Rows with two strides: three heads in each row of a wider matrix, and their results head by head."""
    shape = ("b", 3, 20)
    x = operand("x", shape, strides=(100, 20, 1))
    operands = (x, operand("weight", (20,)), operand("out", shape, "w", strides=(20, "20*b", 1)))
    body = NormKernel(kind="rms", rows="b", inner=3, cols=20, eps=1e-5, has_weight=True, has_bias=False)
    return Maker({"b": B}, kind).kernel(spec("norm", body, operands, "b")).image(ARCHS[kind])


def softmax(kind: str) -> ProgramImage:
    operands = (operand("x", ("b", "s")), operand("out", ("b", "s"), "w"))
    body = SoftmaxKernel(rows="b", cols="s")
    return Maker({"b": B, "s": S}, kind).kernel(spec("softmax", body, operands, "b", "s")).image(ARCHS[kind])


def embedding(kind: str) -> ProgramImage:
    table, stored = packed(kind, "table", 10, 64, "q4_0")
    operands = (operand("ids", ("s",), dtype="i64"), table, operand("out", ("s", 64), "w"))
    body = EmbeddingKernel(count="s", rows=10, cols=64)
    return Maker({"s": S}, kind).kernel(spec("embed", body, operands, "s"), {"table": stored}).image(ARCHS[kind])


def embedding_plain(kind: str) -> ProgramImage:
    operands = (operand("ids", ("s",), dtype="i32"), operand("table", (6, 18)), operand("out", ("s", 18), "w", "bf16"))
    body = EmbeddingKernel(count="s", rows=6, cols=18)
    return Maker({"s": S}, kind).kernel(spec("embed", body, operands, "s")).image(ARCHS[kind])


def gather(kind: str, mode: str = "take") -> ProgramImage:
    index = ("s",) if mode == "take" else (3, "s", 5)
    operands = (operand("x", (3, 4, 5)), operand("index", index, dtype="i64"), operand("out", (3, "s", 5), "w"))
    body = GatherKernel(mode=mode, outer=3, length=4, count="s", inner=5)  # type: ignore[arg-type]
    return Maker({"s": S}, kind).kernel(spec("gather", body, operands, "s")).image(ARCHS[kind])


def gather_along(kind: str) -> ProgramImage:
    return gather(kind, "along")


def with_state(maker: Maker, name: str, shape: tuple[int, ...]) -> ProgramImage:
    """The state is a result, too."""
    state = View(buffer=name, dtype="f32", shape=shape, strides=(shape[1] * shape[2], shape[2], 1))
    maker.output("copied", shape)
    maker.steps.append(Copy(stream="q", source=state, target=replace(state, buffer="copied")))
    return maker.image(ARCHS[maker.kind])


def index_update(kind: str) -> ProgramImage:
    operands = (operand("x", (2, 8, 6), "rw"), operand("index", ("s",), dtype="i64"), operand("src", (2, "s", 6)))
    body = IndexUpdateKernel(outer=2, length=8, count="s", inner=6)
    maker = Maker({"s": (1, 4)}, kind).kernel(spec("update", body, operands, "s"))
    return with_state(maker, "x", (2, 8, 6))


def parts(kind: str) -> ProgramImage:
    """A loop over a symbol's rows, a row of the state that is computed, and one of another state that is copied."""
    doubled = loop("loop", ("s", 6), (operand("a", ("s", 6)), operand("b", ("s", 6), "w")), ((6, 1), (6, 1)),
                   (op("t", "arith.addf", "in0", "in0"),))  # fmt: skip
    row, kept = operand("src", (2, 6)), operand("x", (2, 8, 6), "rw")
    negated = loop("loop", (2, 6), (row, kept), ((6, 1), (48, 1)), (op("n", "arith.negf", "in0"),))
    copied = loop("loop", (2, 6), (row, kept), ((6, 1), (48, 1)), (), yields=("in0",))
    operands = (
        operand("a", ("s", 6)), row, operand("index", (1,), dtype="i64"), operand("out", ("s", 6), "w"),
        kept, replace(kept, name="z"),
    )  # fmt: skip
    body = PartsKernel(parts=(
        Part(operands=(0, 3), loop=doubled.body), Part(operands=(1, 4), loop=negated.body, index=2),
        Part(operands=(1, 5), loop=copied.body, index=2),
    ))  # type: ignore[arg-type]  # fmt: skip
    maker = Maker({"s": (1, 4)}, kind).kernel(spec("parts", body, operands, "s"))
    return with_state(maker, "x", (2, 8, 6))


def parts_norm(kind: str) -> ProgramImage:
    """Two heads of a row are normalised, and their halves change places, in the row of a state."""
    x, weight, kept = operand("src", (2, 6)), operand("w", (6,)), operand("x", (2, 8, 6), "rw")
    swapped = loop("loop", (2, 2, 3), (x, kept), ((6, -3, 1), (48, 3, 1)), (op("n", "arith.negf", "in0"),))
    accesses = (replace(swapped.body.accesses[0], offset=3), swapped.body.accesses[1])  # type: ignore[union-attr]
    norm = NormKernel(kind="rms", rows=2, cols=6, eps=1e-5, has_weight=True, has_bias=False)
    body = PartsKernel(parts=(
        Part(operands=(0, 3), loop=replace(swapped.body, accesses=accesses), index=2,
             norm=PartNorm(body=norm, inputs=(0,), affine=(1,))),
    ))  # type: ignore[arg-type]  # fmt: skip
    operands = (x, weight, operand("index", (1,), dtype="i64"), kept)
    return with_state(Maker({}, kind).kernel(spec("parts_norm", body, operands)), "x", (2, 8, 6))


def parts_norm_wide(kind: str) -> ProgramImage:
    """Rows of more columns than a warp keeps are normalised and read column by column, in a launch of their own."""
    cols = 513
    x, weight, out = operand("x", ("b", cols)), operand("w", (cols,)), operand("out", ("b", cols), "w")
    scaled = loop("loop", ("b", cols), (x, out), ((cols, 1), (cols, 1)), (op("t", "arith.addf", "in0", "in0"),))
    norm = NormKernel(kind="rms", rows="b", cols=cols, eps=1e-5, has_weight=True, has_bias=False)
    read = PartNorm(body=norm, inputs=(0,), affine=(1,))
    body = PartsKernel(parts=(Part(operands=(0, 2), loop=scaled.body, norm=read),))  # type: ignore[arg-type]
    made = spec("parts_norm_wide", body, (x, weight, out), "b")
    return Maker({"b": (1, 4)}, kind).kernel(made).image(ARCHS[kind])


def scatter(kind: str) -> ProgramImage:
    operands = (
        operand("index", (2, "s", 6), dtype="i64"),
        operand("src", (2, "s", 6)),
        operand("out", (2, 8, 6), "rw"),
    )
    body = ScatterKernel(outer=2, length=8, count="s", inner=6, fold="add")
    maker = Maker({"s": (1, 4)}, kind).kernel(spec("scatter", body, operands, "s"))
    return with_state(maker, "out", (2, 8, 6))


def scan(kind: str) -> ProgramImage:
    operands = (operand("x", (2, "s", 3)), operand("out", (2, "s", 3), "w"))
    body = ScanKernel(outer=2, length="s", inner=3, fold="add")
    return Maker({"s": S}, kind).kernel(spec("scan", body, operands, "s")).image(ARCHS[kind])


def top_k(kind: str) -> ProgramImage:
    picked = (2, 4, 3)
    operands = (operand("x", (2, "s", 3)), operand("values", picked, "w"), operand("indices", picked, "w", "i64"))
    body = OrderKernel(outer=2, length="s", count=4, inner=3, descending=True)
    return Maker({"s": (4, 9)}, kind).kernel(spec("order", body, operands, "s")).image(ARCHS[kind])


def argmax(kind: str) -> ProgramImage:
    operands = (operand("x", (2, "s", 3)), operand("out", (2, 3), "w", "i64"))
    body = ArgmaxKernel(outer=2, length="s", inner=3)
    return Maker({"s": S}, kind).kernel(spec("argmax", body, operands, "s")).image(ARCHS[kind])


def hadamard(kind: str) -> ProgramImage:
    operands = (operand("x", ("b", 96)), operand("out", ("b", 96), "w"))
    body = HadamardKernel(rows="b", cols=96, block=32)
    return Maker({"b": B}, kind).kernel(spec("hadamard", body, operands, "b")).image(ARCHS[kind])


def top_p(kind: str) -> ProgramImage:
    shares = [operand(name, ("b",), dtype="f32") for name in ("top", "draw")]
    operands = (operand("x", ("b", 24)), *shares, operand("out", ("b",), "w", "i64"))
    return Maker({"b": B}, kind).kernel(spec("top_p", TopPKernel(rows="b", cols=24), operands, "b")).image(ARCHS[kind])


def route(kind: str) -> ProgramImage:
    picked = (operand("weights", ("b", 2), "w"), operand("indices", ("b", 2), "w", "i64"))
    body = RouteKernel(rows="b", cols=24, count=2, scores="all", normalise=True)
    return Maker({"b": B}, kind).kernel(spec("route", body, (operand("x", ("b", 24)), *picked), "b")).image(ARCHS[kind])


def sample(kind: str) -> ProgramImage:
    marks = [operand(name, ("b", 24)) for name in ("tallies", "bias")]
    how = operand("how", ("b", WORDS), dtype="i64")
    operands = (operand("x", (7, 24)), how, *marks, operand("out", ("b",), "w", "i64"))
    body = SampleKernel(batch="b", rows=7, cols=24)
    return Maker({"b": B}, kind).kernel(spec("sample", body, operands, "b")).image(ARCHS[kind])


def linear_attention(kind: str) -> ProgramImage:
    keys = [operand(name, ("b", 6, 2, 24)) for name in ("query", "key")]
    values = [operand("value", ("b", 6, 4, 3)), operand("decay", ("b", 6, 4, 1))]
    numbers = [operand(name, ("b",), dtype="i64") for name in ("first", "counts")]
    more = [operand("rate", (4, 24)), operand("beta", ("b", 6, 4)), operand("out", ("b", 6, 4, 3), "w")]
    operands = (operand("state", (12, 4, 3, 24), "rw"), *keys, *values, *numbers, *more)
    body = LinearAttentionKernel(
        slots=12, batch="b", steps=6, heads=4, groups=2, width=3, depth=24, has_rate=True, has_beta=True
    )
    made = spec("linear_attention", body, operands, "b")
    return Maker({"b": (1, 12)}, kind).kernel(made).image(ARCHS[kind])


def whole(kind: str) -> ProgramImage:
    """A select of two linears, a table made by init, a state that counts, a copy, and activations that share bytes."""
    maker = Maker({"b": (1, 12)}, kind)
    w, stored = packed(kind, "w", 16, 64)
    x, h, y = operand("x", ("b", 64)), operand("out", ("b", 16), "w"), operand("y", ("b", 16), "w")
    maker.input("x", x.shape)
    maker.output("y", y.shape)
    maker.output("calls", (4,))
    maker.activation("h", 12 * 64)
    maker.state("count", 16)
    maker.store.add(stored)
    maker._arena("table", "init", 64)
    for m_class in ("2-8", "large"):
        body = LinearKernel(m="b", n=16, k=64, m_class=m_class, has_bias=False)  # type: ignore[arg-type]
        maker.kernels.append(spec(f"linear {m_class}".replace("-", "_").replace(" ", "_"), body, (x, w, h), "b"))
    few, many = maker.kernels
    cases = (SelectCase(max=4, kernel=few.name), SelectCase(max=None, kernel=many.name))
    maker.steps.append(
        Select(on="b", cases=cases, stream="q", operands=(view_of(x, "x"), view_of(w, "weight w"), view_of(h, "h")))
    )
    row, read = operand("t", (16,)), operand("h", ("b", 16))
    add = loop("add", ("b", 16), (read, row, y), ((16, 1), (0, 1), (16, 1)), (op("a", "arith.addf", "in0", "in1"),),
               symbols=("b",))  # fmt: skip
    maker.launch(add, (view_of(read, "h"), view_of(row, "table"), view_of(y, "y")))
    n = operand("n", (4,))
    count = loop("count", (4,), (n, replace(n, name="m", access="w")), ((1,), (1,)),
                 (ONE, op("a", "arith.addf", "in0", "one")))  # fmt: skip
    maker.launch(count, (view_of(n, "count"), view_of(n, "count")))
    maker.steps.append(Copy(stream="q", source=view_of(n, "count"), target=view_of(n, "calls")))
    fill = loop("fill", (16,), (operand("y", (16,), "w"),), ((1,),), (ONE,))
    maker.kernels.append(fill)
    maker.init.append(Launch(kernel="fill", stream="q", operands=(view_of(fill.operands[0], "table"),)))
    return maker.image(ARCHS[kind])


SEEDS: Mapping[str, Callable[[str], ProgramImage]] = {
    make.__name__: make
    for make in (
        add_row, transposed, reduced, reduced_beside, integers, sliced, linear, linear_bf16, linear_bf16_few,
        linear_few, linear_trellis, linear_pairs, linear_norm, linear_added, linear_made, linear_kept_codes,
        linear_writes, linear_given, linears, norm_added, linear_plain, convolution, linear_codes, convolution_codes,
        grouped, grouped_codes, grouped_pairs, grouped_mixed, grouped_codes_pairs, grouped_codes_mixed, recurrent,
        batch_matmul, attention, attention_decode,
        attention_parts, attention_ring, attention_sinks, attention_cache, cache_values, norm, norm_heads, softmax,
        embedding, embedding_plain, gather, gather_along, index_update, parts, parts_norm, parts_norm_wide, scatter,
        scan, top_k, argmax, top_p, route, sample, linear_attention, hadamard, whole,
    )
}  # fmt: skip


@cache
def seed(name: str, kind: str = "cpu") -> ProgramImage:
    return SEEDS[name](kind)
