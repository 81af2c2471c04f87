"""What every kind of kernel declares of itself: `KernelBody`, and the terms that declarations are written in.

A kind is one module of `qcompiler/plan/kinds`: a record with its equation, the contract that the verifier proves, and
what a launch costs.  The record is data (strict JSON); it says what is computed and nothing about how.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from qcompiler.plan.dims import Dim, dim, product
from qcompiler.plan.operands import ITEMSIZE, Access, Operand, Strict

FLOATS = ("f32", "bf16", "f16")
INDICES = ("i64", "i32")
ANY = tuple(ITEMSIZE)

COUNTED_IN_32_BITS = 2**31 - 1
ROW_ALIGNMENT = 16
"""Bytes: of rows of int8, whose codes, scale and sums are read as vectors and words."""

FEW = 8
"""Operations for each element of a norm, a softmax, a scan, and for each comparison of a sort: they hardly count."""

Symbols = Mapping[str, int]
"""Values of the program's symbols."""


@dataclass(frozen=True)
class Role:
    """One operand.

    `unit`: the elements of its last dim lie side by side.  `align`: its first element, and every row of its last dim,
    begin at multiples of so many bytes of the buffer.  `packed`: it may have a format or a layout.  `like` names a role
    whose type it shares.  What is written ("w", "rw") never overlaps itself.
    """

    name: str
    shape: tuple[Dim, ...]
    access: Access = "r"
    dtypes: tuple[str, ...] = FLOATS
    unit: bool = False
    align: int = 1
    packed: bool = False
    like: str | None = None


@dataclass(frozen=True)
class Contract:
    """What a kernel takes.

    `extents` are at least 0; `positive` at least 1; of each pair in `at_most` the first is no larger than the second.
    `work` are the extents whose product, or a part of it, the kernel's text may form.
    """

    roles: tuple[Role, ...]
    work: tuple[Dim, ...]
    extents: tuple[Dim, ...] = ()
    positive: tuple[Dim, ...] = ()
    at_most: tuple[tuple[Dim, Dim], ...] = ()


class KernelBody(Strict, frozen=True):
    """Base of the records: one subclass for each kind, whose tag is the kind's name.

    `contract` and `operations` belong to every kind; `moved` and `check_operands` have an answer that fits most.
    """

    lacks: ClassVar[Mapping[str, str]] = {}
    """Targets ("cpu", "cuda") that have no template of this kind, each with the reason. It is part of the error that a
    model with such a kernel gets."""

    def contract(self, operands: int) -> Contract:
        """What a kernel with so many operands takes. PlanError for a record that no kernel has."""
        raise NotImplementedError

    def operations(self, operands: Sequence[Operand], symbols: Symbols) -> int:
        """Arithmetic of one launch: a multiply-add counts two, other ops one for each element; moved rows count 0."""
        raise NotImplementedError

    def moved(self, operand: Operand, stored: int, symbols: Symbols) -> int:
        """Bytes of one operand that a launch reads and writes. As it lies in memory the operand has `stored` bytes."""
        return once(operand, stored)

    def check_operands(self, operands: Sequence[Operand]) -> None:
        """PlanError for operands that fit their roles and do not fit this record."""


DECLARED = ("contract", "operations")
"""The methods that each kind has of its own."""


def once(operand: Operand, stored: int) -> int:
    """The bytes of an operand that is read once, or written once, or both."""
    return stored * (2 if operand.access == "rw" else 1)


def replaced(operand: Operand, stored: int, extents: Sequence[Dim], symbols: Symbols) -> int:
    """The bytes that a kernel moves which writes only `extents` elements of its "rw" operand, and reads those first."""
    if operand.access == "rw":
        return once(operand, volume(extents, symbols) * ITEMSIZE[operand.dtype])
    return once(operand, stored)


def same_dims(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    """Equal as expressions."""
    return len(a) == len(b) and all(x == y or dim(x) == dim(y) for x, y in zip(a, b, strict=True))


def value_of(size: Dim, symbols: Symbols) -> int:
    """A size for values of the symbols."""
    return size if isinstance(size, int) else dim(size).evaluate(symbols)


def volume(sizes: Sequence[Dim], symbols: Symbols) -> int:
    """The product of some sizes for values of the symbols."""
    return value_of(product(sizes).to_dim(), symbols)


def elements(operands: Sequence[Operand], symbols: Symbols) -> int:
    """Elements of the largest operand."""
    return max(volume(operand.shape, symbols) for operand in operands)
