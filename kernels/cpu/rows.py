"""Prints a `Rows` for the CPU: tasks share the rows, and every pass over a row takes 16 columns at once.

A row is read again by every pass, so that no scratch grows with it. An f32 result holds what is kept between the
passes; for narrower results it is computed twice.
"""

from __future__ import annotations

from collections.abc import Mapping

from qcompiler.kernels.cpu.text import entry_function, load_columns, pointer, store_columns, task_function
from qcompiler.kernels.cpu.vector import VECTOR_FORM
from qcompiler.kernels.items import by_role
from qcompiler.kernels.rows import Fold, Keep, Rows, Value, expression, names_of, row_indices
from qcompiler.kernels.scalar import SCALAR_FORM
from qcompiler.kernels.text import c_dim, header_comment, indent
from qcompiler.plan.kernel import KernelSpec, Operand


def write(spec: KernelSpec, form: Rows) -> str:
    """One task processes a share of the rows."""
    operands = by_role(spec)
    cols = c_dim(form.cols)
    task = [
        *(pointer(operand, i, name, "call->op") for i, (name, operand) in enumerate(operands.items())),
        f"const int64_t rows = {c_dim(form.rows)}, cols = {cols}, tasks = qc_tasks(rows, {form.cost} * cols);",
        "for (int64_t row = qc_share(rows, task, tasks); row < qc_share(rows, task + 1, tasks); row++) {",
        *indent(row_lines(form, operands)),
        "}",
    ]
    launch = [f"qc_run(ctx, op, sym, qc_tasks({c_dim(form.rows)}, {form.cost} * {cols}), qk_{spec.name}_task);"]
    head = header_comment(spec, f"{form.note}; rows shared among tasks")
    return "\n".join([head, task_function(spec, task), entry_function(spec, launch)])


def row_lines(form: Rows, operands: Mapping[str, Operand]) -> list[str]:
    """The passes over one row, number `row` of `cols` columns. `columns` are the vectors that equations read, `values`
    the floats of the row."""
    out = operands["out"]
    lines = [*form.places(), *(_begin(name, each) for name, each in operands.items() if row_indices(each))]
    values = form.literals()
    columns = {name: f"vset({literal})" for name, literal in values.items()}
    columns |= {name: _read(name, operand) for name, operand in operands.items() if name != "out"}
    kept = ""  # the name of what the next pass holds in out
    for step in form.steps:
        if isinstance(step, Value):
            lines.append(f"const float {step.name} = {expression(step.of, values, SCALAR_FORM)};")
        elif isinstance(step, Keep):
            columns[step.name] = expression(step.of, columns, VECTOR_FORM)
            kept = step.name if out.dtype == "f32" else ""
            continue
        else:
            hold: list[str] = []
            if kept and kept in names_of(step.of):
                hold = [f"const vf {kept} = {columns[kept]};", store_columns("out_row", out.strides[-1], kept)]
                columns[kept] = kept
            lines += _fold(step, expression(step.of, columns, VECTOR_FORM), hold)
            if hold:
                columns[kept], kept = load_columns("out_row", out.strides[-1]), ""
        values[step.name], columns[step.name] = step.name, f"vset({step.name})"
    write = [
        f"const vf y = {expression(form.result, columns, VECTOR_FORM)};",
        store_columns("out_row", out.strides[-1], "y"),
    ]
    return [*lines, "qc_columns(cols, [&](int64_t j, int n) QC_BODY {", *indent(write), "});"]


def _begin(name: str, operand: Operand) -> str:
    """The statement that declares where a row begins."""
    steps = zip(row_indices(operand), operand.strides, strict=False)
    terms = [f"{index} * {c_dim(stride)}" for index, stride in steps if stride != 0]
    return f"const auto {name}_row = {' + '.join([name, *terms])};"


def _read(name: str, operand: Operand) -> str:
    """The vector of an operand's columns."""
    return load_columns(f"{name}_row" if row_indices(operand) else name, operand.strides[-1])


def _fold(fold: Fold, value: str, hold: list[str]) -> list[str]:
    """The statement that folds a row; `hold` stands before the value. Lanes behind the row's end must add nothing:
    those of an operand are zero."""
    if fold.kind == "max":
        body = [*hold, f"return {value};"]
    else:
        body = [*hold, f"const vf v = {value};"]
        each = "v * v" if fold.kind == "squares" else "v"
        body.append(f"return {each};" if fold.of == "x" else f"return vsel(vfirst(n), {each}, vzero());")
    kind = "max" if fold.kind == "max" else "sum"
    head = f"const float {fold.name} = qc_{kind}_columns(cols, [&](int64_t j, int n) QC_BODY {{"
    return [head, *indent(body), "});"]
