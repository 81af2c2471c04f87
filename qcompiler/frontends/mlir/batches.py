"""Products of a batch with one matrix that a text repeats for each entry: the matrix is a weight of all rows.

    %w = broadcast(w (64, 96)) : (b, 64, 96)        dot_general(x (b, t, 64), w (64, 96))
    dot_general(%x (b, t, 64), %w), batch b

torch-mlir writes a linear on a tensor of three dimensions so. Without the batch it is a linear, and quantised.
"""

from __future__ import annotations

from qcompiler.frontends.jax.graph import Graph, Node, Value

_BROADCASTS = ("stablehlo.broadcast_in_dim", "stablehlo.dynamic_broadcast_in_dim")
_SAME = ("stablehlo.reshape", "stablehlo.dynamic_reshape")


def share_matrices(graph: Graph) -> None:
    """Rewrites such products in place."""
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.op == "stablehlo.dot":  # what it was before dot_general
            node.op, node.attrs["dot_dimension_numbers"] = "stablehlo.dot_general", {
                "lhs_batching_dimensions": [], "rhs_batching_dimensions": [],
                "lhs_contracting_dimensions": [node.operands[0].rank - 1], "rhs_contracting_dimensions": [0],
            }  # fmt: skip
        if node.op == "stablehlo.dot_general":
            nodes += _shared(node)
        nodes.append(node)
    graph.nodes[:] = nodes


def _shared(node: Node) -> list[Node]:
    """Makes a product share its matrix; returns the nodes to insert before it."""
    numbers, (x, w) = node.attrs["dot_dimension_numbers"], node.operands
    batch = list(numbers["rhs_batching_dimensions"])
    if not batch or list(numbers["lhs_batching_dimensions"]) != list(range(len(batch))) or batch != sorted(batch):
        return []
    source = _repeated(w, batch)
    if source is None:
        return []
    rest = [axis for axis in range(w.rank) if axis not in batch]
    made: list[Node] = []
    if source.rank == w.rank:
        shaped = Node("stablehlo.reshape", [source], {}, line=node.line, source=node.source)
        shape = tuple(w.shape[axis] for axis in rest)
        shaped.results = [Value(shape, w.type, owner=shaped, name=f"{w.name}.shared")]
        made, source = [shaped], shaped.result
    node.operands = [x, source]
    node.attrs["dot_dimension_numbers"] = {
        "lhs_batching_dimensions": [], "rhs_batching_dimensions": [],
        "lhs_contracting_dimensions": list(numbers["lhs_contracting_dimensions"]),
        "rhs_contracting_dimensions": [rest.index(axis) for axis in numbers["rhs_contracting_dimensions"]],
    }  # fmt: skip
    return made


def _repeated(w: Value, batch: list[int]) -> Value | None:
    """What is repeated along these axes and is the tensor otherwise: of its rank with ones, or without the axes."""
    owner = w.owner
    while owner is not None and owner.op in (*_SAME, *_BROADCASTS) and owner.operands[0].shape == w.shape:
        owner = owner.operands[0].owner
    if owner is None or owner.op not in _BROADCASTS:
        return None
    source, axes = owner.operands[0], list(owner.attrs["broadcast_dimensions"])
    rest = [axis for axis in range(w.rank) if axis not in batch]
    if axes == rest and source.shape == tuple(w.shape[axis] for axis in rest):
        return source
    wanted = tuple(1 if axis in batch else size for axis, size in enumerate(w.shape))
    return source if axes == list(range(w.rank)) and source.shape == wanted else None
