"""One thread per element of an index space."""

from __future__ import annotations

from collections.abc import Sequence

from qcompiler.kernels.cuda.geometry import Geometry
from qcompiler.plan.dims import Dim, Expr, dim, product

THREADS = 256


def blocks_of(count: Expr | int, each: int) -> Expr:
    """Blocks of `each` items that cover `count`."""
    return (dim(count) + (each - 1)) // each


def element_geometry(sizes: Sequence[Dim]) -> Geometry:
    """One thread per element of a space of these sizes."""
    return Geometry((blocks_of(product(sizes), THREADS).to_dim(), 1, 1), (THREADS, 1, 1))
