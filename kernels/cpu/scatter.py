"""Scatter along one dim: entries replace the element at their index, or fold into it, in the order of the index.

All indices are checked before anything is written. Tasks split `outer` and `inner` but never the entries, so equal
indices are applied in the same order with any number of threads.
"""

from __future__ import annotations

from qcompiler.kernels.cpu.gather import check_indices, offset
from qcompiler.kernels.cpu.text import entry_function, pointer, task_function
from qcompiler.kernels.scalar import fold_text
from qcompiler.kernels.text import VALUE_TYPES, c_dim, header_comment, indent
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.scatter import ScatterKernel

BLOCK = 64
"""Adjacent columns that one item processes."""


def headers(spec: KernelSpec) -> tuple[str, ...]:
    return ()


def scratch_bytes(spec: KernelSpec, isa: str) -> int:
    return 0


def emit(spec: KernelSpec, isa: str) -> str:
    """Items are (outer, block of inner) pairs; each walks the entries in order."""
    body = spec.body
    assert isinstance(body, ScatterKernel)
    index, src, out = spec.operands
    kind = VALUE_TYPES[out.dtype]
    blocks = f"qc_floordiv({c_dim(body.inner)} + {BLOCK - 1}, {BLOCK})"
    items = f"{c_dim(body.outer)} * {blocks}"
    cost = f"4 * {c_dim(body.count)} * qc_min({BLOCK}, {c_dim(body.inner)})"
    write = [
        f"int64_t at = (int64_t)index[{offset(index, ['o', 'i', 'n'])}];",
        f"if (at < 0) at += {c_dim(body.length)};",
        f"const {kind} value = qc_load(src + {offset(src, ['o', 'i', 'n'])});",
        f"const auto place = out + {offset(out, ['o', 'at', 'n'])};",
        f"qc_store(place, ({kind})({fold_text(body.fold, out.dtype, f'({kind})qc_load(place)', 'value')}));",
    ]
    task = [
        *(
            pointer(o, i, name, "call->op")
            for i, (name, o) in enumerate((("index", index), ("src", src), ("out", out)))
        ),
        f"const int64_t blocks = {blocks}, items = {items}, tasks = qc_tasks(items, {cost});",
        "for (int64_t item = qc_share(items, task, tasks); item < qc_share(items, task + 1, tasks); item++) {",
        f"    const int64_t o = item / blocks, first = item % blocks * {BLOCK};",
        f"    const int64_t end = qc_min(first + {BLOCK}, {c_dim(body.inner)});",
        "    (void)o;",
        f"    for (int64_t i = 0; i < {c_dim(body.count)}; i++)",
        "        for (int64_t n = first; n < end; n++) {",
        *indent(write, 3),
        "        }",
        "}",
    ]
    sizes = [("o", body.outer), ("i", body.count), ("n", body.inner)]
    launch = [
        pointer(index, 0, "index"),
        *check_indices(index, sizes, body.length),
        f"qc_run(ctx, op, sym, qc_tasks({items}, {cost}), qk_{spec.name}_task);",
    ]
    head = header_comment(spec, f"scatter ({body.fold}), entries in order; indices checked first, on the caller")
    return "\n".join([head, task_function(spec, task), entry_function(spec, launch)])
