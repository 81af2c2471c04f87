"""Recognises softmax in its decomposed form, `e / sum(e)` with `e = exp(x - max(x))` along one dim."""

from __future__ import annotations

from xdsl.ir import SSAValue
from xdsl.ir.affine import AffineDimExpr

from qcompiler.ir import qc
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.passes.idioms.raised import Raised, insert
from qcompiler.passes.loops import loops
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
        if index != loops.own_index(shape) or shape_of(tensor.type) != shape:
            continue
        if tensor_dtype(tensor.type) != tensor_dtype(value.type):
            continue
        axis = _axis_of(tensor, inside[0], total.axis, tracer)
        maxima = [_axis_of(tensor, m.args[0], m.axis, tracer) for m in (outside[1], inside[1])]
        if axis is not None and maxima == [axis, axis]:
            return insert(value, qc.SoftmaxOp(tensor, value.type, axis=axis))
    return None


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
    own = [
        t for t, index in tracer.aliases(outside[0]) if index == loops.own_index(shape) and shape_of(t.type) == shape
    ]
    if all(tensor_dtype(tensor.type) != tensor_dtype(value.type) for tensor in own):
        return "what it is taken of has another type, or another order of dims, than the result"
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


def _axis_of(tensor: SSAValue, node: Node, loop: int, tracer: Tracer) -> int | None:
    """The dim of `tensor` that the loop dim `loop` indexes, if the node is an element of the tensor; else None."""
    for other, index in tracer.aliases(node):
        if other is not tensor:
            continue
        axes = [n for n, e in enumerate(index) if isinstance(e, AffineDimExpr) and e.position >= Tracer.FIRST_AXIS]
        own = loops.own_index(shape_of(tensor.type))
        kept = all(n in axes or e == own[n] for n, e in enumerate(index))
        if len(axes) == 1 and kept and index[axes[0]] == loops.dim_expr(loop):
            return axes[0]
    return None
