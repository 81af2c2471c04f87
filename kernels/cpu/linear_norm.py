"""The prologue of a linear: the calling thread makes the rows, normalised or int8, before it hands out the tasks.

    static void qk_<name>_rows(const float* x, void* const* op, const int64_t* sym, float* rows)
                                the norm kernel's code for each row

    qk_<name>_rows((const float*)op[0], op, sym, (float*)(ctx->scratch + 4096));
    job.x = ctx->scratch + 4096, job.x_row = 256, …

Rows of a norm have the type of x. A second norm reads the rows of the first, and rows of int8 are made of the last
norm's, or of x. Each lies behind what comes before it in the scratch of the calling thread, and every task reads the
last ones there. Rows that others read as well, of a norm or of int8, lie in the operand that keeps them instead. A norm
of so few rows (plan/kinds/linear.py) would be one task or two in a kernel of its own, and rows of int8 one task.
"""

from __future__ import annotations

from qcompiler.formats import int8_rows
from qcompiler.formats.int8_rows import KINDS, clip_factors
from qcompiler.kernels.cpu.rows import row_lines
from qcompiler.kernels.cpu.text import pointer, symbol_declarations
from qcompiler.kernels.items import by_role
from qcompiler.kernels.norm_prologue import Stage, kept_codes_of, stages_of
from qcompiler.kernels.scalar import float_literal
from qcompiler.kernels.text import STORAGE_TYPES, c_dim, indent, needed
from qcompiler.plan.kernel import ITEMSIZE, KernelSpec
from qcompiler.plan.kinds.linear import LinearKernel

CACHE_LINE = 64


def begin_of_rows(scratch: int) -> int:
    """Where the rows begin, behind `scratch` bytes."""
    return -(-scratch // CACHE_LINE) * CACHE_LINE


def scratch_with_rows(spec: KernelSpec, scratch: int) -> int:
    """Bytes for the product's own `scratch`, and for the rows of norms and of int8."""
    body = _linear(spec)
    if not body.norms and body.rows is None:
        return scratch
    assert isinstance(body.m, int)
    codes = 0 if body.rows is None or body.keeps_codes else body.m * int8_rows.row_bytes(body.k)
    room = begin_of_rows(body.m * body.k * ITEMSIZE[spec.operands[0].dtype])
    return begin_of_rows(scratch) + room * sum(stage.kept is None for stage in stages_of(spec)) + codes


def rows_functions(spec: KernelSpec) -> str:
    """A function for each stage: `qk_<spec>_rows0`, … for the norms, `qk_<spec>_codes` for rows of int8."""
    body, x = _linear(spec), spec.operands[0]
    made = "".join(_normalised(spec, number, stage) for number, stage in enumerate(stages_of(spec)))
    if body.rows is None:
        return made
    kind = STORAGE_TYPES[x.dtype]
    factor, fixed = clip_factors(body.rows.value) if body.rows.kind == "tensor" else (0.0, 0.0)
    numbers = ", ".join(float_literal(float(number), "f32") for number in (factor, fixed, 0.0))
    lines = [
        f"for (int64_t row = 0; row < {body.m}; row++)",
        f"    qi_quantise_row<{KINDS.index(body.rows.kind)}>(",
        f"        x + row * x_width, {body.k}, {numbers}, nullptr, out + row * width);",
    ]
    given = f"const {kind}* const x, const int64_t x_width, int8_t* const out, const int64_t width"
    return made + "\n".join([f"static void qk_{spec.name}_codes({given}) {{", *indent(lines), "}\n"])


def _normalised(spec: KernelSpec, number: int, stage: Stage) -> str:
    """The function that writes the rows of a norm."""
    form, kind, operands = stage.form, STORAGE_TYPES[spec.operands[0].dtype], by_role(stage.spec)
    lines = [
        *(pointer(operands[role], place, role) for role, place in stage.places.items()),
        f"const int64_t cols = {form.cols};",
        f"for (int64_t row = 0; row < {form.rows}; row++) {{",
        *indent(row_lines(form, operands)),
        "}",
    ]
    body = "\n".join(indent([*needed(symbol_declarations(spec.symbols), lines), *lines]))
    head = f"static void qk_{spec.name}_rows{number}("
    return f"{head}const {kind}* const x, void* const* op, const int64_t* sym, {kind}* const out) {{\n{body}\n}}\n"


def source(spec: KernelSpec, scratch: int) -> list[str]:
    """Statements that make the rows, and set in the job where they are. `scratch` is the product's own."""
    body, x = _linear(spec), spec.operands[0]
    kind, place = STORAGE_TYPES[x.dtype], begin_of_rows(scratch)
    rows, width, lines = f"(const {kind}*)op[0]", c_dim(x.strides[0]), list[str]()
    for number, stage in enumerate(stages_of(spec)):
        at = f"(ctx->scratch + {place})" if stage.kept is None else f"op[{stage.kept}]"
        lines += [
            f"{kind}* const rows{number} = ({kind}*){at};",
            f"qk_{spec.name}_rows{number}({rows}, op, sym, rows{number});",
        ]
        rows, width = f"rows{number}", c_dim(stage.width)
        if stage.kept is None:
            place = begin_of_rows(place + int(body.m) * body.k * ITEMSIZE[x.dtype])
    if body.rows is not None:
        kept = kept_codes_of(spec)
        at = f"(ctx->scratch + {place})" if kept is None else f"op[{kept}]"
        own = int8_rows.row_bytes(body.k) if kept is None else spec.operands[kept].strides[0]
        lines += [
            f"int8_t* const codes = (int8_t*){at};",
            f"qk_{spec.name}_codes({rows}, {width}, codes, {c_dim(own)});",
        ]
        rows, width = "codes", c_dim(own)
    return [*lines, f"job.x = (const char*){rows}, job.x_row = {width}, job.x_col = 1;"]


def _linear(spec: KernelSpec) -> LinearKernel:
    assert isinstance(spec.body, LinearKernel)
    return spec.body
