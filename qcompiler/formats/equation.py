"""Decode equations: the arithmetic that turns a block's fields into fp32 values, as text that a person can read.

    table[codes] * absmax
    (codes - zeros) * scales

The grammar is names of fields, integers, ``+ - *``, parentheses, and ``table[field]`` for the format's code table.
Every field value is first converted to fp32 (exact for all fields up to 24 bits), and every operation rounds to fp32:
the same text printed as C++ gives the same bits, as long as the compiler does not contract ``a*b + c``.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Entries = npt.NDArray[Any]  # entries of one field: an unsigned, signed or float array

_C_OPERATORS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*"}


@dataclass(frozen=True)
class Equation:
    """A parsed decode equation. Malformed text is a ValueError (a mistake in a format's page, not in user input)."""

    text: str
    _tree: ast.expr = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_tree", ast.parse(self.text, mode="eval").body)
        self._check(self._tree)

    def _check(self, node: ast.expr) -> None:
        match node:
            case ast.Name() | ast.Constant(value=int()):
                return
            case ast.BinOp(left, op, right) if type(op) in _C_OPERATORS:
                self._check(left)
                self._check(right)
            case ast.Subscript(ast.Name("table"), ast.Name()):
                return
            case _:
                raise ValueError(f"decode equation {self.text!r}: '{ast.unparse(node)}' is outside the grammar")

    @property
    def fields(self) -> frozenset[str]:
        """The fields that the equation reads."""
        return frozenset(n.id for n in ast.walk(self._tree) if isinstance(n, ast.Name)) - {"table"}

    @property
    def uses_table(self) -> bool:
        return any(isinstance(n, ast.Subscript) for n in ast.walk(self._tree))

    def evaluate(self, entries: Mapping[str, Entries], table: Float32 | None = None) -> Float32:
        """fp32 values for arrays of field entries that broadcast against each other."""
        return self._evaluate(self._tree, entries, table)

    def _evaluate(self, node: ast.expr, entries: Mapping[str, Entries], table: Float32 | None) -> Float32:
        match node:
            case ast.Name(name):
                return entries[name].astype(np.float32, copy=False)
            case ast.Constant(value=int(value)):
                return np.full((), value, np.float32)
            case ast.Subscript(_, ast.Name(name)) if table is not None:
                return table.take(entries[name])
            case ast.BinOp(left, op, right):
                a, b = self._evaluate(left, entries, table), self._evaluate(right, entries, table)
                if isinstance(op, ast.Mult):
                    return np.multiply(a, b)
                return np.add(a, b) if isinstance(op, ast.Add) else np.subtract(a, b)
            case _:
                raise ValueError(f"decode equation {self.text!r} reads a table, and the format declares none")

    def to_c(self, entries: Mapping[str, str], table: str = "table") -> str:
        """The equation as a C++ expression of type float; `entries` maps each field to a C++ expression of its entry.

        Table lookups index with the entry as written; all other entries are cast to float.
        """
        return self._to_c(self._tree, entries, table)

    def _to_c(self, node: ast.expr, entries: Mapping[str, str], table: str) -> str:
        match node:
            case ast.Name(name):
                return f"(float)({entries[name]})"
            case ast.Constant(value=int(value)):
                return f"{value}.0f"
            case ast.Subscript(_, ast.Name(name)):
                return f"{table}[{entries[name]}]"
            case ast.BinOp(left, op, right):
                sign = _C_OPERATORS[type(op)]
                return f"({self._to_c(left, entries, table)} {sign} {self._to_c(right, entries, table)})"
            case _:
                raise ValueError(f"decode equation {self.text!r}: '{ast.unparse(node)}' is outside the grammar")
