"""One draw from the most probable entries of each row as CUDA C++ (plan/kinds/top_p.py has the arithmetic).

A block per row.  The last kept weight is found digit by digit: the sums of the entries that agree with it so far, by
their next eight bits, in shared memory.  Entries that are 0 down to this digit, as the many improbable ones of a
vocabulary are at first, are not added at all.  All sums are of integers, so that their order does not matter.  A row is
read seven times and nothing is sorted.
"""

from __future__ import annotations

from qcompiler.kernels.cuda.engines import CUDA_CORES
from qcompiler.kernels.cuda.geometry import MAX_THREADS, CudaKernel, Geometry, SharedMemory
from qcompiler.kernels.cuda.signature import signature
from qcompiler.kernels.text import c_dim, header_comment, identifier, indent, offset
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.top_p import SHARE_BITS, SHARE_OF_ALL, WEIGHT_BITS, TopPKernel

ENGINES = CUDA_CORES

_DIGITS = 256
_COPIES = 8
"""Sums of each digit: of a warp, four lanes at most add to one place, however equal a row's entries are."""

_AHEAD = 4
"""Loads of a thread that are under way together."""

_PER_THREAD = 16
"""Entries that a thread should have: a block is as large as a row is worth, and has a thread for each digit."""


def _threads(body: TopPKernel) -> int:
    if not isinstance(body.cols, int):
        return 512
    return min(MAX_THREADS, max(_DIGITS, 1 << (-(-body.cols // _PER_THREAD) - 1).bit_length()))


def emit(spec: KernelSpec, arch: str) -> CudaKernel:
    """One draw a row, for any architecture."""
    del arch
    body = spec.body
    assert isinstance(body, TopPKernel)
    threads = _threads(body)
    memory = SharedMemory()
    memory.add("sums", "unsigned long long", _DIGITS * _COPIES, 8)
    memory.add("partial", "uint64_t", threads // 32, 8)
    memory.add("found", "uint64_t", 3, 8)
    lines = [*memory.declarations(), *_definitions(spec, body, threads), *_last_kept(threads), *_draw(spec, threads)]
    note = f"a block of {threads} threads per row, the last kept weight by its digits"
    text = "\n".join([header_comment(spec, note), signature(spec, threads, 1), *indent(lines), "}\n"])
    return CudaKernel(text, Geometry((body.rows, 1, 1), (threads, 1, 1), memory.nbytes), notes=(note,))


def _definitions(spec: KernelSpec, body: TopPKernel, threads: int) -> list[str]:
    """A row's weights, shares and their parts, and running sums over the block."""
    x = spec.operands[0]
    return [
        f"const int64_t row = blockIdx.x, cols = {c_dim(body.cols)};",
        "const int thread = (int)threadIdx.x, lane = thread % 32, warp = thread / 32;",
        "const auto weight = [&](int64_t j) QC_INLINED -> uint64_t {",
        f"    const float p = j < cols ? qc_load({identifier(x.name)} + {offset(x, ['row', 'j'])}) : 0.0f;",
        f"    return p > 0.0f ? (uint64_t)(fminf(p, 1.0f) * {2**WEIGHT_BITS}.0f) : 0;",
        "};",
        "const auto share = [](float s) QC_INLINED -> uint64_t {",
        f"    return (uint64_t)(s > 0.0f ? fminf(s, 1.0f) * {SHARE_OF_ALL}.0f : 0.0f);",
        "};",
        "const auto part = [](uint64_t sum, uint64_t of) QC_INLINED -> uint64_t {",
        f"    return (sum >> {SHARE_BITS}) * of + ((sum & {SHARE_OF_ALL - 1}) * of >> {SHARE_BITS});",
        "};",
        "// The sum of the values of this thread and those before it; `all` becomes that of the block.",
        "const auto up_to = [&](uint64_t value, uint64_t& all) QC_INLINED -> uint64_t {",
        "    const uint64_t own = qc_warp_scan(value);",
        "    __syncthreads();  // the sums of the last call are used",
        "    if (lane == 31) partial[warp] = own;",
        "    __syncthreads();",
        "    uint64_t before = 0;",
        "    all = 0;",
        f"    for (int w = 0; w < {threads // 32}; w++) {{",
        "        if (w == warp) before = all;",
        "        all += partial[w];",
        "    }",
        "    return before + own;",
        "};",
        "uint64_t total = 0, own = 0;",
        f"#pragma unroll {_AHEAD}",
        f"for (int64_t j = thread; j < cols; j += {threads}) own += weight(j);",
        "up_to(own, total);",
        "if (total == 0) {",
        f"    if (thread == 0) {_at(spec, 3)} = 0;",
        "    return;",
        "}",
        f"const uint64_t kept_part = part(total, share({_at(spec, 1)}));",
        "const uint64_t wanted = kept_part > 0 ? kept_part : 1;",
    ]


def _last_kept(threads: int) -> list[str]:
    """`last`, the smallest kept weight, and `kept`, the sum of all kept ones."""
    return [
        "uint64_t last = 0, above = 0, kept = 0;  // digits found, sum of what is larger, with what is equal",
        "#pragma unroll 1",
        f"for (int shift = {WEIGHT_BITS // 8 * 8}; shift >= 0; shift -= 8) {{",
        f"    for (int i = thread; i < {_DIGITS * _COPIES}; i += {threads}) sums[i] = 0;",
        "    __syncthreads();",
        "#pragma unroll 1",
        f"    for (int64_t first = thread; first < cols; first += {_AHEAD * threads}) {{",
        f"        uint64_t w[{_AHEAD}];",
        "#pragma unroll",
        f"        for (int i = 0; i < {_AHEAD}; i++) w[i] = weight(first + i * {threads});",
        "#pragma unroll",
        f"        for (int i = 0; i < {_AHEAD}; i++) {{",
        "            const uint64_t digits = w[i] >> shift;",
        "            const int digit = digits != 0 && digits >> 8 == last ? (int)(digits & 255) : -1;",
        "            if (digit >= 0)",
        f"                atomicAdd(sums + digit * {_COPIES} + lane % {_COPIES}, (unsigned long long)w[i]);",
        "        }",
        "    }",
        "    __syncthreads();",
        "    uint64_t all;  // of the digits, the largest first",
        "    uint64_t mine = 0;",
        f"    if (thread < {_DIGITS})",
        f"        for (int i = 0; i < {_COPIES}; i++) mine += sums[({_DIGITS - 1} - thread) * {_COPIES} + i];",
        "    const uint64_t reached = above + up_to(mine, all);",
        "    if (thread == 0) found[0] = 0, found[1] = above + all, found[2] = above + all;",
        "    __syncthreads();",
        "    if (reached >= wanted && reached - mine < wanted) {",
        f"        found[0] = {_DIGITS - 1} - thread, found[1] = reached - mine, found[2] = reached;",
        "    }",
        "    __syncthreads();",
        "    last = last << 8 | found[0], above = found[1], kept = found[2];",
        "}",
    ]


def _draw(spec: KernelSpec, threads: int) -> list[str]:
    """The first index at which the running sum of what is kept goes beyond the draw."""
    return [
        f"const uint64_t place = share({_at(spec, 2)});",
        f"const uint64_t beyond = part(kept, place < {SHARE_OF_ALL} ? place : {SHARE_OF_ALL - 1});",
        "uint64_t carry = 0;  // the sum of all entries before `first`",
        "#pragma unroll 1",
        f"for (int64_t first = 0; first < cols && carry <= beyond; first += {threads}) {{",
        "    const uint64_t w = weight(first + thread), value = w >= last ? w : 0;",
        "    uint64_t all;",
        "    const uint64_t reached = carry + up_to(value, all);",
        "    if (reached > beyond && reached - value <= beyond)",
        f"        {_at(spec, 3)} = first + thread;",
        "    carry += all;",
        "}",
    ]


def _at(spec: KernelSpec, number: int) -> str:
    """The row's element of an operand with one for each row."""
    operand = spec.operands[number]
    return f"{identifier(operand.name)}[{offset(operand, ['row'])}]"
