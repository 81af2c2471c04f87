"""Names, types and expressions as C++ text, shared by all kernel emitters."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from qcompiler.plan.dims import Dim, Expr, dim
from qcompiler.plan.dims_text import Builder, read
from qcompiler.plan.kernel import FormatRef, KernelSpec, Operand

STORAGE_TYPES: dict[str, str] = {
    "f64": "double", "f32": "float", "f16": "qc_f16", "bf16": "qc_bf16", "i64": "int64_t", "i32": "int32_t",
    "i16": "int16_t", "i8": "int8_t", "ui8": "uint8_t", "i1": "bool",
}  # fmt: skip
"""The C++ type of an element in memory."""

VALUE_TYPES: dict[str, str] = {**STORAGE_TYPES, "f16": "float", "bf16": "float", "index": "int64_t"}
"""The C++ type that `qc_load` returns and scalar code computes in."""


def identifier(name: str) -> str:
    """`name` with everything but letters, digits and '_' replaced."""
    return re.sub(r"\W", "_", name)


def symbol(name: str) -> str:
    """The C++ variable that holds a dimension symbol."""
    return f"n_{identifier(name)}"


def c_dim(value: Dim | Expr, names: Mapping[str, str] | None = None) -> str:
    """A dimension as an int64_t expression over `symbol` variables, in parentheses unless it is a constant or one
    symbol.

    `names` gives other variables for the symbols.
    """
    builder = _C_TEXT if names is None else dataclasses.replace(_C_TEXT, symbol=names.__getitem__)
    return read(str(dim(value)), builder)


def _literal(value: int) -> str:
    return str(value) if abs(value) < 2**31 else f"INT64_C({value})"


_C_TEXT: Builder[str] = Builder(
    _literal,
    symbol,
    {
        "+": lambda a, b: f"({a} + {b})", "-": lambda a, b: f"(-{b})" if a == "0" else f"({a} - {b})",
        "*": lambda a, b: f"({a} * {b})", "//": lambda a, b: f"qc_floordiv({a}, {b})",
        "%": lambda a, b: f"qc_mod({a}, {b})", "max": lambda a, b: f"qc_max({a}, {b})",
        "min": lambda a, b: f"qc_min({a}, {b})",
    },
)  # fmt: skip
"""Parenthesises each operation, in the order of the text: `plan.sizes.magnitude` bounds exactly these results."""


def offset(operand: Operand, indices: Sequence[str]) -> str:
    """Element offset of an operand at the given index texts (int64_t expressions), one per dim."""
    terms = [
        index if stride == 1 else f"{index if index.isidentifier() else f'({index})'} * {c_dim(stride)}"
        for index, stride in zip(indices, operand.strides, strict=True)
        if stride != 0 and index != "0"
    ]
    return " + ".join(terms) or "0"


def unravel(index: str, names: Sequence[str], sizes: Sequence[Dim]) -> list[str]:
    """Statements that split the linear `index` into `names`, the last one fastest."""
    lines, rest = [], index
    for name, size in reversed(list(zip(names[1:], sizes[1:], strict=True))):
        lines.append(f"const int64_t {name} = {rest} % {c_dim(size)}, {name}_rest = {rest} / {c_dim(size)};")
        rest = f"{name}_rest"
    return [*lines, f"const int64_t {names[0]} = {rest};"]


def header_comment(spec: KernelSpec, *lines: str) -> str:
    """The comment above a kernel: what it serves, its operands, then the template's own `lines`."""
    rows = [f"// qk_{spec.name}: {spec.template}" + (f" for {comment(spec.serves)}" if spec.serves else "")]
    for operand in spec.operands:
        shape = "x".join(str(d) for d in operand.shape)
        packed = comment(f", {_format(operand.format)} in {operand.layout}") if operand.format else ""
        strides = f", strides ({', '.join(str(s) for s in operand.strides)})" if operand.strides else ""
        rows.append(f"//   {operand.access:2} {identifier(operand.name)}: {shape}x{operand.dtype}{strides}{packed}")
    rows += [f"// {comment(line)}" for line in lines]
    return "\n".join(rows)


def _format(ref: FormatRef) -> str:
    return " ".join((ref.name, *(f"{key}={value}" for key, value in sorted(ref.params.items()))))


MAX_COMMENT = 400
_NOT_PLAIN = re.compile(r"[^A-Za-z0-9 _.,:;()\[\]=+*/<>^'%&|-]")


def comment(text: str) -> str:
    """Makes any text safe after `//`: plain characters only, none of which ends the line or joins it with the next
    (newline, backslash, the question marks of a trigraph). Others become "_"."""
    return _NOT_PLAIN.sub("_", re.sub(r"\s", " ", text[:MAX_COMMENT]).rstrip("\\ "))


def needed(declarations: Sequence[str], rest: Sequence[str]) -> list[str]:
    """The declarations (``const … name = …;``) that `rest` needs, directly or through another one, and does not
    contain."""
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
