"""Masks whose limits are data: (query i, key j) is kept if `j <= last[b, i]` and, with a window,
`j > last[b, i] - window`.

    cmpi sle, j, %position[i]                                    last = %position
    cmpi slt, j, %length                                         last = %length - 1
    cmpi sgt, j, %position[i] - 64 and cmpi sle, j, %position[i]     last = %position, window = 64
    %lower_triangle[%position[i], j]                             last = %position

Masks over a cache whose length is known only at call time look like this. With the limit as its operand `last`,
attention does not read the keys after it. `cmpi sle, j, i` is the flag `causal`; here it only matters as the end of a
window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from xdsl.builder import Builder
from xdsl.dialects import arith
from xdsl.ir import Operation, SSAValue
from xdsl.ir.affine import AffineConstantExpr
from xdsl.rewriter import InsertPoint

from qcompiler.ir import build, qc
from qcompiler.ir.module import path_of
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.passes.loops import loops
from qcompiler.passes.loops.extras import as_extra, can_be_extra
from qcompiler.passes.loops.loops import Index, dim_expr
from qcompiler.passes.masks.mask_proof import DROPS, KEY, PREDICATES, QUERY, linear
from qcompiler.passes.views.trace import Node, Tracer
from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel import DType

Evaluate = Callable[[SSAValue], "npt.NDArray[np.generic] | None"]
"""The values of a tensor that depends on no input, at the largest sizes. None for other tensors."""

_INTEGERS = ("i64", "i32")


@dataclass(frozen=True)
class Limit:
    """`base + offset`. The base is the query's own index (None) or an element of a tensor.

    `source` is a tensor that holds the base, and the index to read it at. `wraps` is the size that is added to negative
    elements (0: none is added).
    """

    base: Node | None
    offset: int
    source: tuple[SSAValue, Index] | None = None
    wraps: int = 0


@dataclass(frozen=True)
class Bound:
    """The keys a mask keeps: keys up to `last`, up to the query's own index (`causal`), or all keys. `window` keeps
    only the last so many of these (None: all)."""

    causal: bool = False
    last: Limit | None = None
    window: int | None = None


class BoundReader:
    """Finds the bounds of the masks of one function."""

    def __init__(self, tracer: Tracer, evaluate: Evaluate) -> None:
        self._tracer = tracer
        self._evaluate = evaluate
        self._made: dict[tuple[SSAValue, Index, int, int], SSAValue] = {}

    def bound(self, mask: SSAValue, op: qc.AttentionOp) -> Bound | None:
        """The bound that a rank-4 mask is equal to. None if the mask is not a bound, or if `op` has a limit that
        conflicts."""
        parts = self._conjuncts(self._tracer.element(mask))
        if not parts:
            return None
        ends: list[list[Limit]] = []
        starts: list[list[Limit]] = []
        for part in parts:
            found = self._limits(part)
            if found is None:
                return None
            (ends if found[0] == "end" else starts).append(found[1])
        known = op.causal is not None or op.last is not None
        if len(ends) > 1 or len(starts) > 1 or (ends and known) or (starts and op.window is not None):
            return None
        end = ends[0] if ends else self._known(op)
        window = _distance(end, starts[0]) if starts else None
        if starts and window is None:
            return None
        if not ends or Limit(None, 0) in end:
            return Bound(causal=bool(ends), window=window)
        last = _best(end)
        return None if last is None else Bound(last=last, window=window)

    def _known(self, op: qc.AttentionOp) -> list[Limit]:
        if op.last is None:
            return [Limit(None, 0)]
        return list(self._levels(self._tracer.read(op.last, (dim_expr(0), dim_expr(QUERY)))))

    # --- reading ---

    def _conjuncts(self, node: Node) -> list[Node] | None:
        found = self._tracer.head(node)
        match found.op:
            case "constant":
                return [] if found.number == 1 else None
            case "arith.andi":
                left, right = self._conjuncts(found.args[0]), self._conjuncts(found.args[1])
                return None if left is None or right is None else [*left, *right]
            case "arith.select":
                kept, dropped = (self._tracer.constant(arg) for arg in found.args[1:])
                is_float_mask = kept == 0 and dropped is not None and dropped <= DROPS
                return self._conjuncts(found.args[0]) if is_float_mask else None
            case "arith.cmpi" | "read":
                return [found]
            case _:
                return None

    def _limits(self, node: Node) -> tuple[str, list[Limit]] | None:
        """("end", limits) for `j <= limit`, ("start", limits) for `j > limit`. The limits are one number, written with
        different bases."""
        if node.op == "read":
            return self._picked_row(node)
        if node.predicate not in PREDICATES:
            return None
        strict, turned = PREDICATES[node.predicate]
        low, high = reversed(node.args) if turned else node.args
        if (key := linear(low, self._tracer)) is not None and key[:2] == (0, 1):
            found = [Limit(limit.base, limit.offset - key[2] - strict, limit.source) for limit in self._levels(high)]
            return ("end", found) if found else None
        if (key := linear(high, self._tracer)) is not None and key[:2] == (0, 1):
            found = [Limit(limit.base, limit.offset - key[2] + strict - 1, limit.source) for limit in self._levels(low)]
            return ("start", found) if found else None
        return None

    def _levels(self, node: Node) -> Iterator[Limit]:
        """A number as base + offset. Yields one limit for each constant that is split off."""
        number = linear(node, self._tracer)
        if number is not None:
            if number[:2] == (1, 0):
                yield Limit(None, number[2])
            return
        offset = 0
        while True:
            source = next(((t, i) for t, i in self._tracer.aliases(node) if _is_row_of_numbers(t, i)), None)
            found = self._tracer.head(node)
            yield Limit(found, offset, source)
            if found.op in ("arith.extsi", "arith.trunci"):
                node = found.args[0]
                continue
            if found.op not in ("arith.addi", "arith.subi"):
                return
            left, right = found.args
            step = self._tracer.constant(right)
            if step is None and found.op == "arith.addi":
                step, left = self._tracer.constant(left), right
            if step is None:
                return
            offset += int(step) if found.op == "arith.addi" else -int(step)
            node = left

    def _picked_row(self, node: Node) -> tuple[str, list[Limit]] | None:
        """`lower_triangle[position, j]`: row n of the table keeps the keys up to n."""
        assert node.tensor is not None
        op = loops.producer(node.tensor)
        if not isinstance(op, qc.GatherOp) or op.mode.data != "take" or len(shape_of(op.index.type)) != 1:
            return None
        axis, index, shape = op.axis.value.data, node.index, shape_of(op.x.type)
        columns = [n for n, e in enumerate(index) if e == dim_expr(KEY)]
        row = (op.index, (index[axis],))
        others = [shape[n] for n in range(len(shape)) if n not in (axis, *columns)]
        if len(columns) != 1 or columns[0] < axis or any(s != 1 for s in others) or not _is_row_of_numbers(*row):
            return None
        values, size = self._evaluate(op.x), shape[axis]
        if values is None or values.dtype != np.bool_ or not isinstance(size, int):
            return None
        table = values.reshape(values.shape[axis], values.shape[columns[0]])
        if table.shape[0] != size or not (table == np.tri(*table.shape, dtype=np.bool_)).all():
            return None
        return "end", [Limit(self._tracer.read(*row), 0, row, wraps=size)]

    # --- making ---

    def last(self, limit: Limit, before: qc.AttentionOp) -> SSAValue:
        """The limit as a (B or 1, S or 1) tensor, inserted before `before`. Equal limits share one tensor."""
        assert limit.source is not None
        key = (*limit.source, limit.offset, limit.wraps)
        if key not in self._made:
            self._made[key] = self._make(limit, before)
        return self._made[key]

    def _make(self, limit: Limit, before: qc.AttentionOp) -> SSAValue:
        assert limit.source is not None
        tensor_, index = limit.source
        at = tuple(dim_expr(1) if e == dim_expr(QUERY) else e for e in index)
        out: tuple[Dim, ...] = (shape_of(before.q.type)[0], shape_of(before.q.type)[2])
        value = as_extra(before, tensor_, at, out)
        if not limit.offset and not limit.wraps:
            return value
        dtype = tensor_dtype(value.type)
        builder = build.with_path(InsertPoint.before(before), path_of(before))

        def body(inner: Builder, s: Sequence[SSAValue]) -> Operation:
            return _shifted(inner, s[0], limit, dtype)

        return build.pointwise(builder, [value], shape_of(value.type), dtype, body)


def _shifted(inner: Builder, number: SSAValue, limit: Limit, dtype: DType) -> Operation:
    if limit.wraps:
        zero = build.scalar(inner, 0, dtype)
        negative = inner.insert(arith.CmpiOp(number, zero, "slt")).result
        wrapped = inner.insert(arith.AddiOp(number, build.scalar(inner, limit.wraps, dtype))).result
        number = inner.insert(arith.SelectOp(negative, wrapped, number)).result
    return inner.insert(arith.AddiOp(number, build.scalar(inner, limit.offset, dtype)))


def _is_row_of_numbers(value: SSAValue, index: Index) -> bool:
    """Whether an integer tensor, read at `index`, has at most one element for each batch entry and query."""
    plain = all(e in (dim_expr(0), dim_expr(QUERY)) or isinstance(e, AffineConstantExpr) for e in index)
    return plain and can_be_extra(value, index) and tensor_dtype(value.type) in _INTEGERS


def _best(limits: list[Limit]) -> Limit | None:
    """The first limit that needs no arithmetic, else the outermost that has a tensor."""
    made = [limit for limit in limits if limit.source is not None]
    return next((limit for limit in made if not limit.offset), made[0] if made else None)


def _distance(end: list[Limit], start: list[Limit]) -> int | None:
    """The number of keys between two limits on a common base. None without a common base, or if the start is not below
    the end."""
    for a in end:
        for b in start:
            if a.base is b.base and not a.wraps and a.offset > b.offset:
                return a.offset - b.offset
    return None
