"""Element offsets as C++ text, and one thread per element of an index space."""

from __future__ import annotations

from collections.abc import Sequence

from qcompiler.kernels.cuda.geometry import Geometry
from qcompiler.kernels.text import c_dim
from qcompiler.plan.dims import Dim, Expr, dim, product
from qcompiler.plan.kernel import Operand

THREADS = 256


def offset(operand: Operand, indices: Sequence[str]) -> str:
    """Element offset of an operand at the given index texts (int64_t expressions), one per dim."""
    terms = [
        index if stride == 1 else f"{index} * {c_dim(stride)}"
        for index, stride in zip(indices, operand.strides, strict=True)
        if stride != 0
    ]
    return " + ".join(terms) or "0"


def unravel(index: str, names: Sequence[str], sizes: Sequence[Dim]) -> list[str]:
    """Statements that split the linear `index` into `names`, the last one fastest."""
    lines, rest = [], index
    for name, size in reversed(list(zip(names[1:], sizes[1:], strict=True))):
        lines.append(f"const int64_t {name} = {rest} % {c_dim(size)}, {name}_rest = {rest} / {c_dim(size)};")
        rest = f"{name}_rest"
    return [*lines, f"const int64_t {names[0]} = {rest};"]


def blocks_of(count: Expr | int, each: int) -> Expr:
    """Blocks of `each` items that cover `count`."""
    return (dim(count) + (each - 1)) // each


def element_geometry(sizes: Sequence[Dim]) -> Geometry:
    """One thread per element of a space of these sizes."""
    return Geometry((blocks_of(product(sizes), THREADS).to_dim(), 1, 1), (THREADS, 1, 1))
