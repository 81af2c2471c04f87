"""Items: a kernel whose elements can be computed on their own, described once for every target.

    the equation      out[o, i, n] = x[o, index[i], n]
    a CPU             tasks share the items of `outer` and blocks of `run`; an item computes its block side by side
    a GPU             a thread computes one place of `outer` and `run`

A kernel may also walk one axis in order, with values that it carries from step to step (`walk`, `state`, `result`).
`kernels/cpu/items.py` and `kernels/cuda/items.py` print an `Items`; `kernels/kinds` has one for each kind.

Statements are C++ that the headers of both targets understand (`qc_load`, `qc_store`, the folds of kernels/scalar.py).
Operands are pointers with the names of their roles in the kind's contract; axes are int64_t variables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from qcompiler.kernels.text import c_dim, offset
from qcompiler.plan.contracts import contract_of
from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel import KernelSpec, Operand


class Axis(NamedTuple):
    """An axis of the space of items: its C++ variable and its size."""

    name: str
    size: Dim


@dataclass(frozen=True)
class Index:
    """Declares `at`, a position in a dim of size `length`, from the operand `index` at the given axes.

    A CPU reports the first index out of range before anything is written. A GPU cannot report: the step of the walk is
    left out, and a copy without a walk gives `qc_poison` (NaN, or the lowest integer), never another element.
    """

    axes: tuple[str, ...]
    length: Dim
    from_end: bool = True
    """Whether a negative index counts from the end. It is out of range otherwise."""

    @property
    def least(self) -> str:
        return f"-{c_dim(self.length)}" if self.from_end else "0"

    def lines(self, operand: Operand) -> list[str]:
        """The statements that declare `at`."""
        read = f"(int64_t)index[{offset(operand, self.axes)}]"
        if not self.from_end:
            return [f"const int64_t at = {read};"]
        return [f"int64_t at = {read};", f"if (at < 0) at += {c_dim(self.length)};"]


@dataclass(frozen=True)
class Copy:
    """One element of `source` becomes one of `target`: names of operands, and an index text for each dim."""

    target: str
    at: tuple[str, ...]
    source: str
    read: tuple[str, ...]


@dataclass(frozen=True)
class Items:
    """See the module. `step` is what one element (of each step of the walk) does; `cost` counts its operations."""

    note: str
    outer: tuple[Axis, ...]
    run: Axis
    """Neighbours along this axis lie side by side in the result."""
    block: int
    """The most places of `run` in one item of a CPU."""
    step: Copy | tuple[str, ...]
    cost: int
    index: Index | None = None
    walk: Axis | None = None
    state: tuple[tuple[str, str], ...] = ()
    """(C++ type, name) of the values that the walk carries. They begin as zero."""
    result: tuple[str, ...] = ()
    """What happens after the walk."""

    @property
    def axes(self) -> dict[str, Dim]:
        """The size of every axis."""
        return dict((*self.outer, *((self.walk,) if self.walk else ()), self.run))


def by_role(spec: KernelSpec) -> Mapping[str, Operand]:
    """A kernel's operands by the names that their contract gives them."""
    return {role.name: operand for role, operand in zip(contract_of(spec).roles, spec.operands, strict=True)}
