"""sort and top_k of StableHLO: `qc.sort` and `qc.topk`.

A sort of several tensors orders them by the tensors that its comparison reads, the first one first; the others follow.
"""

from __future__ import annotations

from qcompiler.frontends.jax.graph import Body, Node, Value
from qcompiler.frontends.jax.pointwise import in_order
from qcompiler.frontends.jax.scope import Result, Scope, V, lowers
from qcompiler.ir import qc, types
from qcompiler.ir.types import shape_of


@lowers("stablehlo.sort")
def _sort(s: Scope, node: Node) -> Result:
    """Stable sorts by each key, the last key first: then the first key's order wins."""
    axis, body = node.attrs["dimension"], node.regions[0]
    keys = _keys(node, body)
    descending = _direction(node, body) == "GT"
    values = [s.value(v) for v in node.operands]
    index: V | None = None
    for key in reversed(keys):
        column = in_order(s, s.value(node.operands[key]), node.operands[key])
        column = column if index is None else s.along(column, index, axis)
        order = _order(s, column, axis, descending)
        if len(keys) == len(values) == 1 and column is values[key]:
            return order[0]
        index = order[1] if index is None else s.along(index, order[1], axis)
    assert index is not None
    found = tuple(s.along(value, index, axis) for value in values)
    return found[0] if len(found) == 1 else found


def _order(s: Scope, x: V, axis: int, descending: bool) -> tuple[V, V]:
    op = qc.SortOp(x, [x.type, types.tensor(shape_of(x.type), "i64")], axis=axis, descending=descending)
    made = s.builder.insert(op)
    return made.results[0], made.results[1]


def _keys(node: Node, body: Body) -> list[int]:
    """The numbers of the operands that the comparison reads."""
    read = {value for each in body.nodes for value in each.operands}
    keys = [i for i in range(len(node.operands)) if body.arguments[2 * i] in read or body.arguments[2 * i + 1] in read]
    if not keys:
        raise node.unsupported("an order by a function that reads no element")
    return keys


def _direction(node: Node, body: Body) -> str:
    """LT or GT of the comparisons that order; all keys must have the same one."""
    found = {
        each.attrs["comparison_direction"]
        for each in body.nodes
        if each.op == "stablehlo.compare" and _from_arguments(each, body) and _orders(each)
    }
    if len(found) != 1:
        raise node.unsupported("a comparison that is not simply ascending or descending")
    return str(found.pop())


def _orders(node: Node) -> bool:
    return node.attrs["comparison_direction"] in ("LT", "GT")


def _from_arguments(node: Node, body: Body) -> bool:
    """Whether the comparison is of two elements, each perhaps with NaN and -0 made equal by selects."""
    return all(_argument(value, body) is not None for value in node.operands)


def _argument(value: Value, body: Body) -> Value | None:
    while value not in body.arguments:
        if value.owner is None or value.owner.op != "stablehlo.select":
            return None
        value = value.owner.operands[2]
    return value


@lowers("chlo.top_k")
def _top_k(s: Scope, node: Node) -> Result:
    """The k largest of the last axis, best first, ties by the lower index.

    0.0 and -0.0 are a tie here; XLA's total order puts 0.0 before -0.0.
    """
    value, k = node.operands[0], int(node.attrs["composite_attributes"]["k"])
    x, axis = in_order(s, s.value(value), value), value.rank - 1
    if k == 0:
        raise node.unsupported("the k largest for k = 0")
    out = (*value.shape[:-1], k)
    op = qc.TopkOp(x, [types.tensor(out, value.dtype), types.tensor(out, "i64")], k=k, axis=axis)
    made = s.builder.insert(op)
    return in_order(s, made.results[0], value), s.cast(made.results[1], node.results[1].dtype)
