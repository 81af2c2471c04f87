"""Rotary embedding from `x * cos + rotate_half(x) * sin`, where rotate_half is `concat(-x[D/2:], x[:D/2])`."""

from __future__ import annotations

from xdsl.dialects import tensor
from xdsl.ir import Operation, SSAValue

from qcompiler.ir import qc
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.passes.support import loops, views
from qcompiler.passes.support.extras import as_extra, can_be_extra
from qcompiler.passes.support.trace import Node, Tracer


def match(value: SSAValue, tracer: Tracer) -> Operation | None:
    """The rope that computes `value` (B, H, S, D), not yet inserted; None if it is none."""
    shape = shape_of(value.type)
    before = loops.producer(value)
    if len(shape) != 4 or before is None or not isinstance(shape[3], int) or shape[3] % 2:
        return None
    for plain, rotated in tracer.either(tracer.element(value), "arith.addf"):
        for half, sine in tracer.either(rotated, "arith.mulf"):
            x = _rotated_tensor(half, value, tracer)
            if x is None:
                continue
            for direct, cosine in tracer.either(plain, "arith.mulf"):
                if views.seen_through(x, loops.identity(4)) not in set(tracer.aliases(direct)):
                    continue
                tables = [_table(each, value, before, tracer) for each in (cosine, sine)]
                if tables[0] is not None and tables[1] is not None:
                    return qc.RopeOp(x, tables[0], tables[1], value.type)
    return None


def _rotated_tensor(node: Node, value: SSAValue, tracer: Tracer) -> SSAValue | None:
    """x, where node is the element of concat(-x[…, D/2:], x[…, :D/2])."""
    size = shape_of(value.type)[3]
    assert isinstance(size, int)
    for source, index in tracer.aliases(node):
        joined = loops.producer(source)
        if not isinstance(joined, tensor.ConcatOp) or index != loops.identity(4):
            continue
        if joined.dim.value.data != 3 or len(joined.inputs) != 2:
            return None
        negated = tracer.head(tracer.element(joined.inputs[0]))
        if negated.op != "arith.negf":
            return None
        upper = _half(negated.args[0], size // 2, size // 2, tracer)
        lower = _half(tracer.element(joined.inputs[1]), 0, size // 2, tracer)
        same = upper is not None and upper is lower and shape_of(upper.type) == shape_of(value.type)
        return upper if upper is not None and same and _same_type(upper, value) else None
    return None


def _half(node: Node, offset: int, size: int, tracer: Tracer) -> SSAValue | None:
    """x, where node is the element of the slice of x along the last dim that starts at `offset`."""
    for source, index in tracer.aliases(node):
        cut = loops.producer(source)
        if not isinstance(cut, tensor.ExtractSliceOp) or index != loops.identity(4):
            continue
        parts = views.slice_of(cut)
        if parts is None or parts[0] != (0, 0, 0, offset) or parts[1][3] != size or set(parts[2]) != {1}:
            return None
        return cut.source
    return None


def _table(node: Node, value: SSAValue, before: Operation, tracer: Tracer) -> SSAValue | None:
    """The cosine or sine table as a (B|1, 1, S, D) view."""
    shape = shape_of(value.type)
    for source, index in tracer.aliases(node):
        if can_be_extra(source, index) and _same_type(source, value):
            positions = {d for e in index for d in e.used_dims()}
            if {2, 3} <= positions and 1 not in positions and max(positions) < 4:
                return as_extra(before, source, index, shape)
    return None


def _same_type(a: SSAValue, b: SSAValue) -> bool:
    return tensor_dtype(a.type) == tensor_dtype(b.type)
