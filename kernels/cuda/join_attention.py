"""Joins the parts of an attention (attention_decode.py): a block for a query of a head, a thread for a column.

A thread asks for its column of up to `AHEAD` parts, and for the largest score and the total of one part, before it uses
any of them. So up to 64 parts take one trip to memory. The parts are added in their order: the same bits on every run.
"""

from __future__ import annotations

from qcompiler.kernels.cuda.attention_operands import place_of
from qcompiler.kernels.cuda.engines import CUDA_CORES
from qcompiler.kernels.cuda.geometry import CudaKernel, Geometry, SharedMemory
from qcompiler.kernels.cuda.rows import WARP
from qcompiler.kernels.cuda.signature import signature
from qcompiler.kernels.text import c_dim, header_comment, indent
from qcompiler.plan.dims import dim
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.join_attention import JoinAttentionKernel

ENGINES = CUDA_CORES

AHEAD = 64
"""Parts whose columns a thread keeps in registers."""

_COLUMNS = 256
"""Columns per block."""


def emit(spec: KernelSpec, arch: str) -> CudaKernel:
    """The kernel, the same for every architecture."""
    del arch
    body = spec.body
    assert isinstance(body, JoinAttentionKernel)
    columns = min(body.value_dim, _COLUMNS)
    threads = -(-max(columns, body.parts) // WARP) * WARP
    groups = -(-body.value_dim // columns)
    memory = SharedMemory()
    for name, count in (("fades", body.parts), ("totals", body.parts), ("partial", threads // WARP)):
        memory.add(name, "float", count, 4)
    blocks = dim(body.batch) * body.heads * dim(body.q_len) * groups
    note = f"{body.parts} parts, {threads} threads for {columns} columns of a query"
    lines = [*memory.declarations(), *_place(spec, body, columns, groups), *_weights(spec, body, threads), *_sums(body)]
    text = "\n".join([header_comment(spec, note), signature(spec, threads), *indent(lines), "}\n"])
    return CudaKernel(text, Geometry((blocks.to_dim(), 1, 1), (threads, 1, 1), memory.nbytes), notes=(note,))


def _place(spec: KernelSpec, body: JoinAttentionKernel, columns: int, groups: int) -> list[str]:
    """Declares the query and the column of this thread, where its parts begin, and whether it has a column."""
    x, out = spec.operands
    row = "(int64_t)blockIdx.x" if groups == 1 else f"(int64_t)blockIdx.x / {groups}"
    first = "" if groups == 1 else f"(int)(blockIdx.x % {groups}) * {columns} + "
    mine = [] if columns % WARP == 0 and columns >= body.parts else [f"(int)threadIdx.x < {columns}"]
    mine += [f"c < {body.value_dim}"] if body.value_dim % columns else []
    return [
        f"const int64_t q_len = {c_dim(body.q_len)}, row = {row};",
        f"const int64_t i = row % q_len, h = row / q_len % {body.heads}, b = row / q_len / {body.heads};",
        f"const int p = (int)threadIdx.x, c = {first}p;  // a part, and a column",
        f"const bool has_column = {' && '.join(mine) or 'true'};",
        f"const float* const parts = {place_of(x, ('b', 'h', 'i'))};",
        f"const auto to = {place_of(out, ('b', 'h', 'i'))} + c;",
    ]


def _chunk(body: JoinAttentionKernel) -> int:
    """Parts that are read at once: equal pieces of at most `AHEAD`."""
    return -(-body.parts // -(-body.parts // AHEAD))


def _asked(spec: KernelSpec, body: JoinAttentionKernel) -> list[str]:
    """Declares `ask`, which loads the column of the parts from `first` on; zeros behind the last part."""
    step, ahead = c_dim(spec.operands[0].strides[3]), _chunk(body)
    there = "has_column" if body.parts % ahead == 0 else f"has_column && first + n < {body.parts}"
    return [
        f"float value[{ahead}];",
        "const auto ask = [&](int first) {",
        "#pragma unroll",
        f"    for (int n = 0; n < {ahead}; n++) value[n] = {there} ? parts[(int64_t)(first + n) * {step} + c] : 0.0f;",
        "};",
    ]


def _weights(spec: KernelSpec, body: JoinAttentionKernel, threads: int) -> list[str]:
    """The weight of each part and its share of the total, in shared memory."""
    step = c_dim(spec.operands[0].strides[3])
    return [
        "float top = -INFINITY, total = 0.0f;",
        f"const float* const own = parts + (int64_t)p * {step} + {body.value_dim};",
        f"if (p < {body.parts}) top = own[0], total = own[1];",
        *_asked(spec, body),
        "ask(0);",
        f"const float best = qc_block_max<{threads // WARP}>(top, partial);",
        "const float shift = best == -INFINITY ? 0.0f : best;  // no part has a key: all weights are exp(-inf) = 0",
        f"if (p < {body.parts}) fades[p] = expf(top - shift), totals[p] = total * fades[p];",
        "__syncthreads();",
    ]


def _sums(body: JoinAttentionKernel) -> list[str]:
    """Adds the parts in their order."""
    ahead, parts = _chunk(body), body.parts
    add = "all += totals[{0}], sum = fmaf(value[n], fades[{0}], sum);"
    ends = "all == 0.0f ? 0.0f : sum / all"
    lines = ["#pragma unroll", f"for (int n = 0; n < {ahead}; n++) {add.format('n')}"]
    if parts > ahead:
        guard = "" if parts % ahead == 0 else f"if (first + n < {parts}) "
        lines = [
            "for (int first = 0;;) {",
            "#pragma unroll",
            f"    for (int n = 0; n < {ahead}; n++) {guard}{add.format('first + n')}",
            f"    first += {ahead};",
            f"    if (first >= {parts}) break;",
            "    ask(first);",
            "}",
        ]
    return ["float all = 0.0f, sum = 0.0f;", *lines, f"if (has_column) qc_store(to, {ends});  // no key: zeros"]
