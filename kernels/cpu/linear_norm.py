"""A norm as the prologue of a linear: the calling thread normalises the rows of x before it hands out the tasks.

    static void qk_<name>_rows(void* const* op, const int64_t* sym, float* rows)    the norm kernel's code for each row

    qk_<name>_rows(op, sym, (float*)(ctx->scratch + 4096));
    job.x = ctx->scratch + 4096, job.x_row = 256, …

The normalised rows have the type of x. They lie behind the scratch of the calling thread's own tasks, and every task
reads them there. A norm of so few rows (plan/kinds/linear.py) would be one task or two in a kernel of its own.
"""

from __future__ import annotations

from qcompiler.kernels.cpu.rows import row_lines
from qcompiler.kernels.cpu.text import pointer, symbol_declarations
from qcompiler.kernels.items import by_role
from qcompiler.kernels.norm_prologue import affine_of, form_of, norm_of
from qcompiler.kernels.text import STORAGE_TYPES, indent, needed
from qcompiler.plan.kernel import ITEMSIZE, KernelSpec
from qcompiler.plan.kinds.linear import LinearKernel

CACHE_LINE = 64


def begin_of_rows(scratch: int) -> int:
    """Where the rows begin, behind `scratch` bytes."""
    return -(-scratch // CACHE_LINE) * CACHE_LINE


def scratch_with_rows(spec: KernelSpec, scratch: int) -> int:
    """Bytes for the product's own `scratch`, and for the rows if there is a norm."""
    body = spec.body
    assert isinstance(body, LinearKernel)
    if body.norm is None:
        return scratch
    assert isinstance(body.m, int)
    return begin_of_rows(scratch) + body.m * body.k * ITEMSIZE[spec.operands[0].dtype]


def rows_function(spec: KernelSpec) -> str:
    """The function that writes the normalised rows."""
    form, kind, operands = form_of(spec), STORAGE_TYPES[spec.operands[0].dtype], by_role(norm_of(spec))
    lines = [
        pointer(operands["x"], 0, "x"),
        *(pointer(operands[role], place, role) for role, place in affine_of(spec)),
        f"const int64_t cols = {form.cols};",
        f"for (int64_t row = 0; row < {form.rows}; row++) {{",
        *indent(row_lines(form, operands)),
        "}",
    ]
    body = "\n".join(indent([*needed(symbol_declarations(spec.symbols), lines), *lines]))
    return f"static void qk_{spec.name}_rows(void* const* op, const int64_t* sym, {kind}* const out) {{\n{body}\n}}\n"


def source(spec: KernelSpec, scratch: int) -> list[str]:
    """Statements that make the rows, and set in the job where they are. `scratch` is the product's own."""
    kind, form = STORAGE_TYPES[spec.operands[0].dtype], form_of(spec)
    return [
        f"{kind}* const rows = ({kind}*)(ctx->scratch + {begin_of_rows(scratch)});",
        f"qk_{spec.name}_rows(op, sym, rows);",
        f"job.x = (const char*)rows, job.x_row = {form.cols}, job.x_col = 1;",
    ]
