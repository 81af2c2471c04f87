"""Names, types and expressions as C++ text: what every kernel emitter shares."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from qcompiler.plan.dims import Dim, Expr, dim
from qcompiler.plan.kernel import KernelSpec, Operand

STORAGE_TYPES: dict[str, str] = {
    "f64": "double", "f32": "float", "f16": "qc_f16", "bf16": "qc_bf16", "i64": "int64_t", "i32": "int32_t",
    "i16": "int16_t", "i8": "int8_t", "ui8": "uint8_t", "i1": "bool",
}  # fmt: skip
"""How an element lies in memory."""

VALUE_TYPES: dict[str, str] = {**STORAGE_TYPES, "f16": "float", "bf16": "float", "index": "int64_t"}
"""What `qc_load` gives and scalar code computes in."""

VECTOR_TYPES: dict[str, str] = {
    "f32": "vf", "f16": "vf", "bf16": "vf", "i32": "vi", "i16": "vi", "i8": "vi", "ui8": "vi", "i1": "vm",
}  # fmt: skip
"""What `vload` gives. f64, i64 and index have no 16-lane form."""


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


def symbol_declarations(symbols: Sequence[str], source: str = "sym") -> list[str]:
    """``const int64_t n_s = sym[0];`` for each symbol."""
    return [f"const int64_t {symbol(name)} = {source}[{i}];" for i, name in enumerate(symbols)]


def pointer(operand: Operand, index: int, name: str | None = None, source: str = "op") -> str:
    """``const float* const x = (const float*)op[0];``, const where the kernel only reads. Packed operands are bytes."""
    element = "uint8_t" if operand.format is not None else STORAGE_TYPES[operand.dtype]
    qualified = f"const {element}" if operand.access == "r" else element
    return f"{qualified}* const {name or identifier(operand.name)} = ({qualified}*){source}[{index}];"


def load_columns(row: str, stride: Dim, column: str = "j", count: str = "n") -> str:
    """`count` lanes of a row from `column` on, its elements `stride` apart (0 repeats one element)."""
    if stride == 1:
        return f"vload_upto({row} + {column}, {count})"
    return f"vload_s({row} + {column} * {c_dim(stride)}, {c_dim(stride)}, {count})"


def store_columns(row: str, stride: Dim, value: str, column: str = "j", count: str = "n") -> str:
    """The statement that writes `count` lanes of a row from `column` on."""
    if stride == 1:
        return f"vstore_upto({row} + {column}, {value}, {count});"
    return f"vstore_s({row} + {column} * {c_dim(stride)}, {c_dim(stride)}, {value}, {count});"


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


def entry_function(spec: KernelSpec, body: Sequence[str]) -> str:
    """The exported function of a kernel around `body`, with the symbols that it uses declared."""
    lines = "\n".join(indent([*needed(symbol_declarations(spec.symbols), body), *body]))
    return f'extern "C" void qk_{spec.name}(qc_ctx* ctx, void* const* op, const int64_t* sym) {{\n{lines}\n}}\n'


def task_function(spec: KernelSpec, body: Sequence[str], name: str = "task") -> str:
    """A static task function `qk_<spec>_<name>(arg, task, scratch)`; `call` and the symbols are declared if used."""
    declarations = [
        "const qc_call* const call = (const qc_call*)arg;",
        *symbol_declarations(spec.symbols, "call->sym"),
    ]
    lines = "\n".join(indent([*needed(declarations, body), *body]))
    return f"static void qk_{spec.name}_{name}(void* arg, int64_t task, char* scratch) {{\n{lines}\n}}\n"


def indent(lines: Sequence[str], levels: int = 1) -> list[str]:
    return [("    " * levels + line) if line else "" for line in lines]
