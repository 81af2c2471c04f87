"""The routing of a row to its experts: the softmax of a row on the stack, and a heap of the k largest entries.

    alignas(64) float p[8];
    { … the softmax kernel's code for one row, with the result in p … }
    qc_order<float, true>{p, 1, indices, 1}.run(8, 2);
    total = p[indices[0]] + p[indices[1]];
    weights[k] = p[indices[k]] / total;

So the bits are those of a softmax, a top-k and a division in kernels of their own. The sum runs from the largest weight
to the smallest one; a reduction of its own adds in another order from three weights on.
"""

from __future__ import annotations

from collections.abc import Mapping

from qcompiler.kernels.cpu.rows import row_lines
from qcompiler.kernels.cpu.text import entry_function, pointer, task_function
from qcompiler.kernels.items import by_role
from qcompiler.kernels.kinds.softmax import softmax_of
from qcompiler.kernels.text import STORAGE_TYPES, c_dim, header_comment, indent, offset
from qcompiler.plan.kernel import KernelSpec, Operand
from qcompiler.plan.kinds.route import RouteKernel


def headers(spec: KernelSpec) -> tuple[str, ...]:
    return ("order.h", "rows.h")


def scratch_bytes(spec: KernelSpec, isa: str) -> int:
    return 0


def emit(spec: KernelSpec, isa: str) -> str:
    """Tasks share the rows."""
    body = spec.body
    assert isinstance(body, RouteKernel)
    operands = by_role(spec)
    cost = 32 * body.cols
    task = [
        *(pointer(operand, i, name, "call->op") for i, (name, operand) in enumerate(operands.items())),
        f"const int64_t rows = {c_dim(body.rows)}, tasks = qc_tasks(rows, {cost});",
        "for (int64_t row = qc_share(rows, task, tasks); row < qc_share(rows, task + 1, tasks); row++) {",
        *indent(_row(body, operands)),
        "}",
    ]
    launch = [f"qc_run(ctx, op, sym, qc_tasks({c_dim(body.rows)}, {cost}), qk_{spec.name}_task);"]
    of = "all of a row" if body.scores == "all" else "the chosen ones"
    head = header_comment(spec, f"softmax of {of}, a heap of the {body.count} largest; rows shared among tasks")
    return "\n".join([head, task_function(spec, task), entry_function(spec, launch)])


def _row(body: RouteKernel, operands: Mapping[str, Operand]) -> list[str]:
    """One row. `w` are the weights in order, best first."""
    x, weights, indices = (operands[name] for name in ("x", "weights", "indices"))
    step = c_dim(indices.strides[1])
    order = f"int64_t* const order = indices + {offset(indices, ['row', '0'])};"
    if body.scores == "all":
        lines = [
            *_softmax("p", x, body.cols),
            order,
            f"qc_order<float, true>{{p, 1, order, {step}}}.run({body.cols}, {body.count});",
            f"float w[{body.count}];",
            f"for (int64_t k = 0; k < {body.count}; k++) w[k] = p[order[k * {step}]];",
        ]
    else:
        kind, along = STORAGE_TYPES[x.dtype], c_dim(x.strides[1])
        chosen = Operand(name="chosen", dtype="f32", access="r", shape=(1, body.count), strides=(0, 1))
        lines = [
            f"const {kind}* const scores = x + {offset(x, ['row', '0'])};",
            order,
            f"qc_order<{kind}, true>{{scores, {along}, order, {step}}}.run({body.cols}, {body.count});",
            f"alignas(64) float chosen[{body.count}];",
            f"for (int64_t k = 0; k < {body.count}; k++) chosen[k] = qc_load(scores + order[k * {step}] * {along});",
            *_softmax("w", chosen, body.count, source="chosen"),
        ]
    share = "w[k]"
    if body.normalise:
        lines += ["float total = w[0];", f"for (int64_t k = 1; k < {body.count}; k++) total += w[k];"]
        share = "w[k] / total"
    to = f"weights + {offset(weights, ['row', 'k'])}"
    return [*lines, f"for (int64_t k = 0; k < {body.count}; k++) qc_store({to}, {share});"]


def _softmax(to: str, x: Operand, cols: int, *, source: str | None = None) -> list[str]:
    """Declares `to`, the softmax of `cols` elements: of a row of x, or of the vector `source`."""
    out = Operand(name=to, dtype="f32", access="w", shape=(1, cols), strides=(0, 1))
    return [
        f"alignas(64) float {to}[{cols}];",
        "{",
        *([f"    const float* const x = {source};"] if source else []),
        f"    float* const out = {to};",
        f"    const int64_t cols = {cols};",
        *indent(row_lines(softmax_of(1, cols), {"x": x, "out": out})),
        "}",
    ]
