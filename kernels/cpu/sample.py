"""One token for each sequence from a row of logits (plan/sample_rule.py has the arithmetic).

The last token that top-k and top-p keep is found digit by digit: counts, or sums of weights, of the tokens whose keys
agree with it so far, by their next eight bits.  A row is read up to eleven times and nothing is sorted.
"""

from __future__ import annotations

from qcompiler.kernels.cpu.text import entry_function, pointer, task_function
from qcompiler.kernels.sample_row import functions, settings, word
from qcompiler.kernels.text import c_dim, header_comment, indent, offset
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.sample import BROKEN, DRAW, NONE_ALLOWED, NOT_ASKED, ROW, SHARE_BITS, TOP_K, SampleKernel


def headers(spec: KernelSpec) -> tuple[str, ...]:
    return ()


def scratch_bytes(spec: KernelSpec, isa: str) -> int:
    """The sum of each of the 256 digits."""
    return 256 * 8


def _name(number: int) -> str:
    return ("x", "how", "tallies", "bias", "out")[number]


def emit(spec: KernelSpec, isa: str) -> str:
    """One task takes a share of the sequences."""
    body = spec.body
    assert isinstance(body, SampleKernel)
    batch, rows, cols = c_dim(body.batch), c_dim(body.rows), c_dim(body.cols)
    cost = f"qc_tasks({batch}, 32 * {cols})"
    task = [
        *(pointer(operand, number, _name(number), "call->op") for number, operand in enumerate(spec.operands)),
        "uint64_t* const sums = (uint64_t*)scratch;",
        "const auto as_float = [](uint32_t bits) {",
        "    float f;",
        "    memcpy(&f, &bits, sizeof f);",
        "    return f;",
        "};",
        "const auto as_bits = [](float f) {",
        "    uint32_t bits;",
        "    memcpy(&bits, &f, sizeof bits);",
        "    return bits;",
        "};",
        f"const int64_t cols = {cols}, tasks = {cost};",
        f"for (int64_t i = qc_share({batch}, task, tasks); i < qc_share({batch}, task + 1, tasks); i++) {{",
        f"    int64_t* const result = out + {offset(spec.operands[4], ['i'])};",
        f"    const int64_t row = {word(spec, ROW, _name)}, top_k = {word(spec, TOP_K, _name)};",
        f"    *result = {NOT_ASKED};",
        f"    if (row < 0 || row >= {rows}) continue;",
        *indent([*settings(spec, _name), *functions(spec, _name, ""), *_best(), *_cuts(), *_draw(spec)]),
        "}",
    ]
    launch = [f"qc_run(ctx, op, sym, {cost}, qk_{spec.name}_task);"]
    head = header_comment(spec, "sequences shared among tasks; the last kept token by the digits of its key")
    return "\n".join([head, task_function(spec, task), entry_function(spec, launch)])


def _best() -> list[str]:
    """The first token with the largest score."""
    return [
        "float top = -INFINITY;",
        "int64_t best = 0;",
        "bool fits = true;",
        "for (int64_t j = 0; j < cols; j++) {",
        "    const float s = score(j);",
        "    fits = fits && s < INFINITY;",
        "    if (s > top) top = s, best = j;",
        "}",
        f"*result = !fits ? {BROKEN} : top == -INFINITY ? {NONE_ALLOWED} : best;",
        "if (*result < 0 || scale == 0.0f) continue;",
    ]


def _cuts() -> list[str]:
    """Keeps the keys above `cut`, and of the equal ones the first `ties`."""
    return [
        "uint32_t cut = 0;",
        "uint64_t ties = 0, above = 0;",
        "// Moves the cut to where the tokens from the first on, counted or weighed, reach what is wanted. `extra` is",
        "// what the tokens at the present cut amount to.",
        "const auto move = [&](uint64_t wanted, uint64_t extra, bool weighs) {",
        "    uint32_t last = 0;",
        "    above = 0;",
        "    for (int shift = 24; shift >= 0; shift -= 8) {",
        "        for (int digit = 0; digit < 256; digit++) sums[digit] = 0;",
        "        if ((uint64_t)cut >> shift >> 8 == last) sums[cut >> shift & 255] += extra;",
        "        for (int64_t j = 0; j < cols; j++) {",
        "            const float s = score(j);",
        "            const uint32_t k = key(s);",
        "            if (k > cut && (uint64_t)k >> shift >> 8 == last)",
        "                sums[k >> shift & 255] += weighs ? weight(top, s) : 1;",
        "        }",
        "        int digit = 255;",
        "        for (; digit > 0 && above + sums[digit] < wanted; digit--) above += sums[digit];",
        "        last = last << 8 | (uint32_t)digit;",
        "    }",
        "    cut = last;",
        "};",
        "if (top_k > 0 && top_k < cols) {",
        "    move((uint64_t)top_k, 0, false);",
        "    ties = (uint64_t)top_k - above;",
        "}",
        f"if (top_p < {1 << SHARE_BITS}) {{",
        "    const uint64_t extra = ties > 0 ? ties * weight(top, of(cut)) : 0;",
        "    uint64_t total = extra;",
        "    for (int64_t j = 0; j < cols; j++) {",
        "        const float s = score(j);",
        "        total += key(s) > cut ? weight(top, s) : 0;",
        "    }",
        "    if (total > 0) {",
        "        const uint64_t asked = part(total, top_p), wanted = asked > 0 ? asked : 1;",
        "        move(wanted, extra, true);",
        "        const uint64_t one = weight(top, of(cut));",
        "        ties = (wanted - above + one - 1) / one;",
        "    }",
        "}",
    ]


def _draw(spec: KernelSpec) -> list[str]:
    """The first token at which the running sum of what is kept goes beyond the draw."""
    walk = [
        "uint64_t sum = 0, equal = 0;",
        "for (int64_t j = 0; j < cols; j++) {",
        "    const float s = score(j);",
        "    const uint32_t k = key(s);",
        "    if (k < cut || (k == cut && equal++ >= ties)) continue;",
        "    const uint64_t w = weight(top, s);",
        "    if (w < least) continue;",
        "    sum += w;",
    ]
    return [
        "const auto walk = [&](uint64_t beyond) {",
        *indent(walk),
        "        if (sum > beyond) {",
        "            *result = j;",
        "            break;",
        "        }",
        "    }",
        "    return sum;",
        "};",
        "const uint64_t whole = walk(UINT64_MAX);",
        f"if (whole > 0) walk(high((uint64_t){word(spec, DRAW, _name)}, whole));",
    ]
