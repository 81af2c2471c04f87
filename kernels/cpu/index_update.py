"""Updates rows along one dim in place, like `index_copy`: the write of a KV cache.

All indices are checked before anything is written. A negative index is out of range, as in torch.index_copy: counted
from the end, a position before the first one would overwrite the last slot of the cache. Tasks split `outer` and
`inner` but never the index list, so among equal indices the last one wins with any number of threads.
"""

from __future__ import annotations

from qcompiler.kernels.cpu.items import check_indices
from qcompiler.kernels.cpu.text import entry_function, pointer, task_function
from qcompiler.kernels.items import Index
from qcompiler.kernels.text import c_dim, header_comment, indent, offset
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.index_update import IndexUpdateKernel

BLOCK = 1024
"""Elements of the inner dim that one item covers."""


def headers(spec: KernelSpec) -> tuple[str, ...]:
    return ()


def scratch_bytes(spec: KernelSpec, isa: str) -> int:
    return 0


def emit(spec: KernelSpec, isa: str) -> str:
    """Items are (outer, block of inner) pairs; each walks the index list in order."""
    body = spec.body
    assert isinstance(body, IndexUpdateKernel)
    x, index, src = spec.operands
    blocks = f"qc_floordiv({c_dim(body.inner)} + {BLOCK - 1}, {BLOCK})"
    items = f"{c_dim(body.outer)} * {blocks}"
    cost = f"2 * {c_dim(body.count)} * qc_min({BLOCK}, {c_dim(body.inner)})"
    if x.strides[-1] == 1 and src.strides[-1] == 1:
        copy = [
            f"memcpy(x + {offset(x, ['o', 'at', 'first'])}, src + {offset(src, ['o', 'i', 'first'])}, "
            "sizeof(*x) * (size_t)count);"
        ]
    else:
        copy = [
            "for (int64_t n = first; n < first + count; n++) "
            f"x[{offset(x, ['o', 'at', 'n'])}] = src[{offset(src, ['o', 'i', 'n'])}];"
        ]
    task = [
        *(pointer(o, i, name, "call->op") for i, (name, o) in enumerate((("x", x), ("index", index), ("src", src)))),
        f"const int64_t blocks = {blocks}, items = {items}, tasks = qc_tasks(items, {cost});",
        "for (int64_t item = qc_share(items, task, tasks); item < qc_share(items, task + 1, tasks); item++) {",
        f"    const int64_t o = item / blocks, first = item % blocks * {BLOCK};",
        f"    const int64_t count = qc_min({BLOCK}, {c_dim(body.inner)} - first);",
        "    (void)o;",
        f"    for (int64_t i = 0; i < {c_dim(body.count)}; i++) {{",
        f"        const int64_t at = (int64_t)index[{offset(index, ['i'])}];",
        *indent(copy, 2),
        "    }",
        "}",
    ]
    launch = [
        pointer(index, 1, "index"),
        *check_indices(Index(("i",), body.length, from_end=False), index, {"i": body.count}),
        f"qc_run(ctx, op, sym, qc_tasks({items}, {cost}), qk_{spec.name}_task);",
    ]
    head = header_comment(spec, "rows written in the order of the index list")
    return "\n".join([head, task_function(spec, task), entry_function(spec, launch)])
