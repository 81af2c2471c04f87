"""The base classes of kernel kinds, and the terms in which a kind states its contract.

A kind is one module of `qcompiler/plan/kinds`: a record with its equation, the contract that the verifier proves, and
the cost of a launch. The record is data (strict JSON). It says what a kernel computes, and nothing about how.
"""

from __future__ import annotations

from abc import abstractmethod
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
"""The alignment, in bytes, of rows of int8. Kernels read their codes, scales and sums as vectors and words."""

OPERATIONS_PER_ELEMENT = 8
"""An estimate for each element of a norm, a softmax or a scan, and for each comparison of a sort. Moving the bytes
takes longer, so a rough number is enough."""

Symbols = Mapping[str, int]
"""Values of the program's symbols."""


@dataclass(frozen=True)
class Role:
    """What a kernel requires of one operand.

    `unit`: the last dim has unit stride. `align`: the first element and every row of the last dim begin at multiples of
    this many bytes of the buffer. `packed`: the operand may have a format or a layout. `like` names a role with the
    same element type. A written operand ("w", "rw") never overlaps itself.
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
    """What a kernel requires: a role for each operand, and limits of sizes.

    `extents` must be at least 0 and `positive` at least 1. In each pair of `at_most` the first must be no larger than
    the second. The kernel's text may multiply the extents in `work`, all or some of them.
    """

    roles: tuple[Role, ...]
    work: tuple[Dim, ...]
    extents: tuple[Dim, ...] = ()
    positive: tuple[Dim, ...] = ()
    at_most: tuple[tuple[Dim, Dim], ...] = ()


class KernelBody(Strict, frozen=True):
    """Base class of the records: each kind has one subclass, and the subclass's tag is the kind's name.

    A kind derives from `RoleKernel`, apart from `loop`: the operands of a loop have no roles, and
    plan/loop_contract.py derives its contract from its loops and accesses. Every kind defines the abstract methods;
    `plan/kinds` refuses one that does not.
    """

    lacks: ClassVar[Mapping[str, str]] = {}
    """The targets ("cpu", "cuda") without a template for this kind, each with the reason. The error for a model that
    needs the kernel states this reason."""

    @abstractmethod
    def operations(self, operands: Sequence[Operand], symbols: Symbols) -> int:
        """Arithmetic operations of one launch: a multiply-add counts two, any other op one per element. Moving rows
        counts nothing."""

    def moved(self, operand: Operand, stored: int, symbols: Symbols) -> int:
        """Bytes of one operand that a launch reads and writes. The operand occupies `stored` bytes in memory."""
        return once(operand, stored)


class RoleKernel(KernelBody, frozen=True):
    """A kind whose contract gives each operand a role."""

    @abstractmethod
    def contract(self, operands: int) -> Contract:
        """What a kernel with this number of operands requires. PlanError for a record that describes no kernel."""

    def check_operands(self, operands: Sequence[Operand]) -> None:
        """PlanError for operands that fit their roles but not this record."""


def once(operand: Operand, stored: int) -> int:
    """The bytes moved for an operand that is read once, written once, or both ("rw")."""
    return stored * (2 if operand.access == "rw" else 1)


def replaced(operand: Operand, stored: int, extents: Sequence[Dim], symbols: Symbols) -> int:
    """The bytes moved for an operand of a kernel that reads and replaces only `extents` elements of its "rw"
    operand."""
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
