"""The factors of dims: which parts of a tensor's dims are the same part of another tensor's, through any views.

    %1 = transpose %0 (7, 2, 3) [1, 0, 2]           %0: dims [a], [b], [c]     %1: dims [b], [a], [c]
    %2 = collapse %1 to (14, 3)                     %2: dims [b, a], [c]

A dim is a list of factors, the slowest first; a dim of size 1 is an empty list, since reshapes move such dims freely. A
reshape that splits a dim splits its factor for all tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from xdsl.builder import Builder
from xdsl.ir import SSAValue
from xdsl.ir.affine import AffineDimExpr

from qcompiler.ir import build
from qcompiler.passes.loops.loops import Index
from qcompiler.plan.dims import Dim, Expr, dim, product


@dataclass(eq=False)
class Factor:
    """A part of a dim. `parts` are the factors that it was split into."""

    size: Dim
    parts: list[Factor] = field(default_factory=list)

    def leaves(self) -> list[Factor]:
        return [leaf for part in self.parts for leaf in part.leaves()] if self.parts else [self]


Dims = list[list[Factor]]


def leaves(dims: Sequence[Sequence[Factor]]) -> Dims:
    """The dims in the factors that are not split any further."""
    return [[leaf for factor in factors for leaf in factor.leaves()] for factors in dims]


def fresh(shape: Sequence[Dim]) -> Dims:
    """The dims of a tensor that nothing is known about: one factor each."""
    return [[] if size == 1 else [Factor(size)] for size in shape]


def reshaped(factors: Iterable[Factor], shape: Sequence[Dim]) -> Dims | None:
    """The dims of `shape`, whose elements lie in the order of these factors. Splits factors where a dim ends inside.

    None if a dim is no product of whole factors and parts of one, as in (4, 3) seen as (6, 2), and for tensors without
    elements.
    """
    waiting = [leaf for factor in factors for leaf in factor.leaves()][::-1]
    found: Dims = []
    for size in shape:
        wanted, own = dim(size), list[Factor]()
        while wanted != dim(1):
            if not waiting or wanted == dim(0):
                return None
            factor = waiting.pop()
            rest = _quotient(wanted, dim(factor.size))
            if rest is not None:
                own.append(factor)
                wanted = rest
                continue
            rest = _quotient(dim(factor.size), wanted)
            if rest is None:
                return None
            factor.parts = [Factor(wanted.to_dim()), Factor(rest.to_dim())]
            own.append(factor.parts[0])
            waiting.append(factor.parts[1])
            wanted = dim(1)
        found.append(own)
    return None if waiting else found


def _quotient(value: Expr, divisor: Expr) -> Expr | None:
    """value / divisor, if that is a valid size of a dim."""
    if divisor == dim(0):
        return None
    quotient = value // divisor
    return quotient if quotient * divisor == value else None


def listing(index: Index, shape: Sequence[Dim], outer: Sequence[Dim]) -> tuple[int, ...] | None:
    """The dims of `outer` in the order in which a tensor of `shape` has them, if it is read whole at this index, and
    each element once. Dims of size 1 do not matter."""
    read = [
        e.position if isinstance(e, AffineDimExpr) else -1 for e, size in zip(index, shape, strict=True) if size != 1
    ]
    sizes = [size for size in shape if size != 1]
    whole = sorted(read) == [n for n, size in enumerate(outer) if size != 1]
    return tuple(read) if whole and all(outer[n] == size for n, size in zip(read, sizes, strict=True)) else None


def size_of(factors: Iterable[Factor]) -> Dim:
    """The size of a dim that is made of these factors."""
    return product(factor.size for factor in factors).to_dim()


def arranged(
    builder: Builder, value: SSAValue, dims: Sequence[Sequence[Factor]], wanted: Sequence[Sequence[Factor]]
) -> SSAValue:
    """`value`, whose dims are `dims`, as a view with the dims `wanted`, which are made of the same factors."""
    target = [factor for factors in wanted for factor in factors]
    place = {id(factor): n for n, factor in enumerate(target)}
    # whole dims first: such a transpose cancels one that the value is, where a reshape would stand between the two
    order = sorted(range(len(dims)), key=lambda n: place[id(dims[n][0])] if dims[n] else -1)
    value = build.transpose(builder, value, order)
    given = [factor for n in order for factor in dims[n]]
    split = build.reshape(builder, value, [factor.size for factor in given])
    found = [next(n for n, each in enumerate(given) if each is factor) for factor in target]
    return build.reshape(builder, build.transpose(builder, split, found), [size_of(factors) for factors in wanted])
