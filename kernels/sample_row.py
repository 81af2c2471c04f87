"""The arithmetic of `sample` on one row as C++ text, the same for every target (plan/sample_rule.py defines it)."""

from __future__ import annotations

from collections.abc import Callable

from qcompiler.kernels.text import offset
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.sample import (
    FLAGS,
    FREQUENCY,
    GIVEN,
    LN2,
    MIN_P,
    PRESENCE,
    READS_BIAS,
    READS_TALLIES,
    REPETITION,
    SCALE,
    SHARE_BITS,
    TAYLOR,
    TOP_P,
    WEIGHT_BITS,
)

LOWEST = "0x007fffffu"
"""The key of -infinity."""


def word(spec: KernelSpec, number: int, name: Callable[[int], str]) -> str:
    """One of the words of sequence `i`. `name` gives the variable of an operand."""
    return f"{name(1)}[{offset(spec.operands[1], ['i', str(number)])}]"


def settings(spec: KernelSpec, name: Callable[[int], str]) -> list[str]:
    """What sequence `i` asks for, in variables."""

    def number(which: int) -> str:
        return f"as_float((uint32_t){word(spec, which, name)})"

    def share(which: int) -> str:
        return f"qc_min(qc_max({word(spec, which, name)}, (int64_t)0), (int64_t){1 << SHARE_BITS})"

    return [
        f"const int64_t flags = {word(spec, FLAGS, name)};",
        f"const float repetition = {number(REPETITION)}, presence = {number(PRESENCE)};",
        f"const float frequency = {number(FREQUENCY)}, scale = {number(SCALE)};",
        f"const uint64_t top_p = (uint64_t){share(TOP_P)};",
        f"const uint64_t least = (uint64_t){share(MIN_P)} << {WEIGHT_BITS - SHARE_BITS};",
    ]


def functions(spec: KernelSpec, name: Callable[[int], str], inlined: str) -> list[str]:
    """`score` of a token, the `key` that orders scores, the score `of` a key, the `weight` of a score below `top`,
    `part` of a sum and `high`, the upper half of a product. `inlined` follows the parameters of each."""
    x, _, tallies, bias, _ = spec.operands
    polynomial = [f"        y = {value}u - (uint32_t)((uint64_t)x * y >> 32);" for value in TAYLOR[-2::-1]]
    return [
        f"const auto score = [&](int64_t j){inlined} {{",
        f"    float s = qc_load({name(0)} + {offset(x, ['row', 'j'])});",
        f"    if (flags & {READS_TALLIES}) {{",
        f"        const float tally = {name(2)}[{offset(tallies, ['i', 'j'])}];",
        f"        const float made = tally >= {GIVEN}.0f ? tally - {GIVEN}.0f : tally;",
        "        if (tally != 0.0f) s = s > 0.0f ? s / repetition : s * repetition;",
        "        if (made != 0.0f) s = s - (presence + frequency * made);",
        "    }",
        f"    if (flags & {READS_BIAS}) {{",
        f"        const float b = {name(3)}[{offset(bias, ['i', 'j'])}];",
        "        s = b == -INFINITY ? b : s + b;",
        "    }",
        "    return s + 0.0f;  // -0 becomes 0",
        "};",
        f"const auto key = [&](float s){inlined} -> uint32_t {{",
        "    const uint32_t bits = as_bits(s);",
        "    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);",
        "};",
        f"const auto of = [&](uint32_t k){inlined} -> float {{",
        "    return as_float(k ^ (k >> 31 ? 0x80000000u : 0xffffffffu));",
        "};",
        f"const auto weight = [&](float top, float s){inlined} -> uint64_t {{",
        "    const float t = (top - s) * scale;",
        f"    if (!(t < {WEIGHT_BITS + 1}.0f)) return 0;",
        f"    const uint32_t q = (uint32_t)((t > 0.0f ? t : 0.0f) * {1 << 24}.0f);",
        f"    const uint32_t x = (uint32_t)((uint64_t)((q & {(1 << 24) - 1}u) << 8) * {LN2}u >> 32);",
        f"    uint32_t y = {TAYLOR[-1]}u;",
        *(line[4:] for line in polynomial),
        f"    return (uint64_t)y << {WEIGHT_BITS - 31} >> (q >> 24);",
        "};",
        f"const auto part = [&](uint64_t sum, uint64_t share){inlined} -> uint64_t {{",
        f"    return (sum >> {SHARE_BITS}) * share + ((sum & {(1 << SHARE_BITS) - 1}) * share >> {SHARE_BITS});",
        "};",
        f"const auto high = [&](uint64_t a, uint64_t b){inlined} -> uint64_t {{",
        "    const uint64_t low = (a & 0xffffffffu) * (b & 0xffffffffu);",
        "    const uint64_t one = (a >> 32) * (b & 0xffffffffu) + (low >> 32);",
        "    const uint64_t two = (a & 0xffffffffu) * (b >> 32) + (one & 0xffffffffu);",
        "    return (a >> 32) * (b >> 32) + (one >> 32) + (two >> 32);",
        "};",
    ]
