"""Reads a StableHLO module into a `Graph`: calls inlined, loops with a fixed number of trips unrolled.

    func.call @f(%x)                          the ops of @f
    stablehlo.while, trips known              its body once for each trip; the counter is a number in each
    stablehlo.case, index known               the ops of that branch
    stablehlo.case, index unknown             the ops of all branches, and a select for each result
    stablehlo.select, one condition, known    the operand that it chooses
    stablehlo.composite "chlo.erf"            one node if the table has it, else the ops of its decomposition

A scan over stacked layers is such a loop: after unrolling each layer reads a slice of the stacked weights at a fixed
index, and the slice is a weight of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from qcompiler.errors import ExportError, UnsupportedOperatorError
from qcompiler.frontends.jax.attributes import attributes_of, element_name, static_shape
from qcompiler.frontends.jax.fold import MAX_TRIPS, entries_of, fold, scalar_of
from qcompiler.frontends.jax.graph import NUMPY, Body, Graph, Node, Value, user_line
from qcompiler.frontends.jax.shapes import infer
from qcompiler.plan.dims import dim

MAX_NODES = 100_000
"""Functions with more operators, after unrolling, are refused: nested loops multiply their trips."""

Values = dict[Any, Value]
IDENTITIES = {"stablehlo.optimization_barrier", "sdy.sharding_constraint"}
MARKS = {"Sharding", "annotate_device_placement", "SPMDFullToShardShape", "SPMDShardToFullShape", "LayoutConstraint"}
"""Custom calls that only annotate their operand."""


def functions_of(module: Any) -> dict[str, Any]:
    """The functions of a module by name; beside them it may have meshes of devices."""
    return {op.name.value: op for op in module.body.operations if op.operation.name == "func.func"}


class Reader:
    """Reads the function `@main` of a module. `composites` are the names that have a lowering of their own."""

    terminators: tuple[str, ...] = ("func.return", "stablehlo.return")

    def __init__(self, module: Any, graph: Graph, composites: Collection[str]) -> None:
        self.functions = functions_of(module)
        self.graph, self.composites = graph, composites
        self.count = 0
        self.callers: list[tuple[str, str]] = []

    def place(self, op: Any) -> tuple[str, str]:
        """The user's line of an op; in a function of JAX's that was traced once, the line that calls it."""
        own = user_line(str(op.location))
        return own if own[0] or not self.callers else self.callers[-1]

    def run(self, arguments: Sequence[Value]) -> None:
        """Fills the graph, with the values of the arguments of @main."""
        self.graph.returned = self._call(self.functions["main"], list(arguments))

    def _call(self, function: Any, arguments: list[Value]) -> list[Value]:
        block = function.regions[0].blocks[0]
        return self._block(block, dict(zip(block.arguments, arguments, strict=True)))

    def _block(self, block: Any, values: Values) -> list[Value]:
        """Reads the ops of a block; returns the operands of its terminator."""
        for each in block.operations:
            op = each.operation
            operands = [values[v] for v in op.operands]
            if op.name in self.terminators:
                return operands
            results = self._read(op, operands, values)
            values.update(zip(op.results, results, strict=True))
        raise ExportError("a block of the exported module has no terminator")

    def _read(self, op: Any, operands: list[Value], values: Values) -> list[Value]:
        rule = _RULES.get(op.name)
        if rule is not None:
            return rule(self, op, operands, values)
        if op.name in IDENTITIES:
            return operands
        return self.node(op, operands, values)

    # --- nodes ---

    def node(self, op: Any, operands: list[Value], values: Values, name: str | None = None) -> list[Value]:
        """One node, with folded results."""
        node = self._made(op, operands, values, name)
        node.results = [
            Value(infer(node, i, static_shape(r.type)), element_name(r.type), owner=node, name=self._fresh())
            for i, r in enumerate(op.results)
        ]
        if node.op == "stablehlo.constant":
            node.result.known, node.result.owner = node.attrs["value"], None
            return node.results
        node = _with_fixed_starts(node)
        known = fold(node, self.graph.ranges)
        if known is not None:
            node.result.known = known
        self.graph.nodes.append(node)
        self._limited(op)
        return node.results

    def _limited(self, op: Any) -> None:
        """Counts what was read, also conditions that the graph does not keep."""
        if self.count > MAX_NODES:
            raise UnsupportedOperatorError(
                f"the function has more than {MAX_NODES} operators after unrolling its loops{self.where(op)}: the "
                "trips of nested loops multiply. Write the inner loop as operations on arrays, or compile the body of "
                "the outer loop and call the program once for each trip"
            )

    def _made(self, op: Any, operands: list[Value], values: Values, name: str | None) -> Node:
        if op.name == "stablehlo.constant" and element_name(op.results[0].type) not in NUMPY:
            raise UnsupportedOperatorError(
                f"a constant of the element type {element_name(op.results[0].type)}{self.where(_reader_of(op))}, which "
                "programs cannot hold: convert it to float32 or int32 outside of the function"
            )
        line, source = self.place(op)
        regions = [] if op.name in ("stablehlo.while", "stablehlo.case", "stablehlo.if") else list(op.regions)
        bodies = [self._body(region.blocks[0], values) for region in regions]
        return Node(name or op.name, operands, attributes_of(op), regions=bodies, line=line, source=source)

    def _body(self, block: Any, values: Values) -> Body:
        """A region as a list of scalar nodes; it may read constants from outside."""
        inner = copy.copy(self)
        inner.count, inner.graph = 0, Graph(ranges=self.graph.ranges)
        arguments = [Value((), element_name(a.type), name=f"arg{i}") for i, a in enumerate(block.arguments)]
        returned = inner._block(block, {**values, **dict(zip(block.arguments, arguments, strict=True))})
        return Body(arguments, inner.graph.nodes, returned)

    def _fresh(self) -> str:
        self.count += 1
        return str(self.count)

    def where(self, op: Any) -> str:
        """` (model.py:3: …)` for messages."""
        source = self.place(op)[1]
        return f" ({source})" if source else ""


def _reader_of(constant: Any) -> Any:
    """The first op that reads a constant, which has the user's line; that of a constant is the function's."""
    return next((use.owner for use in constant.results[0].uses), constant)


def _with_fixed_starts(node: Node) -> Node:
    """A dynamic_slice at known places as a slice."""
    if node.op == "stablehlo.dynamic_slice":
        starts = [scalar_of(v) for v in node.operands[1:]]
        sizes, shape = node.attrs["slice_sizes"], node.operands[0].shape
        if all(isinstance(s, int) for s in starts) and all(isinstance(s, int) for s in shape):
            begin = [min(max(int(s), 0), int(n) - size) for s, n, size in zip(starts, shape, sizes, strict=True)]  # type: ignore[arg-type]
            node.op, node.operands = "stablehlo.slice", node.operands[:1]
            stops = [b + size for b, size in zip(begin, sizes, strict=True)]
            node.attrs = {"start_indices": begin, "limit_indices": stops, "strides": [1] * len(begin)}
    return node


# --- ops that are not nodes ------------------------------------------------------------------------------------------

Rule = Callable[[Reader, Any, list[Value], Values], list[Value]]


def _call(reader: Reader, op: Any, operands: list[Value], values: Values) -> list[Value]:
    del values
    reader.callers.append(reader.place(op))
    try:
        return reader._call(reader.functions[op.attributes["callee"].value], operands)
    finally:
        reader.callers.pop()


def _composite(reader: Reader, op: Any, operands: list[Value], values: Values) -> list[Value]:
    name = op.attributes["name"].value
    if name in reader.composites:
        return reader.node(op, operands, values, name)
    return reader._call(reader.functions[op.attributes["decomposition"].value], operands)


def calls_back(name: str, where: str) -> UnsupportedOperatorError:
    """The error for a call into Python; `where` is its place, in brackets."""
    return UnsupportedOperatorError(
        f"the function calls back into Python ({name}){where}: a side effect or a pure_callback, which a program "
        "without Python cannot run. Take jax.debug.print, io_callback and pure_callback out of the function, or "
        "compute their values outside and pass them in"
    )


def custom_call(target: str, where: str) -> UnsupportedOperatorError:
    """The error for a call into a library; `where` is its place, in brackets."""
    return UnsupportedOperatorError(
        f"the custom call '{target}' has no lowering{where}: it runs a library of jaxlib's or one of your own. Compute "
        "this part outside of the compiled function and pass the result in"
    )


def _custom_call(reader: Reader, op: Any, operands: list[Value], values: Values) -> list[Value]:
    target = op.attributes["call_target_name"].value
    if target == "stablehlo.dynamic_reduce_window" and len(operands) == 7:
        return _dynamic_windows(reader, op, operands, values)
    if target == "shape_assertion":
        return []
    if target in MARKS:
        return operands
    if "callback" in target:
        raise calls_back(target, reader.where(op))
    raise custom_call(target, reader.where(op))


def _dynamic_windows(reader: Reader, op: Any, operands: list[Value], values: Values) -> list[Value]:
    """`reduce_window` with numbers as operands, as JAX writes running folds of a symbolic size."""
    line, source = reader.place(op)
    node = Node("stablehlo.reduce_window", operands[:2], {}, line=line, source=source)
    numbers = [entries_of(value) or [] for value in operands[2:]]
    steps, rank = [n for each in numbers[1:4] for n in each], operands[0].rank
    whole = all(isinstance(n, int) for n in steps) and all(n >= 1 for n in (*steps, *numbers[0]) if isinstance(n, int))
    if [len(each) for each in numbers] != [rank] * 4 + [2 * rank] or not whole:
        raise node.unsupported("windows whose sizes or steps depend on values")
    names = ("window_dimensions", "window_strides", "base_dilations", "window_dilations", "padding")
    node.attrs = dict(zip(names, numbers, strict=True))
    pairs = iter(node.attrs["padding"])
    node.attrs["padding"] = [list(pair) for pair in zip(pairs, pairs, strict=True)]
    named = list(op.attributes["called_computations"]) if "called_computations" in op.attributes else []
    called = [reader.functions[each.value] for each in named if each.value in reader.functions]
    if len(called) != 1:
        raise node.unsupported("windows without the function that they fold by")
    node.regions = [reader._body(called[0].regions[0].blocks[0], values)]
    declared = op.results[0].type
    node.results = [
        Value(infer(node, 0, static_shape(declared)), element_name(declared), owner=node, name=reader._fresh())
    ]
    reader.graph.nodes.append(node)
    return node.results


def _dimension_size(reader: Reader, op: Any, operands: list[Value], values: Values) -> list[Value]:
    del values
    size = operands[0].shape[op.attributes["dimension"].value]
    entry = dim(size).to_dim()
    if isinstance(entry, int):
        return [Value((), "i32", np.array(entry, np.int32))]
    boxed = np.empty((), dtype=object)
    boxed[()] = dim(size)
    return [Value((), "i32", boxed, name=reader._fresh())]


def _while(reader: Reader, op: Any, operands: list[Value], values: Values) -> list[Value]:
    """Reads the condition before each trip; it must be a known truth value each time."""
    condition, body = (region.blocks[0] for region in op.regions)
    carried = operands
    for _ in range(MAX_TRIPS + 1):
        mark = len(reader.graph.nodes)
        outcome = reader._block(condition, {**values, **dict(zip(condition.arguments, carried, strict=True))})
        del reader.graph.nodes[mark:]  # nothing else reads what a condition computes
        if outcome[0].known is None:
            raise UnsupportedOperatorError(
                f"a loop whose number of trips depends on values or on a symbolic size{reader.where(op)}: a program's "
                "loops have a fixed number of trips. Use lax.scan or lax.fori_loop with bounds that are Python numbers"
            )
        if not bool(outcome[0].known):
            return carried
        carried = reader._block(body, {**values, **dict(zip(body.arguments, carried, strict=True))})
    raise UnsupportedOperatorError(
        f"a loop of more than {MAX_TRIPS} trips{reader.where(op)}: loops are unrolled, and each trip would become "
        "code. Write it as one operation on an array, or call the program once for each block of trips"
    )


def _case(reader: Reader, op: Any, operands: list[Value], values: Values) -> list[Value]:
    branches = [region.blocks[0] for region in op.regions]
    if op.name == "stablehlo.if":
        branches = branches[::-1]  # the true branch is the first region
    index = scalar_of(operands[0])
    if isinstance(index, int):
        chosen = index if 0 <= index < len(branches) else len(branches) - 1
        return reader._block(branches[chosen], dict(values))
    outcomes = [reader._block(branch, dict(values)) for branch in branches]
    found = outcomes[-1]
    for number in range(len(branches) - 2, -1, -1):
        found = [_chosen(reader, op, operands[0], number, a, b) for a, b in zip(outcomes[number], found, strict=True)]
    return found


def _select(reader: Reader, op: Any, operands: list[Value], values: Values) -> list[Value]:
    """`jnp.var` chooses between the variance and NaN by the number of elements.

    A condition for each element stays, also where all of them are known: masks of attention are read from selects.
    """
    known = operands[0].known
    if known is not None and known.shape == () and known.dtype == np.bool_:
        return [operands[1 if known else 2]]
    return reader.node(op, operands, values)


def _chosen(reader: Reader, op: Any, index: Value, number: int, yes: Value, no: Value) -> Value:
    """`yes` where the index is `number`, else `no`."""
    if yes is no:
        return yes
    line, source = reader.place(op)
    node = Node("qc.choose", [index, yes, no], {"number": number}, line=line, source=source)
    node.results = [Value(yes.shape, yes.type, owner=node, name=reader._fresh())]
    reader.graph.nodes.append(node)
    return node.result


_RULES: Mapping[str, Rule] = {
    "func.call": _call,
    "stablehlo.composite": _composite,
    "stablehlo.custom_call": _custom_call,
    "stablehlo.get_dimension_size": _dimension_size,
    "stablehlo.while": _while,
    "stablehlo.case": _case,
    "stablehlo.if": _case,
    "stablehlo.select": _select,
}
