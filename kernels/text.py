"""Names, types and expressions as C++ text: what every kernel emitter shares."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from qcompiler.plan.dims import Dim, Expr, dim
from qcompiler.plan.kernel import KernelSpec

STORAGE_TYPES: dict[str, str] = {
    "f64": "double", "f32": "float", "f16": "qc_f16", "bf16": "qc_bf16", "i64": "int64_t", "i32": "int32_t",
    "i16": "int16_t", "i8": "int8_t", "ui8": "uint8_t", "i1": "bool",
}  # fmt: skip
"""How an element lies in memory."""

VALUE_TYPES: dict[str, str] = {**STORAGE_TYPES, "f16": "float", "bf16": "float", "index": "int64_t"}
"""What `qc_load` gives and scalar code computes in."""


def identifier(name: str) -> str:
    """`name` with everything but letters, digits and '_' replaced."""
    return re.sub(r"\W", "_", name)


def symbol(name: str) -> str:
    """The C++ variable that holds a dimension symbol."""
    return f"n_{identifier(name)}"


def c_dim(value: Dim | Expr) -> str:
    """A dimension as an int64_t expression over `symbol` variables; bare for a constant or one symbol, else in ()."""
    return _c_expression(ast.parse(str(dim(value)), mode="eval").body)


def _c_expression(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=int() as value):
            return str(value) if abs(value) < 2**31 else f"INT64_C({value})"
        case ast.Name(id=name):
            return symbol(name)
        case ast.UnaryOp(operand=operand):
            return f"(-{_c_expression(operand)})"
        case ast.BinOp(left=left, op=op, right=right):
            lhs, rhs = _c_expression(left), _c_expression(right)
            if isinstance(op, ast.FloorDiv | ast.Mod):
                return f"{'qc_floordiv' if isinstance(op, ast.FloorDiv) else 'qc_mod'}({lhs}, {rhs})"
            sign = "+" if isinstance(op, ast.Add) else "-" if isinstance(op, ast.Sub) else "*"
            return f"({lhs} {sign} {rhs})"
        case ast.Call(func=ast.Name(id=name), args=[left, right]):
            return f"qc_{name}({_c_expression(left)}, {_c_expression(right)})"
        case _:
            raise AssertionError(f"{ast.dump(node)} is no dimension expression")


def header_comment(spec: KernelSpec, *lines: str) -> str:
    """The comment above a kernel: what it serves, then its operands, then what the template adds."""
    rows = [f"// qk_{spec.name}: {spec.template}" + (f" for {one_line(spec.serves)}" if spec.serves else "")]
    for operand in spec.operands:
        shape = "x".join(str(d) for d in operand.shape)
        packed = f", {operand.format.name} {operand.format.params} in {operand.layout}" if operand.format else ""
        strides = f", strides ({', '.join(str(s) for s in operand.strides)})" if operand.strides else ""
        rows.append(f"//   {operand.access:2} {identifier(operand.name)}: {shape}x{operand.dtype}{strides}{packed}")
    rows += [f"// {one_line(line)}" for line in lines]
    return "\n".join(rows)


def one_line(text: str) -> str:
    """Text that is safe behind `//`: printable, on one line, not ending in a backslash (which would join lines)."""
    return "".join(c if c.isprintable() else " " for c in text).rstrip("\\ ")


def needed(declarations: Sequence[str], rest: Sequence[str]) -> list[str]:
    """The declarations (``const … name = …;``) that `rest` uses, itself or through another one, and does not hold."""
    kept: list[str] = []
    text = "\n".join(rest)
    for declaration in reversed(declarations):
        name = declaration.partition(" =")[0].split()[-1]
        if declaration not in rest and re.search(rf"\b{name}\b", text):
            kept.insert(0, declaration)
            text += declaration
    return kept


def indent(lines: Sequence[str], levels: int = 1) -> list[str]:
    return [("    " * levels + line) if line else "" for line in lines]
