"""What is printed parses back, in the readable, the generic and the MLIR form."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable
from typing import Any

import pytest
from xdsl.builder import Builder
from xdsl.dialects import arith, math
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Block, Region
from xdsl.rewriter import InsertPoint

from qcompiler.errors import QCompilerError
from qcompiler.ir import build, qc, types
from qcompiler.ir.context import QCContext
from qcompiler.ir.module import path_of, set_arg_names, set_path, set_ranges
from qcompiler.ir.qc_index import RouteOp, SampleOp, TopPOp
from qcompiler.ir.scalar_ops import ErfcOp, RemFOp
from qcompiler.ir.text import parse_module, print_for_mlir, print_module
from qcompiler.plan.kernel import FormatRef
from qcompiler.plan.torch_regions import TorchOp, TorchRegion

ModuleOf = Callable[..., ModuleOp]
T = types.tensor

REGION = TorchRegion(
    inputs=2,
    ops=(
        TorchOp(target="aten.foo.default", args=({"v": 0}, [1, {"size": 0}], 0.1, True, None, "word"), results=2),
        TorchOp(target="aten.bar.Tensor", args=({"v": 2}, {"float": "-inf"}), kwargs={"dtype": {"dtype": "complex64"}}),
    ),
    outputs=(3, 4),
)
NF4 = FormatRef(name="nf4", params={"block": 64})


def gelu() -> Region:
    block = Block(arg_types=[types.ELEMENT_TYPES["f32"], types.ELEMENT_TYPES["f32"]])
    inner = Builder(InsertPoint.at_end(block))
    inner.insert(qc.YieldOp(inner.insert(arith.AddfOp(inner.insert(math.ErfOp(block.args[0])), block.args[1]))))
    return Region(block)


@pytest.fixture
def every_op(module_of: ModuleOf) -> ModuleOp:
    """A module with every qc op and every view."""

    def body(b: Builder, a: Any) -> Any:
        x, ids, image = a
        b = build.with_path(b.insertion_point, 'encoder.layer."0"')
        w = b.insert(qc.ConstOp("encoder.w", types.QTensorType.of((8, 8), "f32", NF4))).result
        conv_w = b.insert(qc.ConstOp("conv.w", T((4, 2, 3, 3), "f32"))).result
        bias = b.insert(qc.ConstOp("b", T((8,), "f32"))).result
        dense = b.insert(qc.DequantizeOp(w, T((8, 8), "f32"))).result
        packed = b.insert(qc.QuantizeOp(dense, types.QTensorType.of((8, 8), "f32", NF4))).result
        state = b.insert(qc.StateOp("kv", T((4, 8), "f32"))).result
        y = b.insert(qc.LinearOp(x, packed, bias, T(("b", "s", 8), "f32"), [x], gelu())).result
        y = b.insert(qc.LinearOp(y, dense, None, T(("b", "s", 8), "f32"))).result
        codes = b.insert(qc.QuantizeRowsOp(y, None, T(("b", "s", 96), "i8"), kind="token")).result
        y = b.insert(qc.DequantizeRowsOp(codes, T(("b", "s", 8), "f32"))).result
        y = b.insert(qc.HadamardOp(y, block=8)).result
        y = b.insert(qc.LayerNormOp(y, bias, bias, T(("b", "s", 8), "f32"), eps=1e-12)).result
        y = b.insert(qc.RmsNormOp(y, None, T(("b", "s", 8), "f32"), eps=1e-5)).result
        y = b.insert(qc.SoftmaxOp(y, T(("b", "s", 8), "f32"), axis=1)).result
        y = b.insert(qc.CumsumOp(y, T(("b", "s", 8), "f32"), axis=1)).result
        e = b.insert(qc.EmbeddingOp(ids, w, T(("b", "s", 8), "f32"))).result
        t = build.transpose(b, e, [0, 2, 1])
        y = b.insert(qc.BatchMatmulOp(y, t, T(("b", "s", "s"), "f32"))).result
        heads = build.transpose(b, build.reshape(b, e, ("b", "s", 2, 4)), [0, 2, 1, 3])
        cos = build.fill(b, 0.1, (1, 1, "s", 4), "f32")
        heads = b.insert(qc.RopeOp(heads, cos, cos, T(("b", 2, "s", 4), "f32"), interleaved=True)).result
        mask = build.fill(b, True, (1, 1, "s", "s"), "i1")
        kind = T(("b", 2, "s", 4), "f32")
        heads = b.insert(qc.AttentionOp(heads, heads, heads, mask, kind, scale=0.1)).result
        lone = build.fill(b, 0.1, (1, 2, 1, 1), "f32")
        heads = b.insert(qc.AttentionOp(heads, heads, heads, mask, kind, scale=0.1, sinks=lone)).result
        heads = b.insert(qc.AttentionOp(heads, heads, heads, None, kind, scale=0.5, causal=True)).result
        at, ring = build.fill(b, 1, ("b", "s"), "i64"), build.fill(b, 0.1, ("b", 2, 512, 4), "f32")
        heads = b.insert(qc.AttentionOp(heads, ring, ring, None, kind, scale=0.5, window=9, last=at, ring=True)).result
        stored = b.insert(qc.QuantizeCacheOp(heads, T(("b", 2, "s", 16), "i8"), kind="int8")).result
        heads = b.insert(qc.AttentionOp(heads, stored, stored, None, kind, scale=0.5, cache="int8")).result
        divided = T(("b", 2, "s", 3, 6), "f32")
        divided = b.insert(
            qc.AttentionOp(heads, stored, stored, None, divided, scale=0.5, cache="int8", parts=3)
        ).result
        heads = b.insert(qc.JoinAttentionOp(divided, kind)).result
        heads = b.insert(qc.DequantizeCacheOp(stored, kind, kind="int8")).result
        index = build.fill(b, 1, (2,), "i64")
        rows = b.insert(qc.GatherOp(state, index, T((2, 8), "f32"), axis=0)).result
        state = b.insert(qc.IndexUpdateOp(state, index, rows, T((4, 8), "f32"), axis=0)).result
        where = build.fill(b, 0, (2, 8), "i64")
        state = b.insert(qc.ScatterOp(state, where, rows, T((4, 8), "f32"), axis=0, reduce="add")).result
        expert = build.fill(b, 0, ("2*s",), "i32")
        experts = build.fill(b, 0.5, (9, 8), "bf16")
        rows = build.fill(b, 0.5, ("s", 8), "bf16")
        kind = T(("2*s", 3), "bf16")
        grouped = b.insert(qc.GroupedLinearOp(rows, experts, expert, kind, experts=3, repeat=2)).result
        given = build.fill(b, 0.5, ("s", "b", 20), "f32")
        matrices = [build.fill(b, 0.5, shape, "f32") for shape in ((20, 3), (3, 5), ("b", 3), ("b", 5))]
        begin = {"projection": matrices[1], "bias": build.fill(b, 0.5, (20,), "f32"), "cell_start": matrices[3]}
        kinds = [T(("s", "b", 3), "f32"), T(("b", 5), "f32"), T(("b", 5), "f32")]
        layer = qc.RecurrentOp(given, matrices[0], matrices[2], kinds, kind="lstm", reverse=True, **begin)
        b.insert(layer)
        rows4, ids = build.fill(b, 0.5, ("b", "s", 2, 8), "f32"), build.fill(b, 0, ("b",), "i64")
        memory = build.fill(b, 0.5, (7, 4, 3, 8), "f32")
        read = [build.fill(b, 0.5, ("b", "s", 4, size), "f32") for size in (3, 8)]
        share = build.fill(b, 0.5, ("b", "s", 4), "f32")
        b.insert(qc.LinearAttentionOp(memory, rows4, rows4, *read, ids, ids, beta=share))
        image = b.insert(
            qc.Conv2dOp(
                image, conv_w, None, T(("b", 4, "(s + 1) // 2", 5), "f32"), strides=[2, 1], padding=[1, 1, 1, 1],
                dilation=[1, 1], groups=1,
            )
        ).result  # fmt: skip
        seen = b.insert(
            qc.WindowsOp(
                image, T(("b", 4, "(s + 1) // 2", 5), "f32"), kernel=[1, 1], strides=[1, 1],
                padding=[0, 0, 0, 0], dilation=[1, 1],
            )
        ).result  # fmt: skip
        order = b.insert(qc.SortOp(y, [T(("b", "s", "s"), d) for d in ("f32", "i64")], axis=2, descending=True))
        top = b.insert(qc.TopkOp(e, [T(("b", "s", 3), d) for d in ("f32", "i64")], k=3, axis=2))
        routed = b.insert(RouteOp(x, [T(("b", "s", 3), d) for d in ("f32", "i64")], k=3, scores="all", normalise=True))
        best = b.insert(qc.ArgmaxOp(e, T(("b", "s"), "i64"), axis=2)).result
        shares = build.fill(b, 0.5, ("b", "s"), "f32")
        best = b.insert(TopPOp(e, shares, shares, T(("b", "s"), "i64"))).result
        rows, words = build.fill(b, 0.5, (2, 8), "f32"), build.fill(b, 0, (2, 10), "i64")
        token = b.insert(SampleOp(rows, words, rows, rows, T((2,), "i64"))).result
        call = b.insert(qc.TorchCallOp(REGION, [best, grouped], [T((1,), "f32"), T((2,), "f32")], ["b*s", 4]))
        moved = b.insert(qc.CopyOp(image, source="cpu", target="sim:0")).result
        b.insert(qc.StateUpdateOp("kv", state))
        wide = build.broadcast_in(b, best, ("b", 7, "s"), [0, 2])
        part = build.extract_slice(b, wide, [0, 1, 0], ["b", 2, "s"], [1, 3, 1])
        return [
            heads,
            moved,
            seen,
            token,
            *order.results,
            *top.results,
            *routed.results,
            *call.results,
            build.concat(b, [part, part], 1),
        ]

    module = module_of([(("b", "s", 8), "f32"), (("b", "s"), "i64"), (("b", 2, "s", 5), "f32")], body)
    function = module.body.block.first_op
    set_ranges(function, {"b": (1, 4), "s": (1, 128)})
    set_arg_names(function, ["x", "ids", "image"])
    module.verify()
    return module


def test_every_op_is_in_the_module(every_op: ModuleOp) -> None:
    """So that an op added to the dialect is added to the round trips."""
    assert {op.name for op in qc.QC.operations} <= {op.name for op in every_op.walk()}


def test_readable_text_round_trips(every_op: ModuleOp) -> None:
    text = print_module(every_op)
    assert '"qc.' not in text  # no op falls back to the generic form
    assert parse_module(text).is_structurally_equivalent(every_op)


def test_generic_text_round_trips(every_op: ModuleOp) -> None:
    assert parse_module(print_module(every_op, generic=True)).is_structurally_equivalent(every_op)


def test_text_for_mlir_round_trips_and_has_no_custom_qc_syntax(every_op: ModuleOp) -> None:
    text = print_for_mlir(every_op)
    assert " qc." not in text.replace("{qc.", "").replace(", qc.", "")
    assert parse_module(text).is_structurally_equivalent(every_op)


def test_syntax_is_readable(every_op: ModuleOp) -> None:
    text = print_module(every_op)
    path = 'qc.path = "encoder.layer.\\220\\22"'
    for line in (
        f"qc.const @encoder.w {{{path}}} : !qc.qtensor<8x8xf32,",
        "qc.dim \"b\"",
        "eps = 1.000000e-12, " + path,
        "qc.softmax %",
        "axis = 1, ",
        "interleaved, " + path,
    ):  # fmt: skip
        assert line in text


def test_attributes_of_views_survive_printing(module_of: ModuleOf) -> None:
    module = module_of([(("a", "b"), "f32")], lambda b, a: [build.transpose(b, a[0], [1, 0])])
    for op in module.walk():
        if op.name in ("linalg.transpose", "tensor.empty"):
            op.attributes["note"] = types.StringAttr("kept")
    for text in (print_module(module), print_for_mlir(module)):
        assert text.count("kept") == 2
        assert parse_module(text).is_structurally_equivalent(module)


def test_a_views_path_is_that_of_what_it_reads(module_of: ModuleOf) -> None:
    def body(b: Builder, a: Any) -> Any:
        y = b.insert(qc.SoftmaxOp(a[0], a[0].type, axis=0))
        set_path(y, "head")
        t = build.transpose(b, y.result, [1, 0])
        set_path(t.owner, "lost")
        assert path_of(t.owner) == "head"
        return [t]

    module_of([((2, 3), "f32")], body)


def test_scalar_ops_that_xdsl_lacks_read_back_and_a_plain_context_takes_them_as_unknown(module_of: ModuleOf) -> None:
    def body(b: Builder, a: Any) -> Any:
        return [
            build.pointwise(b, [a[0], a[0]], ("s",), "f32", lambda i, s: i.insert(RemFOp(i.insert(ErfcOp(s[0])), s[1])))
        ]

    module = module_of([(("s",), "f32")], body)
    for text in (print_module(module), print_for_mlir(module)):
        assert '"arith.remf"(' in text and '"math.erfc"(' in text
        assert parse_module(text).is_structurally_equivalent(module)
    plain = QCContext.default()
    for name in ("arith.remf", "math.erfc"):
        del plain._loaded_ops[name]
    plain.allow_unregistered = True
    assert print_module(parse_module(print_module(module), plain)) == print_module(module)


def test_malformed_text_is_an_error_with_its_place() -> None:
    with pytest.raises(QCompilerError, match=r"dump\.mlir is not a valid module"):
        parse_module("func.func @main() { qc.nonsense }", name="dump.mlir")


def test_printing_twice_as_many_ops_takes_twice_the_work(module_of: ModuleOf) -> None:
    kind = T(("b", "s", 8), "f32")

    def calls(count: int) -> int:
        def body(b: Builder, a: Any) -> Any:
            y = a[0]
            b = build.with_path(b.insertion_point, "layer.norm")
            for _ in range(count):
                y = b.insert(qc.SoftmaxOp(y, kind, axis=1)).result
            return [y]

        profile = cProfile.Profile()
        profile.runcall(print_module, module_of([(("b", "s", 8), "f32")], body))
        return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]

    calls(10)  # what is computed once
    assert calls(2000) < 2.1 * calls(1000)
