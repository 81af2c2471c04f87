"""Decode equations: readable text for the arithmetic that turns a block's fields into fp32 values.

    table[codes] * absmax
    (codes - zeros) * scales
    d * scales * codes - dmin * mins

The grammar is names of fields, numbers, ``+ - * /``, parentheses, and ``table[field]`` for a declared table.
Numbers and field values are first converted to fp32 (exact for all fields up to 24 bits), and every operation rounds to
fp32: the same text printed as C++ gives the same bits, as long as the compiler does not contract ``a*b + c``.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Entries = npt.NDArray[Any]  # entries of one field: an unsigned, signed or float array

NO_TABLES: Mapping[str, Float32] = MappingProxyType({})
NO_NAMES: Mapping[str, str] = MappingProxyType({})

_C_OPERATORS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}

_UFUNCS: dict[type[ast.operator], Callable[[Float32, Float32], Float32]] = {
    ast.Add: np.add, ast.Sub: np.subtract, ast.Mult: np.multiply, ast.Div: np.divide,
}  # fmt: skip


@dataclass(frozen=True)
class CStyle:
    """C++ syntax for an equation: patterns for an entry that becomes a float, a number, and a lookup."""

    entry: str = "(float)({entry})"
    number: str = "{number}"
    lookup: str = "{table}[{entry}]"


SCALARS = CStyle()


@dataclass(frozen=True)
class Equation:
    """A parsed decode equation. Malformed text is a ValueError (a mistake in a declaration, not in user input)."""

    text: str
    _tree: ast.expr = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_tree", ast.parse(self.text, mode="eval").body)
        self._check(self._tree)

    def _check(self, node: ast.expr) -> None:
        match node:
            case ast.Name() | ast.Constant(value=int() | float()):
                return
            case ast.BinOp(left, op, right) if type(op) in _C_OPERATORS:
                self._check(left)
                self._check(right)
            case ast.Subscript(ast.Name(), ast.Name()):
                return
            case _:
                raise ValueError(f"decode equation {self.text!r}: '{ast.unparse(node)}' is outside the grammar")

    @property
    def fields(self) -> frozenset[str]:
        """The fields that the equation reads."""
        return frozenset(n.id for n in ast.walk(self._tree) if isinstance(n, ast.Name)) - self.tables

    @property
    def tables(self) -> frozenset[str]:
        """The tables that the equation looks entries up in."""
        lookups = (n.value for n in ast.walk(self._tree) if isinstance(n, ast.Subscript))
        return frozenset(table.id for table in lookups if isinstance(table, ast.Name))

    @property
    def lookups(self) -> frozenset[str]:
        """The fields that the equation looks up in tables."""
        found = (n.slice for n in ast.walk(self._tree) if isinstance(n, ast.Subscript))
        return frozenset(index.id for index in found if isinstance(index, ast.Name))

    def evaluate(self, entries: Mapping[str, Entries], tables: Mapping[str, Float32] = NO_TABLES) -> Float32:
        """fp32 values for arrays of field entries that broadcast against each other."""
        return self._evaluate(self._tree, entries, tables)

    def _evaluate(self, node: ast.expr, entries: Mapping[str, Entries], tables: Mapping[str, Float32]) -> Float32:
        match node:
            case ast.Name(name):
                return entries[name].astype(np.float32, copy=False)
            case ast.Constant(value=int(value) | float(value)):
                return np.full((), value, np.float32)
            case ast.Subscript(ast.Name(table), ast.Name(name)):
                return tables[table].take(entries[name])
            case ast.BinOp(left, op, right):
                a, b = self._evaluate(left, entries, tables), self._evaluate(right, entries, tables)
                return _UFUNCS[type(op)](a, b)
            case _:
                raise ValueError(f"decode equation {self.text!r}: '{ast.unparse(node)}' is outside the grammar")

    def to_c(self, entries: Mapping[str, str], tables: Mapping[str, str] = NO_NAMES, style: CStyle = SCALARS) -> str:
        """The equation as a C++ expression, by default of type float; `entries` maps each field to an expression.

        `tables` maps a table to the name of its C++ array (by default its own).  Lookups index with the entry as
        written; all other entries are cast to float.  Other styles give vectors, for instance.
        """
        return self._to_c(self._tree, entries, tables, style)

    def _to_c(self, node: ast.expr, entries: Mapping[str, str], tables: Mapping[str, str], style: CStyle) -> str:
        match node:
            case ast.Name(name):
                return style.entry.format(entry=entries[name])
            case ast.Constant(value=int(value)):
                return style.number.format(number=f"{value}.0f")
            case ast.Constant(value=float(value)):
                return style.number.format(number=f"{float(np.float32(value)).hex()}f")
            case ast.Subscript(ast.Name(table), ast.Name(name)):
                return style.lookup.format(table=tables.get(table, table), entry=entries[name])
            case ast.BinOp(left, op, right):
                sign = _C_OPERATORS[type(op)]
                written = (self._to_c(part, entries, tables, style) for part in (left, right))
                return f"({f' {sign} '.join(written)})"
            case _:
                raise ValueError(f"decode equation {self.text!r}: '{ast.unparse(node)}' is outside the grammar")

    def split(self, codes: str) -> Split:
        """The equation in three parts, for kernels: see `Split`. ValueError if codes occur in two separate parts."""
        return _Splitter(codes).split(self)


@dataclass(frozen=True)
class Split:
    """A decode equation in parts. They keep the operations and their order, so the results round in the same way.

    `of_code` reads codes alone: a table with one value per code.  `per_entry` are the largest parts that do not read
    codes, named g0, g1, …: computed once for all elements that an entry serves.  `per_element` reads "code" (the value
    of `of_code`) and g0, g1, ….

        d * scales * (codes - 8) - dmin * mins:   code = codes - 8,  g0 = d * scales,  g1 = dmin * mins,  g0 * code - g1
    """

    of_code: Equation
    per_entry: Mapping[str, Equation]
    per_element: Equation


class _Splitter:
    def __init__(self, codes: str) -> None:
        self.codes = codes
        self.of_code: list[str] = []
        self.per_entry: dict[str, Equation] = {}

    def split(self, equation: Equation) -> Split:
        element = self._visit(ast.parse(equation.text, mode="eval").body)
        if len(self.of_code) != 1:
            raise ValueError(f"decode equation {equation.text!r}: '{self.codes}' stands in several parts")
        return Split(Equation(self.of_code[0]), self.per_entry, Equation(ast.unparse(element)))

    def _visit(self, node: ast.expr) -> ast.expr:
        fields = Equation(ast.unparse(node)).fields
        if fields == {self.codes}:
            self.of_code.append(ast.unparse(node))
            return ast.Name("code")
        if fields and self.codes not in fields:
            text = ast.unparse(node)
            for name, known in self.per_entry.items():
                if known.text == text:
                    return ast.Name(name)
            name = f"g{len(self.per_entry)}"
            self.per_entry[name] = Equation(text)
            return ast.Name(name)
        if isinstance(node, ast.BinOp):
            return ast.BinOp(self._visit(node.left), node.op, self._visit(node.right))
        return node
