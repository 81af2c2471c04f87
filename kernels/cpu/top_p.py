"""One draw from the most probable entries of each row (plan/kinds/top_p.py has the arithmetic).

The last kept weight is found digit by digit: the sums of the entries that agree with it so far, by their next eight
bits.  A row is read seven times and nothing is sorted.
"""

from __future__ import annotations

from qcompiler.kernels.cpu.text import entry_function, pointer, task_function
from qcompiler.kernels.text import c_dim, header_comment, indent, offset
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.top_p import SHARE_BITS, SHARE_OF_ALL, WEIGHT_BITS, TopPKernel


def headers(spec: KernelSpec) -> tuple[str, ...]:
    return ()


def scratch_bytes(spec: KernelSpec, isa: str) -> int:
    """The sum of each of the 256 digits."""
    return 256 * 8


def emit(spec: KernelSpec, isa: str) -> str:
    """One task takes a share of the rows."""
    body = spec.body
    assert isinstance(body, TopPKernel)
    x, top, draw, out = spec.operands
    rows, cols = c_dim(body.rows), c_dim(body.cols)
    row = [
        "const auto weight = [&](int64_t j) {",
        f"    const float p = qc_load(x + {offset(x, ['row', 'j'])});",
        f"    return p > 0.0f ? (uint64_t)((p < 1.0f ? p : 1.0f) * {2**WEIGHT_BITS}.0f) : (uint64_t)0;",
        "};",
        "uint64_t total = 0;",
        "for (int64_t j = 0; j < cols; j++) total += weight(j);",
        "if (total == 0) {",
        f"    out[{offset(out, ['row'])}] = 0;",
        "    continue;",
        "}",
        f"const uint64_t kept_part = part(total, share(top[{offset(top, ['row'])}]));",
        "const uint64_t wanted = kept_part > 0 ? kept_part : 1;",
        "uint64_t last = 0, above = 0, kept = 0;  // digits found, sum of what is larger, with what is equal",
        f"for (int shift = {WEIGHT_BITS // 8 * 8}; shift >= 0; shift -= 8) {{",
        "    for (int digit = 0; digit < 256; digit++) sums[digit] = 0;",
        "    for (int64_t j = 0; j < cols; j++) {",
        "        const uint64_t w = weight(j);",
        "        if (w >> shift >> 8 == last) sums[w >> shift & 255] += w;",
        "    }",
        "    int digit = 255;",
        "    for (; digit > 0 && above + sums[digit] < wanted; digit--) above += sums[digit];",
        "    last = last << 8 | (uint64_t)digit;",
        "    kept = above + sums[digit];",
        "}",
        f"const uint64_t place = share(draw[{offset(draw, ['row'])}]);",
        f"const uint64_t beyond = part(kept, place < {SHARE_OF_ALL} ? place : {SHARE_OF_ALL - 1});",
        "uint64_t sum = 0;",
        "for (int64_t j = 0; j < cols; j++) {",
        "    const uint64_t w = weight(j);",
        "    sum += w >= last ? w : 0;",
        "    if (sum > beyond) {",
        f"        out[{offset(out, ['row'])}] = j;",
        "        break;",
        "    }",
        "}",
    ]
    task = [
        pointer(x, 0, "x", "call->op"),
        pointer(top, 1, "top", "call->op"),
        pointer(draw, 2, "draw", "call->op"),
        pointer(out, 3, "out", "call->op"),
        "uint64_t* const sums = (uint64_t*)scratch;",
        "const auto share = [](float s) {",
        f"    return (uint64_t)((s > 0.0f ? s < 1.0f ? s : 1.0f : 0.0f) * {SHARE_OF_ALL}.0f);",
        "};",
        "const auto part = [](uint64_t sum, uint64_t of) {",
        f"    return (sum >> {SHARE_BITS}) * of + ((sum & {SHARE_OF_ALL - 1}) * of >> {SHARE_BITS});",
        "};",
        f"const int64_t rows = {rows}, cols = {cols}, tasks = qc_tasks(rows, 16 * cols);",
        "for (int64_t row = qc_share(rows, task, tasks); row < qc_share(rows, task + 1, tasks); row++) {",
        *indent(row),
        "}",
    ]
    launch = [f"qc_run(ctx, op, sym, qc_tasks({rows}, 16 * {cols}), qk_{spec.name}_task);"]
    head = header_comment(spec, "rows shared among tasks; the last kept weight by its digits")
    return "\n".join([head, task_function(spec, task), entry_function(spec, launch)])
