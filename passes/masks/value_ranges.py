"""Bounds on the integers that an entry point computes, from the ranges of its sizes.

    %m = linalg.generic {reduction} max over iota(s)        1 <= s <= 61:    0 <= %m <= 60
    %c = arith.cmpi sgt, %m, 128                                             false at every size of the range
    %t = arith.select %c, %long, %short                                      %short

This is interval arithmetic over loop bodies (Moore, "Interval Analysis", 1966). An input, a weight or a state may hold
any number of its type. A result that may overflow its type wraps, so it may be any number too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from xdsl.dialects import arith, tensor
from xdsl.dialects.builtin import IndexType, IntegerAttr, IntegerType, Signedness, TensorType
from xdsl.dialects.linalg import ops
from xdsl.ir import Attribute, BlockArgument, Operation, OpResult, SSAValue
from xdsl.ir.affine import AffineDimExpr

from qcompiler.ir import qc
from qcompiler.ir.types import shape_of
from qcompiler.passes.loops import loops
from qcompiler.passes.views import views
from qcompiler.plan.dims import Range, dim


@dataclass(frozen=True)
class Interval:
    """All integers from `low` to `high`."""

    low: int
    high: int

    def joined(self, other: Interval) -> Interval:
        return Interval(min(self.low, other.low), max(self.high, other.high))

    def holds(self, other: Interval) -> bool:
        return self.low <= other.low and other.high <= self.high


Bounds = Interval | None
"""An interval, or None: any number of the type, or not an integer."""

_BOOLEAN = Interval(0, 1)


Corner = Literal["first", "last"]
"""One element of a tensor: at index 0 of every dim, or at the largest index of every dim."""


class ValueRanges:
    """The intervals of the values in one function's block."""

    def __init__(self, ranges: Mapping[str, Range]) -> None:
        self._ranges = ranges
        self._tensors: dict[tuple[SSAValue, Corner | None], Bounds] = {}

    def tensor(self, value: SSAValue, corner: Corner | None = None) -> Bounds:
        """The interval of a tensor's elements, or of its element at a corner."""
        if _limits(value.type) is None:
            return None
        if (value, corner) not in self._tensors:
            self._tensors[value, corner] = _within(self._made(value, corner), value.type)
        return self._tensors[value, corner]

    def body(self, op: ops.GenericOp, corner: Corner | None = None) -> dict[SSAValue, Bounds]:
        """The interval of every scalar in the body of a nest: over all iterations, or at the first or last one."""
        block, count = op.body.block, len(op.inputs)
        nest = _Nest(op, self._ranges, corner)
        known: dict[SSAValue, Bounds] = {}
        for argument, (value, index) in zip(block.args[:count], loops.inputs_of(op), strict=True):
            known[argument] = self.tensor(value, corner if _is_corner(index, value) else None)
        started = [self.tensor(value) for value in op.outputs]
        known.update(zip(block.args[count:], started, strict=True))
        self._run(nest, known)
        if loops.is_parallel(op):
            return known
        # A reducing loop carries its start or the result of one iteration, if a second one stays in that interval.
        carried = [_join(a, known.get(v)) for a, v in zip(started, _yields(op), strict=True)]
        known.update(zip(block.args[count:], carried, strict=True))
        self._run(nest, known)
        if not all(_stays(a, known.get(v)) for a, v in zip(carried, _yields(op), strict=True)):
            known.update(dict.fromkeys(block.args[count:]))
            self._run(nest, known)
        return known

    # --- tensors ---

    def _made(self, value: SSAValue, corner: Corner | None) -> Bounds:
        op = loops.producer(value)
        match op:
            case ops.GenericOp() if isinstance(value, OpResult):
                if not loops.is_parallel(op):
                    return self._reduced(op, value)
                return self.body(op, corner).get(_yields(op)[value.index])
            case ops.FillOp():
                return self._scalar(op.inputs[0], {}, None)
            case tensor.ConcatOp():
                return _union([self.tensor(v) for v in op.inputs])
            case qc.GatherOp():
                return self.tensor(op.x)
            case tensor.ExtractSliceOp():
                return self.tensor(op.source)
            case None:
                return None
            case _:  # every other view keeps the first and the last element in place
                return self.tensor(op.operands[0], corner) if isinstance(op, views.VIEWS) else None

    def _reduced(self, op: ops.GenericOp, value: OpResult) -> Bounds:
        """The interval of a reduction. A maximum over all elements is at least the first and at least the last of
        them."""
        made = _yields(op)[value.index]
        found = self.body(op).get(made)
        if any(dim(e).bounds(self._ranges)[0] <= 0 for e in loops.loop_extents(op)):
            return _join(found, self.tensor(op.outputs[value.index]))
        fold, carried = made.owner, op.body.block.args[len(op.inputs) + value.index]
        if found is None or shape_of(value.type) or not isinstance(fold, arith.MaxSIOp | arith.MinSIOp):
            return found
        for each in (v for v in fold.operands if v is not carried):
            for corner in CORNERS:
                element = self.body(op, corner).get(each)
                if element is None or fold.operands[0] is fold.operands[1] or carried not in fold.operands:
                    continue
                if isinstance(fold, arith.MaxSIOp):
                    found = Interval(max(found.low, element.low), found.high)
                else:
                    found = Interval(found.low, min(found.high, element.high))
        return found

    # --- scalars ---

    def _run(self, nest: _Nest, known: dict[SSAValue, Bounds]) -> None:
        for op in nest.op.body.block.ops:
            for result in op.results:
                known.pop(result, None)  # left by an earlier run with other arguments
                known[result] = _within(self._scalar(result, known, nest), result.type)

    def _scalar(self, value: SSAValue, known: Mapping[SSAValue, Bounds], nest: _Nest | None) -> Bounds:
        """The interval of a scalar. Outside of bodies, its own operands decide it."""
        if value in known or isinstance(value, BlockArgument):
            return known.get(value)
        op = value.owner
        assert isinstance(op, Operation)
        if isinstance(op, arith.ConstantOp):
            return _constant(op.value)
        if isinstance(op, ops.IndexOp) and nest is not None:
            return nest.index(op.dim.value.data)
        if isinstance(op, qc.DimOp):
            return Interval(*dim(op.expr.data).bounds(self._ranges))
        operands = [known[v] if v in known else self._scalar(v, known, nest) for v in op.operands]
        if isinstance(op, arith.CmpiOp):
            signed = op.lhs.type != _I1  # as a signed number, true is -1
            return _compared(op.predicate.value.data, operands) if signed else None
        if isinstance(op, arith.SelectOp):
            return _selected(operands)
        rules = _LOGIC if op.operands and op.operands[0].type == _I1 else _ARITHMETIC
        rule = rules.get(type(op))
        if rule is None or any(each is None for each in operands):
            return None
        return rule([each for each in operands if each is not None])


CORNERS: tuple[Corner, ...] = ("first", "last")


@dataclass(frozen=True)
class _Nest:
    """The iterations of a nest under analysis: all of them, or one at a corner."""

    op: ops.GenericOp
    ranges: Mapping[str, Range]
    corner: Corner | None

    def index(self, loop: int) -> Interval:
        low, high = dim(loops.loop_extents(self.op)[loop]).bounds(self.ranges)
        match self.corner:
            case "first":
                return Interval(0, 0)
            case "last":
                return Interval(max(low - 1, 0), max(high - 1, 0))
            case None:
                return Interval(0, max(high - 1, 0))


def _is_corner(index: loops.Index, value: SSAValue) -> bool:
    """Whether the corner iteration of a nest reads the corner element of an operand."""
    places = zip(index, shape_of(value.type), strict=True)
    return all(isinstance(e, AffineDimExpr) or size == 1 for e, size in places)


_I1 = IntegerType(1)


def decide(op: ops.GenericOp, ranges: ValueRanges) -> bool:
    """Replaces each boolean of a pointwise nest that can have only one value by that value. Returns whether there were
    any."""
    if not loops.is_pointwise(op):
        return False
    block = op.body.block
    booleans = [v for v in (*block.args, *(r for each in block.ops for r in each.results)) if v.type == _I1]
    if not booleans:
        return False
    known, changed = ranges.body(op), False
    for value in booleans:
        found = known.get(value)
        if found is None or found.low != found.high or value.first_use is None:
            continue
        if isinstance(value.owner, arith.ConstantOp):
            continue
        first = block.first_op
        assert first is not None
        constant = arith.ConstantOp(IntegerAttr(found.low, _I1))
        block.insert_op_before(constant, first)
        value.replace_all_uses_with(constant.result)
        changed = True
    return changed


def _yields(op: ops.GenericOp) -> Sequence[SSAValue]:
    last = op.body.block.last_op
    assert last is not None
    return last.operands


def _limits(type_: Attribute) -> Interval | None:
    """All numbers of a scalar or element type. None for types outside the interval arithmetic."""
    if isinstance(type_, TensorType):
        type_ = type_.get_element_type()
    if isinstance(type_, IndexType):
        return Interval(-(1 << 63), (1 << 63) - 1)
    if not isinstance(type_, IntegerType) or type_.signedness.data != Signedness.SIGNLESS:
        return None
    width = type_.width.data
    return _BOOLEAN if width == 1 else Interval(-(1 << (width - 1)), (1 << (width - 1)) - 1)


def _within(found: Bounds, type_: Attribute) -> Bounds:
    limits = _limits(type_)
    return found if found is not None and limits is not None and limits.holds(found) else limits


def _join(a: Bounds, b: Bounds) -> Bounds:
    return None if a is None or b is None else a.joined(b)


def _union(found: Sequence[Bounds]) -> Bounds:
    joined = found[0]
    for each in found[1:]:
        joined = _join(joined, each)
    return joined


def _stays(carried: Bounds, made: Bounds) -> bool:
    return carried is None or (made is not None and carried.holds(made))


def _constant(attribute: Attribute) -> Bounds:
    if not isinstance(attribute, IntegerAttr):
        return None
    number = attribute.value.data
    if attribute.type == _I1:
        number &= 1  # true may be written as -1
    return Interval(number, number)


def _compared(predicate: int, operands: Sequence[Bounds]) -> Bounds:
    """The result of a comparison (0 eq, 1 ne, 2 slt, 3 sle, 4 sgt, 5 sge): one number if the intervals decide it."""
    a, b = operands
    if a is None or b is None:
        return _BOOLEAN
    if predicate in (4, 5):
        a, b, predicate = b, a, predicate - 2
    match predicate:
        case 0 | 1:
            equal, apart = a == b and a.low == a.high, a.high < b.low or b.high < a.low
            always, never = (equal, apart) if predicate == 0 else (apart, equal)
        case 2:
            always, never = a.high < b.low, a.low >= b.high
        case 3:
            always, never = a.high <= b.low, a.low > b.high
        case _:
            return _BOOLEAN  # unsigned
    return Interval(1, 1) if always else Interval(0, 0) if never else _BOOLEAN


def _selected(operands: Sequence[Bounds]) -> Bounds:
    condition, kept, other = operands
    if condition == Interval(1, 1):
        return kept
    return other if condition == Interval(0, 0) else _join(kept, other)


def _product(a: Sequence[Interval]) -> Interval:
    corners = [x * y for x in (a[0].low, a[0].high) for y in (a[1].low, a[1].high)]
    return Interval(min(corners), max(corners))


def _xor(a: Sequence[Interval]) -> Interval:
    known = all(each.low == each.high for each in a)
    return Interval(a[0].low ^ a[1].low, a[0].low ^ a[1].low) if known else _BOOLEAN


def _least(a: Sequence[Interval]) -> Interval:
    return Interval(min(a[0].low, a[1].low), min(a[0].high, a[1].high))


def _greatest(a: Sequence[Interval]) -> Interval:
    return Interval(max(a[0].low, a[1].low), max(a[0].high, a[1].high))


Rule = Callable[[Sequence[Interval]], Interval | None]

_LOGIC: dict[type[Operation], Rule] = {
    arith.AndIOp: _least,
    arith.OrIOp: _greatest,
    arith.XOrIOp: _xor,
    arith.ExtUIOp: lambda a: a[0],
    arith.ExtSIOp: lambda a: Interval(-a[0].high, -a[0].low),
}
"""Rules for booleans, by type of op."""

_ARITHMETIC: dict[type[Operation], Rule] = {
    arith.AddiOp: lambda a: Interval(a[0].low + a[1].low, a[0].high + a[1].high),
    arith.SubiOp: lambda a: Interval(a[0].low - a[1].high, a[0].high - a[1].low),
    arith.MuliOp: _product,
    arith.MaxSIOp: _greatest,
    arith.MinSIOp: _least,
    arith.IndexCastOp: lambda a: a[0],
    arith.ExtSIOp: lambda a: a[0],
    arith.ExtUIOp: lambda a: a[0] if a[0].low >= 0 else None,
    arith.TruncIOp: lambda a: a[0],  # wraps if it does not fit, see `_within`
}
"""Rules for all other integers."""
