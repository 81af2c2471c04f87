"""torch's symbolic sizes (sympy) as dimension expressions of `qcompiler.plan.dims`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from qcompiler.errors import DataDependentShapeError, DimError
from qcompiler.plan.dims import Dim, Expr


@dataclass
class Symbols:
    """Translates sympy expressions; `names` maps torch's symbols (`s77`) to the user's (`batch`)."""

    names: Mapping[str, str] = field(default_factory=dict)

    def dim(self, size: Any) -> Dim:
        """An int, SymInt or sympy expression as a `Dim`.

        DataDependentShapeError if it holds an unbacked symbol (a size computed from tensor data), DimError for a
        function that dimension expressions do not have.
        """
        if isinstance(size, int) and not isinstance(size, bool):
            return size
        return self.expr(size.node.expr if isinstance(size, torch.SymInt) else size).to_dim()

    def shape(self, sizes: Any) -> tuple[Dim, ...]:
        return tuple(self.dim(size) for size in sizes)

    def expr(self, node: Any) -> Expr:
        import sympy

        if node.is_Integer:
            return Expr.constant(int(node))
        if node.is_Symbol:
            name = str(node)
            if name.startswith(("u", "zu")) and name.lstrip("zuf").isdigit():
                raise DataDependentShapeError(f"the size {name} is computed from the values of a tensor")
            return Expr.symbol(self.names.get(name, name))
        if isinstance(node, sympy.Add):
            return _fold(lambda a, b: a + b, [self.expr(a) for a in node.args])
        if isinstance(node, sympy.Mul):
            return self._product(node)
        if isinstance(node, sympy.Pow) and node.args[1].is_Integer and int(node.args[1]) > 0:
            return _fold(lambda a, b: a * b, [self.expr(node.args[0])] * int(node.args[1]))
        handler = _FUNCTIONS.get(type(node).__name__)
        if handler is None:
            raise DimError(f"the size {node} uses {type(node).__name__}, which dimension expressions do not have")
        return _fold(handler, [self.expr(a) for a in node.args])

    def _product(self, node: Any) -> Expr:
        """A product; a rational coefficient such as `s/2` is an exact division."""
        numerator, denominator = node.as_numer_denom()
        if denominator == 1:
            return _fold(lambda a, b: a * b, [self.expr(a) for a in node.args])
        return self.expr(numerator) // self.expr(denominator)


def _fold(function: Any, items: list[Expr]) -> Expr:
    total = items[0]
    for item in items[1:]:
        total = function(total, item)
    return total


_FUNCTIONS = {
    "FloorDiv": lambda a, b: a // b,
    "CleanDiv": lambda a, b: a // b,
    "IntTrueDiv": lambda a, b: a // b,
    "CeilDiv": lambda a, b: (a + b - 1) // b,
    "Mod": lambda a, b: a % b,
    "PythonMod": lambda a, b: a % b,
    "Max": lambda a, b: a.maximum(b),
    "Min": lambda a, b: a.minimum(b),
    "TruncToInt": lambda a: a,
}
