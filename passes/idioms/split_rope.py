"""Recognises rotary embeddings whose two parts are computed apart, of heads (B, H, S, D) or rows (B, S, H, D).

    halves   concat(a * cos - b * sin, b * cos + a * sin)                  a = x[:D/2], b = x[D/2:]
    pairs    stack of the same along a last dim of size 2                  a = x[0::2], b = x[1::2]

The tables have D/2 columns; `qc.rope` reads each of them twice. What is joined behind the two halves (partial rotary)
is joined behind the result. rope.py recognises `x * cos + rotate(x) * sin`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from xdsl.builder import Builder
from xdsl.dialects import tensor
from xdsl.ir import SSAValue
from xdsl.rewriter import InsertPoint

from qcompiler.ir import build, qc
from qcompiler.ir.module import path_of
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.passes.idioms import rope
from qcompiler.passes.idioms.raised import Raised
from qcompiler.passes.views.trace import Node, Tracer
from qcompiler.plan.dims import Dim


@dataclass(frozen=True)
class _Rotation:
    """`a * cos - b * sin` and `b * cos + a * sin`."""

    a: Node
    b: Node
    cos: Node
    sin: Node


def match(joined: tensor.ConcatOp, tracer: Tracer) -> Raised | None:
    """The rope that computes the concatenation; None if it is none."""
    found = _read(joined, tracer)
    return found if isinstance(found, Raised) else None


def lookalike(joined: tensor.ConcatOp, tracer: Tracer) -> str | None:
    """Why concat(a - b, c + d) is no rotary embedding: the first condition that fails. None for another form."""
    if len(joined.inputs) < 2:
        return None
    minus, plus = (tracer.operands(tracer.element(v), op) for v, op in _halves_of(joined))
    products = [tracer.head(each).op for each in (*(minus or ()), *(plus or ()))]
    if products != ["arith.mulf"] * 4:
        return None
    found = _read(joined, tracer)
    return found if isinstance(found, str) else None


def _halves_of(joined: tensor.ConcatOp) -> tuple[tuple[SSAValue, str], tuple[SSAValue, str]]:
    return (joined.inputs[0], "arith.subf"), (joined.inputs[1], "arith.addf")


def _read(joined: tensor.ConcatOp, tracer: Tracer) -> Raised | str:
    """The rope, or the first condition that fails."""
    shape, axis = shape_of(joined.result.type), joined.dim.value.data
    pairs = len(shape) == 5 and axis == 4 and shape[4] == 2
    if len(joined.inputs) < 2 or not (pairs or (len(shape) == 4 and axis == 3)):
        return f"it is not (batch, heads, sequence, depth) with an even depth, but {list(shape)}"
    half, other = shape_of(joined.inputs[0].type), shape_of(joined.inputs[1].type)
    depth = half[3]
    if half != other or not isinstance(depth, int):
        return "its two parts have different sizes"
    whole = (*half[:3], 2 * depth)
    rotations = list(_rotations(joined, tracer))
    if not rotations:
        return "its parts are not a * cos - b * sin and b * cos + a * sin"
    wholes = [(each, x) for each in rotations if (x := _whole_of(each, whole, pairs, joined, tracer)) is not None]
    for rotation, x in wholes:
        made = _build(joined, x, rotation, whole, pairs, tracer)
        if made is not None:
            return made
    if wholes:
        return "its tables have a dim of heads"
    return "what it rotates is not the two halves, or the even and the odd elements, of one tensor of its type"


def _rotations(joined: tensor.ConcatOp, tracer: Tracer) -> Iterator[_Rotation]:
    """The ways to read the two parts as a rotation, by the first part's products in either order."""
    minus, plus = (tracer.operands(tracer.element(v), op) for v, op in _halves_of(joined))
    if minus is None or plus is None:
        return
    for a, cos in tracer.either(minus[0], "arith.mulf"):
        for b, sin in tracer.either(minus[1], "arith.mulf"):
            for one, two in (plus, plus[::-1]):
                if _is_product(one, b, cos, tracer) and _is_product(two, a, sin, tracer):
                    yield _Rotation(a, b, cos, sin)


def _is_product(node: Node, left: Node, right: Node, tracer: Tracer) -> bool:
    return any(_same(one, left, tracer) and _same(two, right, tracer) for one, two in tracer.either(node, "arith.mulf"))


def _same(one: Node, other: Node, tracer: Tracer) -> bool:
    """Whether two nodes are the same element, up to float casts."""
    if tracer.head(one) is tracer.head(other):
        return True
    return not {*tracer.aliases(one)}.isdisjoint(tracer.aliases(other))


def _whole_of(
    rotation: _Rotation, whole: tuple[Dim, ...], pairs: bool, joined: tensor.ConcatOp, tracer: Tracer
) -> SSAValue | None:
    """x, of which a and b are the two parts, as a view before the concatenation."""
    first, second = rope.part(rotation.a, tracer), rope.part(rotation.b, tracer)
    if first is None or second is None:
        return None
    origin = rope.pairs(second, first, whole) if pairs else rope.halves(second, first, whole)
    if origin is None or tensor_dtype(origin.root.type) != tensor_dtype(joined.result.type):
        return None
    builder = build.with_path(InsertPoint.before(joined), path_of(joined))
    if origin.offsets and shape_of(origin.root.type) != whole:
        return build.extract_slice(builder, origin.root, origin.offsets, whole)
    return build.reshape(builder, origin.root, whole)


def _build(
    joined: tensor.ConcatOp, x: SSAValue, rotation: _Rotation, whole: tuple[Dim, ...], pairs: bool, tracer: Tracer
) -> Raised | None:
    for order in (rope.HEADS, rope.ROWS):
        part = joined.inputs[0]
        tables = [rope.table(each, part, order, joined, tracer) for each in (rotation.cos, rotation.sin)]
        if tables[0] is None or tables[1] is None:
            continue
        builder = build.with_path(InsertPoint.before(joined), path_of(joined))
        cos, sin = (_doubled(builder, each, whole[3], pairs) for each in tables if each is not None)
        heads, cos, sin = (build.transpose(builder, each, order) for each in (x, cos, sin))
        made = qc.RopeOp(heads, cos, sin, heads.type, interleaved=pairs)
        builder.insert(made)
        result = build.transpose(builder, made.result, order)
        if pairs:
            return Raised(made, build.reshape(builder, result, shape_of(joined.result.type)))
        tail = list(joined.inputs[2:])
        return Raised(made, build.concat(builder, [result, *tail], 3) if tail else result)
    return None


def _doubled(builder: Builder, table: SSAValue, depth: Dim, pairs: bool) -> SSAValue:
    """A table of D/2 columns with D: one half behind the other, or each column twice."""
    shape = shape_of(table.type)[:4]
    rows = build.reshape(builder, table, shape)
    wide, axes = ((*shape, 2), (0, 1, 2, 3)) if pairs else ((*shape[:3], 2, shape[3]), (0, 1, 2, 4))
    return build.reshape(builder, build.broadcast_in(builder, rows, wide, axes), (*shape[:3], depth))
