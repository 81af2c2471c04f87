"""Rows: a kernel that folds the rows of a matrix and then writes each row, described once for every target.

    top = max x                           Fold("top", "max", "x")
    power = exp(x - top)                  Keep("power", "exp(x - top)")
    scale = 1 / sum power                 Fold("sum", "sum", "power"), Value("scale", "1 / sum")
    out = power * scale                   result="power * scale"

Everything is computed in fp32, and the result is rounded once. An equation has names, whole numbers, ``+ - * /``,
parentheses and functions of one value (`exp`, `sqrt`; `round_bf16`, `round_f16`, which give fp32 again). Its names are
operands (the element of the column), earlier steps, and `numbers`. `kernels/cpu/rows.py` and `kernels/cuda/rows.py`
print a `Rows`; `kernels/kinds` has one for each kind.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from qcompiler.kernels.scalar import BodyStyle, OpContext, float_literal
from qcompiler.kernels.text import c_dim
from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel import Operand, ScalarOp


@dataclass(frozen=True)
class Fold:
    """One value of a row: the sum, the sum of squares or the maximum of an equation over its columns."""

    name: str
    kind: Literal["sum", "squares", "max"]
    of: str


@dataclass(frozen=True)
class Value:
    """One value of a row, from others."""

    name: str
    of: str


@dataclass(frozen=True)
class Keep:
    """A value for each column, which stands for x in all later equations. A target keeps it or computes it again."""

    name: str
    of: str


@dataclass(frozen=True)
class Rows:
    """See the module. Operands x and out are (rows, cols), others (cols). `cost` is in operations per column.

    With `inner`, x and out are (outer, inner, cols), and `rows` is outer * inner.
    """

    note: str
    rows: Dim
    cols: Dim
    steps: tuple[Fold | Value | Keep, ...]
    result: str
    cost: int
    numbers: Mapping[str, float] = field(default_factory=dict)
    inner: Dim | None = None

    def __post_init__(self) -> None:
        kept = False
        for of in (*(step.of for step in self.steps), self.result):
            if kept and "x" in names_of(of):
                raise ValueError(f"{of!r} reads x, which an earlier step has replaced")
            kept = kept or any(isinstance(step, Keep) and step.of == of for step in self.steps)

    def places(self) -> list[str]:
        """Statements that declare the two indices of a row, if it has two."""
        if self.inner is None:
            return []
        inner = c_dim(self.inner)
        return [f"const int64_t outer = row / {inner}, inner = row % {inner};"]

    def literals(self) -> dict[str, str]:
        """The C++ text of each number."""
        return {name: float_literal(value, "f32") for name, value in self.numbers.items()}


def row_indices(operand: Operand) -> tuple[str, ...]:
    """The variables that index the dims of an operand in front of its columns."""
    return {1: (), 2: ("row",), 3: ("outer", "inner")}[len(operand.shape)]


_OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "arith.addf", ast.Sub: "arith.subf", ast.Mult: "arith.mulf", ast.Div: "arith.divf",
}  # fmt: skip


def names_of(equation: str) -> frozenset[str]:
    """The names that an equation reads."""
    tree = ast.parse(equation, mode="eval")
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in called)


def expression(equation: str, names: Mapping[str, str], form: BodyStyle) -> str:
    """An equation as one C++ expression, written as `form` writes the ops of a loop's body. `names` have the text of
    each name. ValueError for anything else than the module says."""

    def op(name: str, *args: str, value: str | None = None) -> str:
        context = OpContext(
            ScalarOp(result="", op=name, dtype="f32", value=value), args, ("f32",) * len(args), (None,) * len(args), ()
        )
        rule = form.table[name]
        return rule.format(*args) if isinstance(rule, str) else rule(context)

    def visit(node: ast.expr) -> str:
        match node:
            case ast.Name(name) if name in names:
                return names[name]
            case ast.Constant(value=int(value)):
                return op("arith.constant", value=float(value).hex())
            case ast.BinOp(left, operator, right) if type(operator) in _OPERATORS:
                return f"({op(_OPERATORS[type(operator)], visit(left), visit(right))})"
            case ast.Call(ast.Name(function), [argument]) if f"math.{function}" in form.table:
                return op(f"math.{function}", unwrapped(visit(argument)))
            case ast.Call(ast.Name("round_bf16" | "round_f16" as function), [argument]):
                return f"{form.rounding}{function.removeprefix('round')}({unwrapped(visit(argument))})"
            case _:
                raise ValueError(f"row equation {equation!r}: '{ast.unparse(node)}' is outside the grammar")

    return unwrapped(visit(ast.parse(equation, mode="eval").body))


def unwrapped(text: str) -> str:
    """A text without the parentheses around the whole of it."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0 and place < len(text) - 1:
            return text
    return text[1:-1] if text[:1] == "(" else text
