"""One token for each sequence from a row of logits as CUDA C++ (plan/sample_rule.py has the arithmetic).

A block per sequence.  The last token that top-k and top-p keep is found digit by digit: counts, or sums of weights, of
the tokens whose keys agree with it so far, by their next eight bits, in shared memory.  For the draw each warp sums a
range of the row; the warp in whose range the draw lies reads it once more.  All sums are of integers, so that their
order does not matter.  A row is read once for the most likely token, and up to eleven times for a draw.
"""

from __future__ import annotations

from qcompiler.kernels.cuda.engines import CUDA_CORES
from qcompiler.kernels.cuda.geometry import MAX_THREADS, CudaKernel, Geometry, SharedMemory
from qcompiler.kernels.cuda.signature import signature
from qcompiler.kernels.sample_row import LOWEST, functions, settings, word
from qcompiler.kernels.text import c_dim, header_comment, identifier, indent, offset
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.sample import BROKEN, DRAW, NONE_ALLOWED, NOT_ASKED, ROW, SHARE_BITS, TOP_K, SampleKernel

ENGINES = CUDA_CORES

_DIGITS = 256
_COPIES = 8
"""Sums of each digit: of a warp, four lanes at most add to one place, however equal a row's entries are."""

_PER_THREAD = 16
"""Entries that a thread should have: a block is as large as a row is worth, and has a thread for each digit."""


def _threads(body: SampleKernel) -> int:
    if not isinstance(body.cols, int):
        return 512
    return min(MAX_THREADS, max(_DIGITS, 1 << (-(-body.cols // _PER_THREAD) - 1).bit_length()))


def emit(spec: KernelSpec, arch: str) -> CudaKernel:
    """One draw a sequence, for any architecture."""
    del arch
    body = spec.body
    assert isinstance(body, SampleKernel)
    threads = _threads(body)
    memory = SharedMemory()
    memory.add("sums", "unsigned long long", _DIGITS * _COPIES, 8)
    memory.add("partial", "uint64_t", 2 * threads // 32, 8)
    memory.add("found", "uint64_t", 2, 8)

    def name(number: int) -> str:
        return identifier(spec.operands[number].name)

    out = f"{name(4)}[{offset(spec.operands[4], ['i'])}]"
    lines = [
        *memory.declarations(),
        f"const int64_t i = blockIdx.x, cols = {c_dim(body.cols)};",
        f"const int64_t row = {word(spec, ROW, name)}, top_k = {word(spec, TOP_K, name)};",
        "const int thread = (int)threadIdx.x, lane = thread % 32, warp = thread / 32;",
        f"if (row < 0 || row >= {c_dim(body.rows)}) {{",
        f"    if (thread == 0) {out} = {NOT_ASKED};",
        "    return;",
        "}",
        "const auto as_float = [](uint32_t bits) QC_INLINED { return __uint_as_float(bits); };",
        "const auto as_bits = [](float f) QC_INLINED { return (uint32_t)__float_as_uint(f); };",
        *settings(spec, name),
        *functions(spec, name, " QC_INLINED"),
        *_up_to(threads),
        *_best(threads, out),
        *_move(threads),
        *_cuts(threads),
        *_draw(spec, threads, f"(uint64_t){word(spec, DRAW, name)}", out),
    ]
    note = f"a block of {threads} threads per sequence, the last kept token by the digits of its key"
    text = "\n".join([header_comment(spec, note), signature(spec, threads, min_blocks=1), *indent(lines), "}\n"])
    return CudaKernel(text, Geometry((body.batch, 1, 1), (threads, 1, 1), memory.nbytes), notes=(note,))


def _up_to(threads: int) -> list[str]:
    """Running sums over the block."""
    return [
        "// The sum of the values of this thread and those before it; `all` becomes that of the block.",
        "const auto up_to = [&](uint64_t value, uint64_t& all) QC_INLINED -> uint64_t {",
        "    const uint64_t own = qc_warp_scan(value);",
        "    __syncthreads();  // what was in `partial` is used",
        "    if (lane == 31) partial[warp] = own;",
        "    __syncthreads();",
        "    uint64_t before = 0;",
        "    all = 0;",
        "#pragma unroll 1",
        f"    for (int w = 0; w < {threads // 32}; w++) {{",
        "        if (w == warp) before = all;",
        "        all += partial[w];",
        "    }",
        "    return before + own;",
        "};",
    ]


def _best(threads: int, out: str) -> list[str]:
    """`top`, the largest score, and the first token that has it: the largest pair of a key and a falling number."""
    return [
        "uint64_t pair = 0;",
        "#pragma unroll 1",
        f"for (int64_t j = thread; j < cols; j += {threads}) {{",
        "    const float s = score(j);",
        "    const uint64_t own = s < INFINITY ? (uint64_t)key(s) << 32 | (0xffffffffu - (uint32_t)j) : ~(uint64_t)0;",
        "    pair = own > pair ? own : pair;",
        "}",
        "if (thread == 0) sums[0] = 0;",
        "__syncthreads();",
        "atomicMax(sums, (unsigned long long)pair);",
        "__syncthreads();",
        "pair = sums[0];",
        "const uint32_t top_key = (uint32_t)(pair >> 32);",
        "const int64_t best = (int64_t)(0xffffffffu - (uint32_t)pair);",
        f"if (pair == ~(uint64_t)0 || top_key == {LOWEST} || scale == 0.0f) {{",
        f"    if (thread == 0) {out} = pair == ~(uint64_t)0 ? {BROKEN} : top_key == {LOWEST} ? {NONE_ALLOWED} : best;",
        "    return;",
        "}",
        "const float top = of(top_key);",
        "__syncthreads();  // `sums` is read",
    ]


def _move(threads: int) -> list[str]:
    """`move`, which finds the last kept key."""
    return [
        "uint32_t cut = 0;  // kept are the keys above it, and of the equal ones the first `ties`",
        "uint64_t ties = 0, above = 0;",
        "// Moves the cut to where the tokens from the first on, counted or weighed, reach what is wanted. `extra` is",
        "// what the tokens at the present cut amount to.",
        "const auto move = [&](uint64_t wanted, uint64_t extra, bool weighs) QC_INLINED {",
        "    uint32_t last = 0;",
        "    above = 0;",
        "#pragma unroll 1",
        "    for (int shift = 24; shift >= 0; shift -= 8) {",
        f"        for (int d = thread; d < {_DIGITS * _COPIES}; d += {threads}) sums[d] = 0;",
        "        __syncthreads();",
        "        if (thread == 0 && (uint64_t)cut >> shift >> 8 == last)",
        f"            atomicAdd(sums + (cut >> shift & 255) * {_COPIES}, (unsigned long long)extra);",
        "#pragma unroll 1",
        f"        for (int64_t j = thread; j < cols; j += {threads}) {{",
        "            const float s = score(j);",
        "            const uint32_t k = key(s);",
        "            const bool agrees = k > cut && (uint64_t)k >> shift >> 8 == last;",
        "            const uint64_t a = !agrees ? 0 : weighs ? weight(top, s) : 1;",
        "            if (a > 0)",
        f"                atomicAdd(sums + (k >> shift & 255) * {_COPIES} + lane % {_COPIES}, (unsigned long long)a);",
        "        }",
        "        __syncthreads();",
        "        uint64_t all, mine = 0;  // of the digits, the largest first",
        f"        if (thread < {_DIGITS})",
        f"            for (int c = 0; c < {_COPIES}; c++) mine += sums[({_DIGITS - 1} - thread) * {_COPIES} + c];",
        "        const uint64_t reached = above + up_to(mine, all);",
        "        if (reached >= wanted && reached - mine < wanted) {",
        f"            found[0] = {_DIGITS - 1} - thread, found[1] = reached - mine;",
        "        }",
        "        __syncthreads();",
        "        last = last << 8 | (uint32_t)found[0], above = found[1];",
        "    }",
        "    cut = last;",
        "};",
    ]


def _cuts(threads: int) -> list[str]:
    return [
        "if (top_k > 0 && top_k < cols) {",
        "    move((uint64_t)top_k, 0, false);",
        "    ties = (uint64_t)top_k - above;",
        "}",
        f"if (top_p < {1 << SHARE_BITS}) {{",
        "    const uint64_t extra = ties > 0 ? ties * weight(top, of(cut)) : 0;",
        "    uint64_t total, own = 0;",
        "#pragma unroll 1",
        f"    for (int64_t j = thread; j < cols; j += {threads}) {{",
        "        const float s = score(j);",
        "        own += key(s) > cut ? weight(top, s) : 0;",
        "    }",
        "    up_to(own, total);",
        "    total += extra;",
        "    if (total > 0) {",
        "        const uint64_t asked = part(total, top_p), wanted = asked > 0 ? asked : 1;",
        "        move(wanted, extra, true);",
        "        const uint64_t one = weight(top, of(cut));",
        "        ties = (wanted - above + one - 1) / one;",
        "    }",
        "}",
    ]


def _draw(spec: KernelSpec, threads: int, draw: str, out: str) -> list[str]:
    """The first token at which the running sum of what is kept goes beyond the draw."""
    warps = threads // 32
    return [
        "// A warp's range of the row: the sum of the weights above the cut, and how many tokens are at the cut.",
        f"const int64_t range = (cols + {threads - 1}) / {threads} * 32, begin = warp * range;",
        "const int64_t end = qc_min(begin + range, cols);",
        "uint64_t larger = 0, equal = 0;",
        "#pragma unroll 1",
        "for (int64_t j = begin + lane; j < end; j += 32) {",
        "    const float s = score(j);",
        "    const uint32_t k = key(s);",
        "    const uint64_t w = k > cut ? weight(top, s) : 0;",
        "    larger += w >= least ? w : 0;",
        "    equal += k == cut ? 1 : 0;",
        "}",
        "larger = qc_warp_scan(larger);",
        "equal = qc_warp_scan(equal);",
        "__syncthreads();  // what was in `partial` is used",
        f"if (lane == 31) partial[warp] = larger, partial[{warps} + warp] = equal;",
        "__syncthreads();",
        "const uint64_t at_cut = ties > 0 ? weight(top, of(cut)) : 0, one = at_cut >= least ? at_cut : 0;",
        "// The sum of the warps before `last`, and how many tokens at the cut they have.",
        "const auto before = [&](int last, uint64_t& passed) QC_INLINED -> uint64_t {",
        "    uint64_t sum = 0;",
        "    passed = 0;",
        "#pragma unroll 1",
        "    for (int w = 0; w < last; w++) {",
        f"        sum += partial[w], passed += partial[{warps} + w];",
        "    }",
        "    return sum + (passed < ties ? passed : ties) * one;",
        "};",
        "uint64_t passed, all_passed;",
        f"const uint64_t whole = before({warps}, all_passed);",
        "if (whole == 0) {",
        f"    if (thread == 0) {out} = best;",
        "    return;",
        "}",
        f"const uint64_t beyond = high({draw}, whole);",
        "uint64_t next, carry = before(warp, passed);",
        "if (carry > beyond || before(warp + 1, next) <= beyond) return;",
        "#pragma unroll 1",
        "for (int64_t first = begin; first < end && carry <= beyond; first += 32) {",
        "    const int64_t j = first + lane;",
        "    const float s = j < end ? score(j) : -INFINITY;",
        "    const uint32_t k = key(s);",
        "    const uint64_t same = qc_warp_scan((uint64_t)(j < end && k == cut ? 1 : 0));",
        "    const uint64_t w = k > cut ? weight(top, s) : 0;",
        "    const uint64_t value = k == cut ? (passed + same <= ties ? one : 0) : w >= least ? w : 0;",
        "    const uint64_t reached = carry + qc_warp_scan(j < end ? value : 0);",
        "    if (reached > beyond && reached - (j < end ? value : 0) <= beyond)",
        f"        {out} = j;",
        "    carry = __shfl_sync(QC_ALL_LANES, reached, 31);",
        "    passed += __shfl_sync(QC_ALL_LANES, same, 31);",
        "}",
    ]
