"""The routing of a row to its experts as CUDA C++: a warp per row, which keeps the row in registers.

The k largest entries are found one after the other: each thread offers the best of its columns, and the warp agrees on
one by five exchanges. The order is total (equal values by their places), so all threads find the same. Thread r keeps
the r-th; weights are added up in this order.
"""

from __future__ import annotations

from qcompiler.kernels.cuda.engines import CUDA_CORES
from qcompiler.kernels.cuda.geometry import CudaKernel
from qcompiler.kernels.cuda.rows import WARP, RowWalk, address, row_statements
from qcompiler.kernels.cuda.signature import signature
from qcompiler.kernels.items import by_role
from qcompiler.kernels.kinds.softmax import softmax_of
from qcompiler.kernels.scalar import precedes
from qcompiler.kernels.text import header_comment, indent
from qcompiler.plan.kernel import KernelSpec, Operand
from qcompiler.plan.kinds.route import RouteKernel

ENGINES = CUDA_CORES


def emit(spec: KernelSpec, arch: str) -> CudaKernel:
    """One routing for any architecture."""
    del arch
    body = spec.body
    assert isinstance(body, RouteKernel)
    operands, walk = by_role(spec), RowWalk.of(body.rows, body.cols)
    lines = [*_scores(body, operands["x"], walk), *_largest(body, walk)]
    if body.scores == "chosen":
        lines += _softmax_of_chosen(body.count)
    share = "weight / total" if body.normalise else "weight"
    lines += [
        f"if (lane < {body.count}) {{",
        "    const int j = lane;",
        f"    qc_store({address('weights', operands['weights'])}, {share});",
        f"    *({address('indices', operands['indices'])}) = place;",
        "}",
    ]
    note = f"the {body.count} largest of {body.cols} one after the other"
    head = header_comment(spec, note, walk.note())
    text = "\n".join([head, signature(spec, walk.block, names=list(operands)), *indent(walk.around(lines)), "}\n"])
    return CudaKernel(text, walk.geometry(), notes=(note,))


def _scores(body: RouteKernel, x: Operand, walk: RowWalk) -> list[str]:
    """`score[i]`: what is ordered, of this thread's columns."""
    if body.scores == "all":
        lines, result = row_statements(softmax_of(body.rows, body.cols), {"x": x}, walk)
    else:
        lines, result = walk.load(address("x", x)), "kept[i]"
    return [*lines, f"float score[{walk.per_thread}];", *walk.each([f"score[i] = {result};"], guard=False)]


def _largest(body: RouteKernel, walk: RowWalk) -> list[str]:
    """`weight` and `place` of the entry that this thread keeps, and `total`, the sum of all that are kept."""
    mine = precedes("greater", "f32", "score[i]", "best", "j", "at")
    theirs = precedes("greater", "f32", "other", "best", "where", "at")
    offers = f"(taken >> i & 1u) == 0 && (at < 0 || {mine})"
    return [
        "unsigned taken = 0;  // bit i: column i of this thread is chosen",
        "float weight = 0.0f, total = 0.0f;",
        "int place = 0;",
        "#pragma unroll 1",
        f"for (int rank = 0; rank < {body.count}; rank++) {{",
        "    float best = 0.0f;",
        "    int at = -1;",
        *indent(walk.each([f"if ({offers}) best = score[i], at = j;"])),
        "#pragma unroll",
        f"    for (int gap = {WARP // 2}; gap > 0; gap /= 2) {{",
        "        const float other = __shfl_xor_sync(QC_ALL_LANES, best, gap);",
        "        const int where = __shfl_xor_sync(QC_ALL_LANES, at, gap);",
        f"        if (where >= 0 && (at < 0 || {theirs})) best = other, at = where;",
        "    }",
        f"    if (at % {WARP} == lane) taken |= 1u << (at / {WARP});",
        "    if (rank == lane) weight = best, place = at;",
        "    total = rank == 0 ? best : total + best;",
        "}",
    ]


def _softmax_of_chosen(count: int) -> list[str]:
    """`weight` becomes its share among the first `count` threads."""
    own = f"lane < {count} ? weight : "
    return [
        f"const float top = qc_warp_max({own}-INFINITY);",
        f"const float power = lane < {count} ? expf(weight - top) : 0.0f;",
        "const float sum = qc_warp_sum(power);",
        "weight = power * (1.0f / sum);",
    ]
