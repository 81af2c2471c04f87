"""Computes an entry's symbols from the sizes of its inputs. Each declared size is an equation; linear ones are solved.

An input of shape ``(b, 4*h, 4*h + 2*w)`` determines `b`, then `h`, then `w`. The verifier asks which symbols the inputs
determine. The runtime and the interpreter solve for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from qcompiler.errors import DimError
from qcompiler.plan.dims import Dim, Expr, dim


@dataclass(frozen=True)
class Linear:
    """``slope * name + rest``."""

    name: str
    slope: Expr
    rest: Expr

    @staticmethod
    def of(expr: Expr, name: str) -> Linear | None:
        """None if `expr` is not linear in `name`."""
        try:
            rest = expr.substitute({name: 0})
            slope = (expr - rest).divide_exact(Expr.symbol(name))
        except DimError:  # no polynomial of the symbol, or a division by it
            return None
        return None if name in slope.symbols() else Linear(name, slope, rest)

    def solve(self, extent: int, symbols: Mapping[str, int]) -> int | None:
        """The symbol's value for which the expression equals `extent`. None if no integer or every integer does
        that."""
        slope, rest = self.slope.evaluate(symbols), self.rest.evaluate(symbols)
        if slope == 0 or (extent - rest) % slope:
            return None
        return (extent - rest) // slope


@dataclass(frozen=True)
class SizeEquation:
    """``expr == shapes[argument][axis]``; `solves` is the symbol that it determines, if any."""

    argument: int
    axis: int
    expr: Expr
    solves: Linear | None


def plan_equations(shapes: Sequence[Sequence[Dim]]) -> tuple[list[SizeEquation], frozenset[str]]:
    """Returns the equations in solving order, and the set of symbols that they determine.

    Each equation determines one symbol from the symbols before it, or only checks a size. An equation with a symbol
    that nothing determines is left out.
    """
    waiting = [
        SizeEquation(number, axis, dim(extent), None)
        for number, shape in enumerate(shapes)
        for axis, extent in enumerate(shape)
    ]
    known: set[str] = set()
    planned: list[SizeEquation] = []
    progress = True
    while progress:
        progress = False
        for equation in list(waiting):
            unknown = equation.expr.symbols() - known
            solves = Linear.of(equation.expr, next(iter(unknown))) if len(unknown) == 1 else None
            if not unknown or solves is not None:
                waiting.remove(equation)
                planned.append(replace(equation, solves=solves))
                known |= unknown
                progress = True
    return planned, frozenset(known)


def solve(shapes: Sequence[Sequence[Dim]], given: Sequence[Sequence[int]], names: Sequence[str]) -> dict[str, int]:
    """The values of the symbols for arguments whose declared shapes are `shapes` and whose actual ones are `given`.
    Ranks must agree. Equations that only check a size are ignored. DimError names the argument whose size fits no
    integer."""
    symbols: dict[str, int] = {}
    for equation in plan_equations(shapes)[0]:
        if equation.solves is None:
            continue
        extent, name = given[equation.argument][equation.axis], equation.solves.name
        value = equation.solves.solve(extent, symbols)
        if value is None:
            raise DimError(
                f"'{names[equation.argument]}': dimension {equation.axis} is {extent}, which is not {equation.expr} "
                f"for any whole number {name}"
            )
        symbols[name] = value
    return symbols
