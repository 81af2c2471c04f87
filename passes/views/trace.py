"""Finds what one element of a tensor is computed from, across loop nests and views.

A `Node` is one scalar operation at an index. A `read` node is an element of a tensor and is opened only on demand, so
the cost of a match depends on the depth of the pattern only. Equal elements are the same node.

    layer norm's element:  addf(mulf(mulf(subf(x, mean), rsqrt(addf(var, eps))), w), b)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from xdsl.dialects import arith
from xdsl.dialects.builtin import FloatAttr, IntegerAttr, TensorType
from xdsl.dialects.linalg import ops
from xdsl.ir import Attribute, BlockArgument, Operation, SSAValue
from xdsl.ir.affine import AffineExpr

from qcompiler.ir import qc
from qcompiler.ir.context import QCContext
from qcompiler.ir.types import shape_of
from qcompiler.passes.loops import loops
from qcompiler.passes.loops.loops import Index, dim_expr
from qcompiler.passes.views import views
from qcompiler.plan.dims import Dim

_CASTS = ("arith.extf", "arith.truncf")
_REDUCTIONS = {
    "arith.addf": "sum",
    "arith.maximumf": "max",
    "arith.maxnumf": "max",
}


@dataclass(eq=False)
class Node:
    """`op` is an MLIR name, or "read", "constant", "index", "sum", "max", "argument" (of a region inside a nest).

    read: `tensor` at `index`. constant: `number`. index: `index[0]`. sum and max: `args[0]` over the new loop dim
    `axis` of size `extent`. arith.cmpi: MLIR's number of the `predicate`.
    """

    op: str
    args: tuple[Node, ...] = ()
    tensor: SSAValue | None = None
    index: Index = ()
    number: float = 0.0
    axis: int = -1
    extent: Dim = 0
    predicate: int = -1


class Tracer:
    """Makes the nodes of one function. Tensors must have a rank below `FIRST_AXIS`.

    Indices of nodes are canonical: a dim of size 1 is read at 0, however a nest or a view writes it. So one pattern
    also matches at batch 1 and at one token. Matchers compare with `loops.own_index` and `loops.order_of`.
    """

    FIRST_AXIS = 64  # reduction dims count from here, above any tensor's rank

    def __init__(self, context: QCContext) -> None:
        self._context = context
        self._reads: dict[tuple[SSAValue, Index], Node] = {}
        self._opened: dict[Node, Node] = {}
        self._scalars: dict[tuple[SSAValue, Index], Node] = {}
        self._axes: dict[tuple[Operation, Index], int] = {}
        self._varies: dict[Node, frozenset[int]] = {}

    def element(self, value: SSAValue) -> Node:
        """The element of a tensor at its own indices d0, d1, …"""
        return self.read(value, loops.own_index(shape_of(value.type)))

    def read(self, value: SSAValue, index: Index) -> Node:
        if isinstance(value.type, TensorType):
            index = loops.without_units(index, shape_of(value.type))
        key = (value, index)
        if key not in self._reads:
            self._reads[key] = Node("read", tensor=value, index=index)
        return self._reads[key]

    def open(self, node: Node) -> Node:
        """Replaces a read by what computes the element, one step through a view, a nest or a constant. Other nodes and
        leaves are returned as they are."""
        if node.op != "read":
            return node
        if node not in self._opened:
            self._opened[node] = self._open(node)
        return self._opened[node]

    def head(self, node: Node) -> Node:
        """The operator behind any number of views, nests and float casts, or a read that cannot be opened."""
        while True:
            if node.op in _CASTS:
                node = node.args[0]
                continue
            inner = self.open(node)
            if inner is node:
                return node
            node = inner

    def aliases(self, node: Node) -> Iterator[tuple[SSAValue, Index]]:
        """The tensors that hold this same element, up to float casts, outermost first."""
        while True:
            if node.op in _CASTS:
                node = node.args[0]
                continue
            if node.op != "read":
                return
            assert node.tensor is not None
            yield node.tensor, node.index
            inner = self.open(node)
            if inner is node:
                return
            node = inner

    def constant(self, node: Node) -> float | None:
        """The number if the element is a known constant, else None."""
        found = self.head(node)
        if found.op == "math.sqrt":  # 1 / sqrt(depth), computed on tensors
            return self._root(found.args[0])
        return found.number if found.op == "constant" else None

    def _root(self, node: Node) -> float | None:
        """sqrt of a number, or of a product of two."""
        inner = self.head(node)
        numbers = [self.head(arg) for arg in inner.args] if inner.op == "arith.mulf" else [inner]
        if any(each.op != "constant" or each.number < 0 for each in numbers):
            return None
        return math.sqrt(math.prod(each.number for each in numbers))

    def operands(self, node: Node, op: str) -> tuple[Node, Node] | None:
        """The two operands of the binary operator behind `node`, if it is `op`."""
        found = self.head(node)
        return (found.args[0], found.args[1]) if found.op == op else None

    def either(self, node: Node, op: str) -> Iterator[tuple[Node, Node]]:
        """The operands of a commutative operator behind `node`, in both orders."""
        pair = self.operands(node, op)
        if pair is not None:
            yield pair
            yield pair[1], pair[0]

    def varies(self, node: Node) -> frozenset[int]:
        """The dims of the index on which the element depends."""
        if node not in self._varies:
            inner = self.open(node)
            found = {position for e in inner.index for position in e.used_dims()}
            if inner is not node:
                found = set(self.varies(inner))
            found = found.union(*(self.varies(arg) for arg in node.args))
            self._varies[node] = frozenset(n for n in found if n != node.axis)  # what a reduction runs over is bound
        return self._varies[node]

    # --- opening ---

    def _open(self, node: Node) -> Node:
        assert node.tensor is not None
        seen = views.look_through(node.tensor, node.index)
        if seen is not None:
            return self.read(*seen)
        op = loops.producer(node.tensor)
        if isinstance(op, ops.FillOp):
            return self._scalar_constant(loops.constant_of(op.inputs[0])) or node
        if isinstance(op, qc.ConstOp):
            return self._stored_constant(op) or node
        if isinstance(op, ops.GenericOp):
            if loops.is_pointwise(op):
                inverse = loops.inverse_permutation(loops.output_index(op))
                assert inverse is not None
                return self._body(op, loops.yielded(op), loops.compose(inverse, node.index))
            return self._reduction(op, node) or node
        return node

    def _scalar_constant(self, value: Attribute | None) -> Node | None:
        if isinstance(value, FloatAttr):
            return Node("constant", number=value.value.data)
        if isinstance(value, IntegerAttr):
            return Node("constant", number=float(value.value.data))
        return None

    def _stored_constant(self, op: qc.ConstOp) -> Node | None:
        """A stored scalar as a constant (a scale from the model, for example)."""
        if op.key not in self._context.weights:
            return None
        stored = self._context.weights[op.key]
        if not stored.valued or stored.format is not None or any(size != 1 for size in stored.shape):
            return None
        return Node("constant", number=float(stored.array().reshape(())))

    def _body(self, op: ops.GenericOp, value: SSAValue, at: Index) -> Node:
        """A scalar of a nest's body, with the loop dims at `at`."""
        key = (value, at)
        if key not in self._scalars:
            self._scalars[key] = self._body_node(op, value, at)
        return self._scalars[key]

    def _body_node(self, op: ops.GenericOp, value: SSAValue, at: Index) -> Node:
        if isinstance(value, BlockArgument):
            if value.block is not op.body.block:  # a value of another region is unknown
                return Node("argument")
            index = op.indexing_maps.data[value.index].data.results  # an output's argument is what it held before
            return self.read(op.operands[value.index], loops.compose(index, at))
        inner = loops.producer(value)
        assert inner is not None
        if isinstance(inner, arith.ConstantOp):
            return self._scalar_constant(inner.value) or Node(inner.name)
        if isinstance(inner, ops.IndexOp):
            return Node("index", index=(at[inner.dim.value.data],))
        predicate = inner.predicate.value.data if isinstance(inner, arith.CmpiOp) else -1
        return Node(inner.name, tuple(self._body(op, v, at) for v in inner.operands), predicate=predicate)

    def _reduction(self, op: ops.GenericOp, node: Node) -> Node | None:
        """The `sum` or `max` over one loop dim, if it starts from the neutral element."""
        reducing = [n for n, it in enumerate(op.iterator_types.data) if it != loops.PARALLEL]
        combine = loops.producer(loops.yielded(op))
        if len(reducing) != 1 or len(op.res) != 1 or combine is None or combine.name not in _REDUCTIONS:
            return None
        accumulator = op.body.block.args[-1]
        terms = [v for v in combine.operands if v is not accumulator]
        start = loops.producer(op.outputs[0])
        if len(terms) != 1 or not isinstance(start, ops.FillOp):
            return None
        kind = _REDUCTIONS[combine.name]
        first = self._scalar_constant(loops.constant_of(start.inputs[0]))
        if first is None or first.number != (0.0 if kind == "sum" else float("-inf")):
            return None
        key = (op, node.index)
        axis = self._axes.setdefault(key, self.FIRST_AXIS + len(self._axes))
        at: list[AffineExpr] = [dim_expr(axis)] * loops.num_loops(op)
        for expr, outer in zip(loops.output_index(op), node.index, strict=True):
            (position,) = expr.used_dims()
            at[position] = outer
        element = self._body(op, terms[0], tuple(at))
        return Node(kind, (element,), axis=axis, extent=loops.loop_extents(op)[reducing[0]])
