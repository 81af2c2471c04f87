"""C++ text of the CPU emitters: functions, tasks, vector loads and stores."""

from __future__ import annotations

from collections.abc import Sequence

from qcompiler.kernels.text import STORAGE_TYPES, c_dim, identifier, indent, needed, symbol
from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel import KernelSpec, Operand

VECTOR_TYPES: dict[str, str] = {
    "f32": "vf", "f16": "vf", "bf16": "vf", "i32": "vi", "i16": "vi", "i8": "vi", "ui8": "vi", "i1": "vm",
}  # fmt: skip
"""The C++ type that `vload` returns. f64, i64 and index have no 16-lane form."""


def symbol_declarations(symbols: Sequence[str], source: str = "sym") -> list[str]:
    """``const int64_t n_s = sym[0];`` for each symbol."""
    return [f"const int64_t {symbol(name)} = {source}[{i}];" for i, name in enumerate(symbols)]


def pointer(operand: Operand, index: int, name: str | None = None, source: str = "op") -> str:
    """``const float* const x = (const float*)op[0];``, const if the kernel only reads. Packed operands are bytes."""
    element = "uint8_t" if operand.format is not None else STORAGE_TYPES[operand.dtype]
    qualified = f"const {element}" if operand.access == "r" else element
    return f"{qualified}* const {name or identifier(operand.name)} = ({qualified}*){source}[{index}];"


def load_columns(row: str, stride: Dim, column: str = "j", count: str = "n") -> str:
    """`count` elements of a row from `column` on, `stride` apart (0 repeats one element), in a vector."""
    if stride == 1:
        return f"vload_upto({row} + {column}, {count})"
    return f"vload_s({row} + {column} * {c_dim(stride)}, {c_dim(stride)}, {count})"


def store_columns(row: str, stride: Dim, value: str, column: str = "j", count: str = "n") -> str:
    """The statement that writes `count` elements of a vector to a row from `column` on."""
    if stride == 1:
        return f"vstore_upto({row} + {column}, {value}, {count});"
    return f"vstore_s({row} + {column} * {c_dim(stride)}, {c_dim(stride)}, {value}, {count});"


def entry_function(spec: KernelSpec, body: Sequence[str]) -> str:
    """The exported function of a kernel around `body`, with the symbols that it uses declared."""
    lines = "\n".join(indent([*needed(symbol_declarations(spec.symbols), body), *body]))
    return f'extern "C" void qk_{spec.name}(qc_ctx* ctx, void* const* op, const int64_t* sym) {{\n{lines}\n}}\n'


def task_function(spec: KernelSpec, body: Sequence[str], name: str = "task") -> str:
    """A static task function `qk_<spec>_<name>(arg, task, scratch)`. It declares `call` and the symbols if they are
    used."""
    declarations = [
        "const qc_call* const call = (const qc_call*)arg;",
        *symbol_declarations(spec.symbols, "call->sym"),
    ]
    lines = "\n".join(indent([*needed(declarations, body), *body]))
    return f"static void qk_{spec.name}_{name}(void* arg, int64_t task, char* scratch) {{\n{lines}\n}}\n"
