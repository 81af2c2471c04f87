"""Running folds along the middle dim, in order: sums, products, minima, maxima, log-sum-exp.

f32 and narrower floats accumulate in fp32, with one rounding per element for narrow results. f64 accumulates in f64.
Integers, and booleans with an integer result, accumulate in the result's type and wrap.
"""

from __future__ import annotations

from qcompiler.kernels.cpu.gather import offset
from qcompiler.kernels.cpu.text import entry_function, pointer, task_function
from qcompiler.kernels.scalar import fold_text
from qcompiler.kernels.text import VALUE_TYPES, c_dim, header_comment, indent
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.scan import ScanKernel

BLOCK = 64
"""Adjacent columns that one item sums side by side: 256 bytes of f32, whole cache lines."""


def headers(spec: KernelSpec) -> tuple[str, ...]:
    return ()


def scratch_bytes(spec: KernelSpec, isa: str) -> int:
    return 0


def _logaddexp(kind: str) -> str:
    """log(exp(sum) + exp(value)), relative to the larger one. Two equal infinities give that infinity; NaN wins."""
    exp, log1p = ("qc_exp", "qc_log1p") if kind == "float" else ("exp", "log1p")
    top, low = "qc_maximum(sum[n], value)", "qc_minimum(sum[n], value)"
    return f"{top} == {low} && !(fabs({top}) < INFINITY) ? {top} : {top} + {log1p}({exp}({low} - {top}))"


def emit(spec: KernelSpec, isa: str) -> str:
    """Items are (outer, block of inner) pairs; each walks its elements in order."""
    body = spec.body
    assert isinstance(body, ScanKernel)
    x, out = spec.operands
    kind = VALUE_TYPES[out.dtype]
    blocks = f"qc_floordiv({c_dim(body.inner)} + {BLOCK - 1}, {BLOCK})"
    items = f"{c_dim(body.outer)} * {blocks}"
    cost = f"2 * {c_dim(body.length)} * qc_min({BLOCK}, {c_dim(body.inner)})"
    value = f"({kind})qc_load(x + {offset(x, ['o', 'i', 'first + n'])})"
    fold = _logaddexp(kind) if body.fold == "logaddexp" else fold_text(body.fold, out.dtype, "sum[n]", "value")
    step = [
        f"const {kind} value = {value};",
        f"sum[n] = i == 0 ? value : ({kind})({fold});",
        f"qc_store(out + {offset(out, ['o', 'i', 'first + n'])}, sum[n]);",
    ]
    task = [
        pointer(x, 0, "x", "call->op"),
        pointer(out, 1, "out", "call->op"),
        f"const int64_t blocks = {blocks}, items = {items}, tasks = qc_tasks(items, {cost});",
        "for (int64_t item = qc_share(items, task, tasks); item < qc_share(items, task + 1, tasks); item++) {",
        f"    const int64_t o = item / blocks, first = item % blocks * {BLOCK};",
        f"    const int64_t count = qc_min({BLOCK}, {c_dim(body.inner)} - first);",
        "    (void)o;",
        f"    {kind} sum[{BLOCK}] = {{}};",
        f"    for (int64_t i = 0; i < {c_dim(body.length)}; i++)",
        "        for (int64_t n = 0; n < count; n++) {",
        *indent(step, 3),
        "        }",
        "}",
    ]
    launch = [
        f"qc_run(ctx, op, sym, qc_tasks({items}, {cost}), qk_{spec.name}_task);",
    ]
    head = header_comment(spec, f"running folds ({body.fold}), in order")
    return "\n".join([head, task_function(spec, task), entry_function(spec, launch)])
