"""Recognises rotary embeddings: `x * cos + rotate(x) * sin`, of heads (B, H, S, D) or rows (B, S, H, D).

    rotate halves   concat(-x[D/2:], x[:D/2])
    rotate pairs    stack(-x[1::2], x[0::2]), flattened; the pairs are a reshape to (D/2, 2) or every second element

x may be a part of each head (partial rotary). Its two parts must lie side by side in one tensor. split_rope.py
recognises rotations whose two parts are computed apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from xdsl.dialects import tensor
from xdsl.ir import Operation, SSAValue
from xdsl.rewriter import InsertPoint

from qcompiler.ir import build, qc
from qcompiler.ir.module import path_of
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.ir.types import tensor as tensor_type
from qcompiler.passes.idioms.raised import Raised
from qcompiler.passes.loops import loops
from qcompiler.passes.loops.extras import as_extra, can_be_extra
from qcompiler.passes.views import views
from qcompiler.passes.views.trace import Node, Tracer
from qcompiler.plan.dims import Dim

HEADS, ROWS = (0, 1, 2, 3), (0, 2, 1, 3)
"""The positions of batch, heads, sequence and depth among the value's dims."""

_SPLIT = ((0,), (1,), (2,), (3, 4))


@dataclass(frozen=True)
class Origin:
    """A tensor, and the offsets at which a part of it begins. Without offsets the part is the whole tensor,
    reshaped."""

    root: SSAValue
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """A slice: its source, offsets, sizes and steps."""

    source: SSAValue
    offsets: tuple[int, ...]
    shape: tuple[Dim, ...]
    steps: tuple[int, ...]


def match(value: SSAValue, tracer: Tracer) -> Raised | None:
    """The rope that computes `value`; None if it is none."""
    shape = shape_of(value.type)
    if len(shape) != 4 or not isinstance(shape[3], int) or shape[3] % 2:
        return None
    for plain, rotated in tracer.either(tracer.element(value), "arith.addf"):
        for turned, sine in tracer.either(rotated, "arith.mulf"):
            for origin, interleaved in _rotations(turned, shape, tracer):
                for direct, cosine in tracer.either(plain, "arith.mulf"):
                    x = _at(origin, direct, value, tracer)
                    made = _build(value, x, cosine, sine, interleaved, tracer) if x is not None else None
                    if made is not None:
                        return made
    return None


def lookalike(joined: tensor.ConcatOp, tracer: Tracer) -> str | None:
    """Why concat(-a, b) is no part of a rotary embedding: the first condition that fails. None for another form."""
    shape, axis = shape_of(joined.result.type), joined.dim.value.data
    negated = tracer.head(tracer.element(joined.inputs[0])).op == "arith.negf"
    if len(joined.inputs) != 2 or not negated or axis != len(shape) - 1:
        return None
    stacked = len(shape) == 5
    seen = (*shape[:3], shape[3] * 2) if stacked and isinstance(shape[3], int) else shape
    if len(seen) != 4 or not isinstance(seen[3], int) or seen[3] % 2:
        return f"it is not (batch, heads, sequence, depth) with an even depth, but {list(shape)}"
    parts = _parts(joined, axis, tracer)
    if parts is None:
        return "its parts are not slices with fixed offsets"
    if (pairs(*parts, seen) if stacked else halves(*parts, seen)) is None:
        return "its parts are not the two halves, or the odd and the even elements, of one tensor"
    return "no sum of x * cos and of this * sin reads it, with tables that have no dim of heads"


def _build(value: SSAValue, x: SSAValue, cosine: Node, sine: Node, interleaved: bool, tracer: Tracer) -> Raised | None:
    before = loops.producer(value)
    assert before is not None
    for order in (HEADS, ROWS):
        tables = [table(each, value, order, before, tracer) for each in (cosine, sine)]
        if tables[0] is None or tables[1] is None:
            continue
        builder = build.with_path(InsertPoint.before(before), path_of(before))
        heads, cos, sin = (build.transpose(builder, each, order) for each in (x, tables[0], tables[1]))
        type_ = tensor_type(shape_of(heads.type), tensor_dtype(value.type))
        made = qc.RopeOp(heads, cos, sin, type_, interleaved=interleaved)
        builder.insert(made)
        return Raised(made, build.transpose(builder, made.result, order))
    return None


# --- the rotation ----------------------------------------------------------------------------------------------------


def _rotations(node: Node, shape: tuple[Dim, ...], tracer: Tracer) -> Iterator[tuple[Origin, bool]]:
    """The origin of x, and whether pairs (not halves) are rotated, for each way to read `node` as rotate(x)."""
    for source, index in tracer.aliases(node):
        if index != loops.own_index(shape_of(source.type)):
            continue
        joined = loops.producer(source)
        if isinstance(joined, tensor.ConcatOp):
            parts = _parts(joined, 3, tracer)
            begin = halves(*parts, shape) if parts is not None else None
            if begin is not None:
                yield begin, False
        elif isinstance(joined, tensor.CollapseShapeOp) and views.groups_of(joined) == _SPLIT:
            stacked = loops.producer(joined.src)
            parts = _parts(stacked, 4, tracer) if isinstance(stacked, tensor.ConcatOp) else None
            begin = pairs(*parts, shape) if parts is not None else None
            if begin is not None:
                yield begin, True


def _parts(joined: tensor.ConcatOp, axis: int, tracer: Tracer) -> tuple[Part, Part] | None:
    """(a, b) if the op is concat(-a, b) along `axis`."""
    if joined.dim.value.data != axis or len(joined.inputs) != 2:
        return None
    negated = tracer.head(tracer.element(joined.inputs[0]))
    if negated.op != "arith.negf":
        return None
    first, second = part(negated.args[0], tracer), part(tracer.element(joined.inputs[1]), tracer)
    return (first, second) if first is not None and second is not None else None


def part(node: Node, tracer: Tracer) -> Part | None:
    """The slice that has `node` as its element, ignoring unit dims."""
    for source, index in tracer.aliases(node):
        cut = loops.producer(source)
        if not isinstance(cut, tensor.ExtractSliceOp) or index != loops.own_index(shape_of(source.type)):
            continue
        found = views.slice_of(cut)
        offsets = tuple(o for o in found[0] if isinstance(o, int)) if found is not None else ()
        if found is not None and len(offsets) == len(found[0]):
            return Part(cut.source, offsets, found[1], found[2])
        return None
    return None


def halves(upper: Part, lower: Part, shape: tuple[Dim, ...]) -> Origin | None:
    """x, if the parts are its last and its first half."""
    half = _half(shape)
    shifted = (*lower.offsets[:-1], lower.offsets[-1] + half)
    same = upper.source is lower.source and upper.offsets == shifted and {*upper.steps, *lower.steps} == {1}
    if not same or len(shifted) != 4 or lower.shape[-1] != half or upper.shape[-1] != half:
        return None
    return _origin(lower.source, lower.offsets)


def pairs(odd: Part, even: Part, shape: tuple[Dim, ...]) -> Origin | None:
    """x, if the parts are its odd and its even elements."""
    step = 1 if len(even.offsets) == 5 else 2  # 5 dims: slices of x reshaped to (…, D/2, 2)
    shifted = (*even.offsets[:-1], even.offsets[-1] + 1)
    same = (
        odd.source is even.source
        and odd.offsets == shifted
        and odd.steps == even.steps == (*(1,) * (len(shifted) - 1), step)
    )
    if not same or odd.shape != even.shape:
        return None
    if step == 2:
        return _origin(even.source, even.offsets) if even.shape[-1] == _half(shape) else None
    whole = (*shape[:3], _half(shape), 2)
    fits = shape_of(even.source.type) == whole and even.shape == (*whole[:4], 1) and not any(even.offsets)
    return Origin(views.unreshaped(even.source), ()) if fits else None


def _half(shape: tuple[Dim, ...]) -> int:
    assert isinstance(shape[3], int)
    return shape[3] // 2


def _origin(value: SSAValue, offsets: tuple[int, ...]) -> Origin:
    """The same origin in the source of all slices without steps."""
    cut = loops.producer(value)
    while isinstance(cut, tensor.ExtractSliceOp):
        found = views.slice_of(cut)
        if found is None or set(found[2]) != {1} or not all(isinstance(o, int) for o in found[0]):
            break
        offsets = tuple(int(o) + more for o, more in zip(found[0], offsets, strict=True))
        value = cut.source
        cut = loops.producer(value)
    return Origin(value, offsets)


# --- x and its tables ------------------------------------------------------------------------------------------------


def _at(origin: Origin, direct: Node, value: SSAValue, tracer: Tracer) -> SSAValue | None:
    """x: the tensor, of the value's shape and type, that begins at `origin` and has `direct` as its element."""
    shape, seen = shape_of(value.type), list(tracer.aliases(direct))
    for each in (origin.root, *(source for source, _ in seen)):
        if shape_of(each.type) != shape or tensor_dtype(each.type) != tensor_dtype(value.type):
            continue
        end, index = views.seen_through(each, loops.own_index(shape))
        reads = (end, loops.without_units(index, shape_of(end.type)))
        if reads in seen and (_origin(each, (0,) * 4) == origin or Origin(views.unreshaped(each), ()) == origin):
            return each
    return None


def table(node: Node, value: SSAValue, order: tuple[int, ...], before: Operation, tracer: Tracer) -> SSAValue | None:
    """The cosine or sine table as a view with the value's dims. The dim of heads has size 1."""
    rows, depth = order[2:]
    for source, index in tracer.aliases(node):
        if can_be_extra(source, index) and tensor_dtype(source.type) in (tensor_dtype(value.type), "f32"):
            positions = {d for e in index for d in e.used_dims()}
            wide = {n for n, size in enumerate(shape_of(value.type)) if size != 1}
            if {rows, depth} & wide <= positions <= {order[0], rows, depth}:
                return as_extra(before, source, index, shape_of(value.type))
    return None
