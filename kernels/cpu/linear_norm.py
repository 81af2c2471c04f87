"""The prologue of a linear: the calling thread makes the rows, normalised or int8, before it hands out the tasks.

    static void qk_<name>_rows(void* const* op, const int64_t* sym, float* rows)    the norm kernel's code for each row

    qk_<name>_rows(op, sym, (float*)(ctx->scratch + 4096));
    job.x = ctx->scratch + 4096, job.x_row = 256, …

Normalised rows have the type of x. Rows of int8 are made from them, or from x. They lie behind the scratch of the
calling thread's own tasks, and every task reads them there. Normalised rows that others read as well lie in the operand
that keeps them instead. A norm of so few rows (plan/kinds/linear.py) would be one
task or two in a kernel of its own, and rows of int8 one task.
"""

from __future__ import annotations

from qcompiler.formats import int8_rows
from qcompiler.formats.int8_rows import KINDS, clip_factors
from qcompiler.kernels.cpu.rows import row_lines
from qcompiler.kernels.cpu.text import pointer, symbol_declarations
from qcompiler.kernels.items import by_role
from qcompiler.kernels.norm_prologue import affine_of, form_of, kept_of, norm_of
from qcompiler.kernels.scalar import float_literal
from qcompiler.kernels.text import STORAGE_TYPES, c_dim, indent, needed
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
    if body.norm is None and body.rows is None:
        return scratch
    assert isinstance(body.m, int)
    codes = 0 if body.rows is None else body.m * int8_rows.row_bytes(body.k)
    floats = 0 if body.norm is None or body.norm.keeps else body.m * body.k * ITEMSIZE[spec.operands[0].dtype]
    return begin_of_rows(scratch) + begin_of_rows(codes) + floats


def rows_function(spec: KernelSpec) -> str:
    """The function that writes the rows. Where rows of int8 are made of a norm, its rows lie behind them."""
    body = spec.body
    assert isinstance(body, LinearKernel)
    if body.rows is None:
        return _normalised(spec, "rows")
    x, width = spec.operands[0], int8_rows.row_bytes(body.k)
    kind, given, step = STORAGE_TYPES[x.dtype], "(const {0}*)op[0]", c_dim(x.strides[0])
    lines, before = list[str](), ""
    if body.norm is not None:
        place, kept = begin_of_rows(int(body.m) * width), kept_of(spec)
        before, given = _normalised(spec, "normed"), "normed"
        step = c_dim(norm_of(spec).operands[-1].strides[0])
        lines = [
            f"{kind}* const normed = ({kind}*){f'(out + {place})' if kept is None else f'op[{kept}]'};",
            f"qk_{spec.name}_normed(op, sym, normed);",
        ]
    factor, fixed = clip_factors(body.rows.value) if body.rows.kind == "tensor" else (0.0, 0.0)
    numbers = ", ".join(float_literal(float(number), "f32") for number in (factor, fixed, 0.0))
    lines += [
        f"const {kind}* const x = {given.format(kind)};",
        f"for (int64_t row = 0; row < {body.m}; row++)",
        f"    qi_quantise_row<{KINDS.index(body.rows.kind)}>(",
        f"        x + row * {step}, {body.k}, {numbers}, nullptr, out + row * {width});",
    ]
    lines = indent([*needed(symbol_declarations(spec.symbols), lines), *lines])
    head = f"static void qk_{spec.name}_rows(void* const* op, const int64_t* sym, int8_t* const out) {{"
    return before + "\n".join([head, *lines, "}\n"])


def _normalised(spec: KernelSpec, name: str) -> str:
    """The function `qk_<spec>_<name>` that writes the normalised rows."""
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
    return f"static void qk_{spec.name}_{name}(void* const* op, const int64_t* sym, {kind}* const out) {{\n{body}\n}}\n"


def source(spec: KernelSpec, scratch: int) -> list[str]:
    """Statements that make the rows, and set in the job where they are. `scratch` is the product's own."""
    body = spec.body
    assert isinstance(body, LinearKernel)
    kind, place = STORAGE_TYPES[spec.operands[0].dtype], f"(ctx->scratch + {begin_of_rows(scratch)})"
    if body.rows is not None:
        kind, width = "int8_t", str(int8_rows.row_bytes(body.k))
    else:
        width, kept = c_dim(norm_of(spec).operands[-1].strides[0]), kept_of(spec)
        place = place if kept is None else f"op[{kept}]"
    return [
        f"{kind}* const rows = ({kind}*){place};",
        f"qk_{spec.name}_rows(op, sym, rows);",
        f"job.x = (const char*)rows, job.x_row = {width}, job.x_col = 1;",
    ]
