"""The `quantize_cache` template: keys and values as rows of a cache, over cache.h."""

from __future__ import annotations

from qcompiler.kernels.cpu.text import entry_function, pointer, task_function
from qcompiler.kernels.text import c_dim, header_comment, indent, offset, unravel
from qcompiler.plan.dims import product
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.quantize_cache import QuantizeCacheKernel


def headers(spec: KernelSpec) -> tuple[str, ...]:
    return ("cache.h",)


def scratch_bytes(spec: KernelSpec, isa: str) -> int:
    """None: a row is read twice."""
    return 0


def emit(spec: KernelSpec, isa: str) -> str:
    """One task processes a share of the rows."""
    body, (x, out) = spec.body, spec.operands
    assert isinstance(body, QuantizeCacheKernel)
    names, sizes = ["o", "m", "i"], [body.outer, body.middle, body.inner]
    rows = c_dim(product(sizes))
    one = "qc_quantise_int4_row" if body.kind == "int4" else f"qc_quantise_cache_row<qc_code_{body.kind}>"
    task = [
        pointer(x, 0, "x", "call->op"),
        pointer(out, 1, "out", "call->op"),
        f"const int64_t rows = {rows}, tasks = qc_tasks(rows, {2 * body.cols});",
        "for (int64_t row = qc_share(rows, task, tasks); row < qc_share(rows, task + 1, tasks); row++) {",
        *indent(unravel("row", names, sizes)),
        *indent([f"(void){name};" for name in names]),
        f"    {one}(x + {offset(x, [*names, '0'])}, {body.cols},",
        f"        out + {offset(out, [*names, '0'])});",
        "}",
    ]
    launch = [f"qc_run(ctx, op, sym, qc_tasks({rows}, {2 * body.cols}), qk_{spec.name}_task);"]
    head = header_comment(spec, f"rows of {body.kind} with their scales; rows shared among tasks")
    return "\n".join([head, task_function(spec, task), entry_function(spec, launch)])
