"""Recognises softmax in its decomposed form, `e / sum(e)` with `e = exp(x - max(x))` along one dim."""

from __future__ import annotations

from xdsl.ir import SSAValue
from xdsl.ir.affine import AffineDimExpr
from xdsl.rewriter import InsertPoint

from qcompiler.ir import build, qc
from qcompiler.ir.module import path_of
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.passes.idioms.raised import Raised, insert
from qcompiler.passes.loops import loops
from qcompiler.passes.loops.loops import Index
from qcompiler.passes.views.trace import Node, Tracer


def match(value: SSAValue, tracer: Tracer) -> Raised | None:
    """The softmax that computes `value`; None if it is none."""
    pair = tracer.operands(tracer.element(value), "arith.divf")
    if pair is None:
        return None
    total = tracer.head(pair[1])
    if total.op != "sum":
        return None
    outside, inside = _shifted_exp(pair[0], tracer), _shifted_exp(total.args[0], tracer)
    if outside is None or inside is None:
        return None
    shape = shape_of(value.type)
    for tensor, index in tracer.aliases(outside[0]):
        order = loops.order_of(index, shape_of(tensor.type), shape)
        if order is None or tensor_dtype(tensor.type) != tensor_dtype(value.type):
            continue
        axis = _axis_of((tensor, index), inside[0], total, tracer)
        maxima = [_axis_of((tensor, index), m.args[0], m, tracer) for m in (outside[1], inside[1])]
        if axis is not None and maxima == [axis, axis]:
            return insert(value, qc.SoftmaxOp(_turned(tensor, order, value), value.type, axis=order[axis]))
    return None


def unshifted(op: qc.SoftmaxOp, tracer: Tracer) -> SSAValue | None:
    """x, if the softmax is of x - max(x) along its axis; else None. A softmax subtracts the maximum itself, so a model
    that does so in front of it (gpt-oss) changes nothing."""
    pair = tracer.operands(tracer.element(op.x), "arith.subf")
    peak = None if pair is None else tracer.head(pair[1])
    if pair is None or peak is None or peak.op != "max":
        return None
    own = loops.own_index(shape_of(op.x.type))
    for tensor, index in tracer.aliases(pair[0]):
        if index == own and tensor.type == op.x.type:
            axis = _axis_of((tensor, index), peak.args[0], peak, tracer)
            return tensor if axis == op.axis.value.data else None
    return None


def _turned(tensor: SSAValue, order: tuple[int, ...], value: SSAValue) -> SSAValue:
    """The tensor, whose dim n is dim order[n] of a value, with the value's dims; made before that value.

    The model's order is kept, since its last two dims are the queries and the keys of an attention.
    """
    before = loops.producer(value)
    assert before is not None
    builder = build.with_path(InsertPoint.before(before), path_of(before))
    return build.transpose(builder, tensor, [order.index(n) for n in range(len(order))])


def lookalike(value: SSAValue, tracer: Tracer) -> str | None:
    """Why exponentials divided by a sum are no softmax: the first condition that fails. None for another form."""
    pair = tracer.operands(tracer.element(value), "arith.divf")
    if pair is None or tracer.head(pair[0]).op != "math.exp":
        return None
    total = tracer.head(pair[1])
    if total.op != "sum":
        many = total.tensor is not None and loops.is_reduction(total.tensor)
        return "the sum does not run along one dim" if many else None
    if tracer.head(total.args[0]).op != "math.exp":
        return "the sum is not of exponentials"
    outside, inside = _shifted_exp(pair[0], tracer), _shifted_exp(total.args[0], tracer)
    if outside is None or inside is None:
        return "no maximum is subtracted before the exponential"
    shape = shape_of(value.type)
    seen = tracer.aliases(outside[0])
    whole = [t for t, index in seen if loops.order_of(index, shape_of(t.type), shape) is not None]
    if all(tensor_dtype(tensor.type) != tensor_dtype(value.type) for tensor in whole):
        return "what it is taken of has another type, or other dims, than the result"
    return "its maximum and its sum do not run along the same dim of the same tensor"


def _shifted_exp(node: Node, tracer: Tracer) -> tuple[Node, Node] | None:
    """(x, the max node) if the node is exp(x - max(...))."""
    found = tracer.head(node)
    if found.op != "math.exp":
        return None
    pair = tracer.operands(found.args[0], "arith.subf")
    if pair is None:
        return None
    peak = tracer.head(pair[1])
    return (pair[0], peak) if peak.op == "max" else None


def _axis_of(x: tuple[SSAValue, Index], node: Node, reduction: Node, tracer: Tracer) -> int | None:
    """The dim of a tensor along which a sum or a maximum runs, if the node is an element of it; else None.

    The softmax reads the tensor at the index of `x`. A dim of size 1 is read at 0, whatever loop runs over it. Then it
    is the last such dim: a softmax along any of them is the same.
    """
    tensor, own = x
    for other, index in tracer.aliases(node):
        if other is not tensor:
            continue
        axes = [n for n, e in enumerate(index) if isinstance(e, AffineDimExpr) and e.position >= Tracer.FIRST_AXIS]
        if any(n not in axes and e != own[n] for n, e in enumerate(index)):
            continue
        units = [n for n, size in enumerate(shape_of(tensor.type)) if size == 1]
        if not axes and reduction.extent == 1 and units:
            return units[-1]
        if len(axes) == 1 and index[axes[0]] == loops.dim_expr(reduction.axis):
            return axes[0]
    return None
