"""Proves from a mask's expression which keys it keeps, at any size. The result is a set of constraints: (query i, key
j) is kept if every `a*i + b*j + c <= 0` holds.

    cmpi sle, j, i                      [(-1, 1, 0)]          causal
    select (j <= i and true), 0, -inf   [(-1, 1, 0)]          causal
    cmpi sgt, j, i - 8 and j <= i       [(1, -1, -7), …]      neither
"""

from __future__ import annotations

from xdsl.ir import SSAValue
from xdsl.ir.affine import AffineBinaryOpExpr, AffineBinaryOpKind, AffineConstantExpr, AffineDimExpr, AffineExpr

from qcompiler.passes.views.trace import Node, Tracer

Linear = tuple[int, int, int]
"""a*i + b*j + c"""

CAUSAL: Linear = (-1, 1, 0)
QUERY, KEY = 2, 3  # dims of a (B, H, S, T) mask
PREDICATES = {2: (1, False), 3: (0, False), 4: (1, True), 5: (0, True)}
"""arith.cmpi's numbers for slt, sle, sgt, sge: (1 if strict else 0, whether the operands are swapped)."""
DROPS = -1e30  # a score plus this has weight 0 after softmax


def constraints(mask: SSAValue, tracer: Tracer) -> set[Linear] | None:
    """The constraints that kept pairs satisfy, without those that every pair satisfies. None if the expression is not
    recognised."""
    found = _of(tracer.element(mask), tracer)
    return None if found is None else {c for c in found if not _always(c)}


def _always(c: Linear) -> bool:
    """Whether every pair satisfies the constraint, since indices are not negative."""
    return c[0] <= 0 and c[1] <= 0 and c[2] <= 0


def _of(node: Node, tracer: Tracer) -> set[Linear] | None:
    found = tracer.head(node)
    match found.op:
        case "constant":
            return set() if found.number == 1 else None
        case "arith.andi":
            left, right = _of(found.args[0], tracer), _of(found.args[1], tracer)
            return None if left is None or right is None else left | right
        case "arith.select":
            kept, dropped = tracer.constant(found.args[1]), tracer.constant(found.args[2])
            is_float_mask = kept == 0 and dropped is not None and dropped <= DROPS
            return _of(found.args[0], tracer) if is_float_mask else None
        case "arith.cmpi":
            return _comparison(found, tracer)
        case _:
            return None


def _comparison(node: Node, tracer: Tracer) -> set[Linear] | None:
    left, right = linear(node.args[0], tracer), linear(node.args[1], tracer)
    if left is None or right is None:
        return None
    if node.predicate not in PREDICATES:
        return None
    strict, turned = PREDICATES[node.predicate]
    if turned:
        left, right = right, left
    a, b, c = (x - y for x, y in zip(left, right, strict=True))
    return {(a, b, c + strict)}


def linear(node: Node, tracer: Tracer) -> Linear | None:
    """A number as a*i + b*j + c; None if it has any other term."""
    found = tracer.head(node)
    match found.op:
        case "constant":
            return 0, 0, int(found.number)
        case "index":
            return _affine(found.index[0])
        case "arith.index_cast":
            return linear(found.args[0], tracer)
        case "arith.addi" | "arith.subi":
            left, right = linear(found.args[0], tracer), linear(found.args[1], tracer)
            sign = 1 if found.op == "arith.addi" else -1
            return _sum(left, right, sign)
        case _:
            return None


def _sum(left: Linear | None, right: Linear | None, sign: int = 1) -> Linear | None:
    if left is None or right is None:
        return None
    return left[0] + sign * right[0], left[1] + sign * right[1], left[2] + sign * right[2]


def _affine(expr: AffineExpr) -> Linear | None:
    if isinstance(expr, AffineConstantExpr):
        return 0, 0, expr.value
    if isinstance(expr, AffineDimExpr):
        return {QUERY: (1, 0, 0), KEY: (0, 1, 0)}.get(expr.position)
    if isinstance(expr, AffineBinaryOpExpr) and expr.kind is AffineBinaryOpKind.Add:
        return _sum(_affine(expr.lhs), _affine(expr.rhs))
    return None
