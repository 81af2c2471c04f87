"""Lowers `qc.linear_attention` to an `scf.for` over the tokens around linalg, as linalg_recurrent.py does."""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.builder import Builder
from xdsl.dialects import scf
from xdsl.dialects import tensor as tensor_dialect
from xdsl.dialects.builtin import DenseArrayBase, IndexType, i64
from xdsl.ir import Block, Operation, Region, SSAValue
from xdsl.rewriter import InsertPoint

from qcompiler.ir import build, qc
from qcompiler.ir.linalg_base import LinalgLowering, Rule, contract, dims, points
from qcompiler.ir.scalar_code import Code, Scalar, where
from qcompiler.ir.types import DYNAMIC, shape_of


def _linear_attention(op: qc.LinearAttentionOp, lowering: LinalgLowering) -> Sequence[SSAValue]:
    b = lowering.builder
    _, *sizes = shape_of(op.state.type)
    batch, steps = shape_of(op.query.type)[:2]
    part = [batch, *sizes]
    old = build.extract_slice(b, op.state, [0] * 4, part, [1] * 4)

    def begun(code: Code, s: Sequence[Scalar]) -> Scalar:
        sequence = code.index(0)
        is_new = code.read(op.first, sequence).equals(0) & code.read(op.counts, sequence).differs(0)
        return where(is_new, s[0].of(0), s[0])

    start = points(b, [old], part, "f32", begun)
    ends = build.dim_value(b, steps)
    bounds = [build.index_constant(b, v) if isinstance(v, int) else v for v in (0, ends, 1)]
    carried = [start, build.fill(b, 0.0, shape_of(op.out.type), "f32")]
    block = Block(arg_types=[IndexType(), *(value.type for value in carried)])
    inner = Builder(InsertPoint.at_end(block))
    time, state, outs = block.args
    new, out = _token(op, inner, time, state)
    stored = build.insert_slice(inner, new, state, [0] * 4)  # written into what the loop was given, without new memory
    inner.insert(scf.YieldOp(stored, _written(inner, out, outs, time)))
    loop = b.insert(scf.ForOp(bounds[0], bounds[1], bounds[2], carried, Region(block)))
    return [build.insert_slice(b, loop.results[0], op.state, [0] * 4), loop.results[1]]


def _token(op: qc.LinearAttentionOp, b: Builder, time: SSAValue, state: SSAValue) -> tuple[SSAValue, SSAValue]:
    """The states after one token, and what it reads of them."""
    batch, heads, width, depth = shape_of(state.type)
    groups = shape_of(op.query.type)[2]
    assert isinstance(heads, int) and isinstance(groups, int)
    shared, rows = heads // groups, (batch, heads, width)

    def of_group(source: SSAValue) -> SSAValue:
        """The query or key of each head."""

        def read(code: Code, _: Sequence[Scalar]) -> Scalar:
            return code.read(source, code.index(0), code.scalar(time), code.index(1) // shared, code.index(2))

        return points(b, [], (batch, heads, depth), "f32", read)

    def kept(code: Code, s: Sequence[Scalar]) -> Scalar:
        column = code.index(3) if shape_of(op.decay.type)[3] != 1 else code.constant(0, "index")
        decay = code.read(op.decay, code.index(0), code.scalar(time), code.index(1), column)
        if op.rate is not None:
            decay = decay * code.read(op.rate, code.index(1), code.index(3))
        return s[0] * decay.apply("exp")

    keys, decayed = of_group(op.key), points(b, [state], (*rows, depth), "f32", kept)
    seen = [] if op.beta is None else [contract(b, [decayed, keys], [dims(0, 1, 2, 3), dims(0, 1, 3)], rows, "f32")]

    def addend(code: Code, s: Sequence[Scalar]) -> Scalar:
        at = (code.index(0), code.scalar(time), code.index(1))
        value = code.read(op.value, *at, code.index(2))
        return value if op.beta is None else code.read(op.beta, *at) * (value - s[0])

    added = points(b, seen, rows, "f32", addend)

    def reads(code: Code) -> Scalar:
        return code.scalar(time).to("i64") < code.read(op.counts, code.index(0))

    def update(code: Code, s: Sequence[Scalar]) -> Scalar:
        sequence, head = code.index(0), code.index(1)
        key = code.read(keys, sequence, head, code.index(3))
        return where(reads(code), s[0] + code.read(added, sequence, head, code.index(2)) * key, s[1])

    new = points(b, [decayed, state], (*rows, depth), "f32", update)
    out = contract(b, [new, of_group(op.query)], [dims(0, 1, 2, 3), dims(0, 1, 3)], rows, "f32")
    return new, points(b, [out], rows, "f32", lambda code, s: where(reads(code), s[0], s[0].of(0)))


def _written(b: Builder, out: SSAValue, outs: SSAValue, time: SSAValue) -> SSAValue:
    """The outputs with those of one token."""
    sizes = [build.dim_value(b, size) for size in shape_of(out.type)]
    batch, *rest = [size if isinstance(size, int) else DYNAMIC for size in sizes]
    op = tensor_dialect.InsertSliceOp.build(
        operands=[out, outs, [time], [size for size in sizes if isinstance(size, SSAValue)], []],
        result_types=[outs.type],
        properties={
            "static_offsets": DenseArrayBase.from_list(i64, [0, DYNAMIC, 0, 0]),
            "static_sizes": DenseArrayBase.from_list(i64, [batch, 1, *rest]),
            "static_strides": DenseArrayBase.from_list(i64, [1, 1, 1, 1]),
        },
    )
    return b.insert(op).result


LINEAR_ATTENTION: dict[type[Operation], Rule] = {qc.LinearAttentionOp: _linear_attention}
