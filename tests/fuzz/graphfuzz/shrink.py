"""The smallest graph that still fails in the same way: delta debugging over outputs, statements and leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from graphfuzz.batch import Checks, Failure, Sizes, check
from graphfuzz.graphs import Graph, Leaf, Statement, Type, rename
from graphfuzz.sizes import RANGES

STAGES = ("export", "import", "passes", "schedule", "native", "stepwise", "file", "mlir", "sim")


def shrink(
    graph: Graph, failure: Failure, sizes: Sequence[Sizes], checks: Checks, attempts: int = 80
) -> tuple[Graph, Failure, int]:
    """The smaller graph, how it fails, and how many candidates were run. At most `attempts` of them."""
    checks = _needed(checks, failure)
    spent = 0

    def fails(candidate: Graph) -> Failure | None:
        nonlocal spent
        spent += 1
        try:
            report = check([candidate], sizes, checks)
        except Exception:  # a candidate that is no graph at all
            return None
        return next((f for f in report.failures if f.kind == failure.kind), None)

    improved = True
    while improved and spent < attempts:
        improved = False
        for candidate in _smaller(graph):
            if spent >= attempts:
                break
            found = fails(candidate)
            if found is not None:
                graph, failure, improved = candidate, found, True
                break
    return graph, failure, spent


def _needed(checks: Checks, failure: Failure) -> Checks:
    """Only the checks up to the component that fails."""
    stage = STAGES.index(failure.component) if failure.component in STAGES else len(STAGES)
    return replace(
        checks,
        native=checks.native and failure.component not in STAGES[:4] and failure.component not in ("mlir", "sim"),
        schedule=failure.component == "schedule",
        stepwise=failure.component == "stepwise",
        file=failure.component == "file",
        mlir=failure.component == "mlir",
        sim=failure.component == "sim",
        verify_each=checks.verify_each and stage == STAGES.index("passes"),
    )


def _smaller(graph: Graph) -> Iterator[Graph]:
    """Candidates, the boldest first."""
    makers: tuple[Callable[[Graph], Iterator[Graph]], ...] = (_fewer_outputs, _cut, _bypassed, _plainer)
    for maker in makers:
        for candidate in maker(graph):
            cleaned = candidate.without_dead_code()
            if cleaned != graph and cleaned.outputs:
                yield cleaned


def _fewer_outputs(graph: Graph) -> Iterator[Graph]:
    states = [s for s in graph.statements if not s.names]
    if states:
        rest = tuple(s for s in graph.statements if s.names)
        yield replace(graph, statements=rest)
    if len(graph.outputs) > 1:
        half = len(graph.outputs) // 2
        for part in (graph.outputs[:half], graph.outputs[half:]):
            yield replace(graph, outputs=part)
        for name in graph.outputs:
            yield replace(graph, outputs=tuple(o for o in graph.outputs if o != name))
    made = [name for statement in graph.statements for name in statement.names]
    if len(graph.outputs) == 1:
        for name in made:  # an earlier value shows it, too
            if name != graph.outputs[0]:
                yield replace(graph, outputs=(name,))


def _cut(graph: Graph) -> Iterator[Graph]:
    """A statement's result becomes an input, from the end on: all that was before it goes."""
    for statement in reversed(graph.statements):
        for name, type_ in zip(statement.names, statement.types, strict=True):
            leaf = _leaf(graph, type_)
            if leaf is None or name in graph.outputs:
                continue
            kept = tuple(s for s in graph.statements if s is not statement or len(s.names) > 1)
            yield _substituted(replace(graph, leaves=(*graph.leaves, leaf), statements=kept), name, leaf.name)


def _bypassed(graph: Graph) -> Iterator[Graph]:
    """A statement's result is replaced by an operand of the same type."""
    types = graph.types()
    for statement in reversed(graph.statements):
        for name in statement.names:
            for operand in statement.operands:
                if types.get(operand) == types[name]:
                    kept = tuple(s for s in graph.statements if s is not statement)
                    if len(statement.names) == 1:
                        yield _substituted(replace(graph, statements=kept), name, operand)


def _plainer(graph: Graph) -> Iterator[Graph]:
    """Parameters as inputs, plain values, no packed weights."""
    if graph.quant:
        yield replace(graph, quant=())
    for i, leaf in enumerate(graph.leaves):
        if leaf.fill in ("special", "grid", "unit", "positive", "scaled"):
            leaves = list(graph.leaves)
            leaves[i] = replace(leaf, fill="normal")
            yield replace(graph, leaves=tuple(leaves))


def _leaf(graph: Graph, type_: Type) -> Leaf | None:
    if not all(size.is_static or str(size) in RANGES for size in type_.shape):
        return None
    fill = "normal" if type_.is_float else "flag" if type_.dtype == "bool" else "integer"
    taken = {leaf.name for leaf in graph.leaves}
    name = next(f"x{i}" for i in range(1000, 2000) if f"x{i}" not in taken)
    return Leaf(name, type_, fill, len(taken))


def _substituted(graph: Graph, old: str, new: str) -> Graph:
    """`new` wherever `old` was read."""
    statements: list[Statement] = []
    for statement in graph.statements:
        if old in statement.operands:
            operands = tuple(dict.fromkeys(new if o == old else o for o in statement.operands))
            statement = replace(statement, text=rename(statement.text, {old: new}), operands=operands)  # noqa: PLW2901
        statements.append(statement)
    outputs = tuple(dict.fromkeys(new if o == old else o for o in graph.outputs))
    made = {name for statement in statements for name in statement.names}
    return replace(graph, statements=tuple(statements), outputs=tuple(o for o in outputs if o in made))
