"""Sort and top-k along one dim: a heap in the result's own row of indices, then the values.

Top-k keeps a heap of the k best and visits each element once. The order is total (equal values by position), so the
result does not depend on the algorithm or on threads.
"""

from __future__ import annotations

from qcompiler.kernels.cpu.text import entry_function, pointer, task_function
from qcompiler.kernels.text import STORAGE_TYPES, c_dim, header_comment, indent, offset
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.order import OrderKernel


def headers(spec: KernelSpec) -> tuple[str, ...]:
    return ("order.h",)


def scratch_bytes(spec: KernelSpec, isa: str) -> int:
    return 0


def emit(spec: KernelSpec, isa: str) -> str:
    """Items are (outer, inner) pairs; each is one row."""
    body = spec.body
    assert isinstance(body, OrderKernel)
    x, values, indices = spec.operands
    items = f"{c_dim(body.outer)} * {c_dim(body.inner)}"
    cost = f"16 * {c_dim(body.length)}"
    kind = f"qc_order<{STORAGE_TYPES[x.dtype]}, {str(body.descending).lower()}>"
    row = [
        f"const {STORAGE_TYPES[x.dtype]}* const from = x + {offset(x, ['o', '0', 'n'])};",
        f"int64_t* const order = indices + {offset(indices, ['o', '0', 'n'])};",
        f"{kind}{{from, {c_dim(x.strides[1])}, order, {c_dim(indices.strides[1])}}}"
        f".run({c_dim(body.length)}, {c_dim(body.count)});",
        f"for (int64_t k = 0; k < {c_dim(body.count)}; k++)",
        f"    values[{offset(values, ['o', 'k', 'n'])}] = "
        f"from[order[k * {c_dim(indices.strides[1])}] * {c_dim(x.strides[1])}];",
    ]
    task = [
        pointer(x, 0, "x", "call->op"),
        pointer(values, 1, "values", "call->op"),
        pointer(indices, 2, "indices", "call->op"),
        f"const int64_t items = {items}, tasks = qc_tasks(items, {cost});",
        "for (int64_t item = qc_share(items, task, tasks); item < qc_share(items, task + 1, tasks); item++) {",
        f"    const int64_t o = item / {c_dim(body.inner)}, n = item % {c_dim(body.inner)};",
        "    (void)o;",
        "    (void)n;",
        *indent(row),
        "}",
    ]
    launch = [f"qc_run(ctx, op, sym, qc_tasks({items}, {cost}), qk_{spec.name}_task);"]
    head = header_comment(spec, "a heap per row; equal values by position, NaN the largest")
    return "\n".join([head, task_function(spec, task), entry_function(spec, launch)])
