"""Gather along one dim: `take` (one index list for all) and `along` (one index per element).

All indices are checked before anything is read, in order and on the calling thread, so the index in the error message
does not depend on the number of threads. Negative indices count from the end.
"""

from __future__ import annotations

from collections.abc import Sequence

from qcompiler.kernels.cpu.text import entry_function, pointer, task_function
from qcompiler.kernels.gather_order import counts_fastest
from qcompiler.kernels.text import c_dim, header_comment, indent
from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel import KernelSpec, Operand
from qcompiler.plan.kinds.gather import GatherKernel


def headers(spec: KernelSpec) -> tuple[str, ...]:
    return ()


def scratch_bytes(spec: KernelSpec, isa: str) -> int:
    return 0


def offset(operand: Operand, indices: Sequence[str]) -> str:
    """Element offset of an operand at the given index texts, one per dim."""
    terms = [
        index if stride == 1 else f"({index}) * {c_dim(stride)}"
        for index, stride in zip(indices, operand.strides, strict=True)
        if stride != 0 and index != "0"
    ]
    return " + ".join(terms) or "0"


def check_indices(
    index: Operand, sizes: Sequence[tuple[str, Dim]], length: Dim, *, least: str | None = None
) -> list[str]:
    """Statements that report the first index outside [least, length) and leave the kernel. `least` is -length or 0."""
    names = [name for name, _ in sizes]
    least = f"-{c_dim(length)}" if least is None else least
    lines = [
        f"const int64_t value = (int64_t)index[{offset(index, names)}];",
        f"if (value < {least} || value >= {c_dim(length)}) {{",
        "    ctx->error_code = QC_INDEX_OUT_OF_RANGE;",
        "    ctx->error_value = value;",
        f"    ctx->error_limit = {c_dim(length)};",
        "    return;",
        "}",
    ]
    for (name, size), stride in reversed(list(zip(sizes, index.strides, strict=True))):
        once = f"{name} < 1 && " if stride == 0 else ""  # a broadcast index list is checked once
        lines = [f"for (int64_t {name} = 0; {once}{name} < {c_dim(size)}; {name}++) {{", *indent(lines), "}"]
    return lines


def emit(spec: KernelSpec, isa: str) -> str:
    """Items are (outer, count) pairs that each copy `inner` elements, or (outer, inner) pairs that each copy `count`
    elements."""
    body = spec.body
    assert isinstance(body, GatherKernel)
    x, index, out = spec.operands
    take = body.mode == "take"
    (mid, per_item), (run, many) = ("i", body.count), ("n", body.inner)
    if counts_fastest(body, out):
        (mid, per_item), (run, many) = (run, many), (mid, per_item)
    cost = f"4 * {c_dim(many)}"
    items = f"{c_dim(body.outer)} * {c_dim(per_item)}"
    index_at = ["i"] if take else ["o", "i", "n"]
    position = [
        f"int64_t at = (int64_t)index[{offset(index, index_at)}];",
        f"if (at < 0) at += {c_dim(body.length)};",
    ]
    copy = f"out[{offset(out, ['o', 'i', 'n'])}] = x[{offset(x, ['o', 'at', 'n'])}];"
    loop = f"for (int64_t {run} = 0; {run} < {c_dim(many)}; {run}++)"
    contiguous = take and x.strides[-1] == 1 and out.strides[-1] == 1
    if contiguous:
        row = [
            *position,
            f"memcpy(out + {offset(out, ['o', 'i', '0'])}, x + {offset(x, ['o', 'at', '0'])}, "
            f"sizeof(*out) * (size_t){c_dim(body.inner)});",
        ]
    elif take:
        row = [*position, f"{loop} {copy}"]
    else:
        row = [f"{loop} {{", *indent([*position, copy]), "}"]
    pointers = [
        pointer(o, i, name, "call->op") for i, (name, o) in enumerate((("x", x), ("index", index), ("out", out)))
    ]
    task = [
        *pointers,
        f"const int64_t items = {items}, tasks = qc_tasks(items, {cost});",
        "for (int64_t item = qc_share(items, task, tasks); item < qc_share(items, task + 1, tasks); item++) {",
        f"    const int64_t o = item / {c_dim(per_item)}, {mid} = item % {c_dim(per_item)};",
        "    (void)o;",
        *indent(row),
        "}",
    ]
    sizes: list[tuple[str, Dim]] = [("i", body.count)]
    if not take:
        sizes = [("o", body.outer), ("i", body.count), ("n", body.inner)]
    launch = [
        pointer(index, 1, "index"),
        *check_indices(index, sizes, body.length),
        f"qc_run(ctx, op, sym, qc_tasks({items}, {cost}), qk_{spec.name}_task);",
    ]
    head = header_comment(spec, f"gather ({body.mode}); indices checked first, on the caller")
    return "\n".join([head, task_function(spec, task), entry_function(spec, launch)])
