"""Instructions per weight in the hot loops of CUDA linears, counted in their machine code.

    .venv/bin/python benchmarks/hot_loops.py [--arch sm_90a …] [--format nf4 …] [--rows 1 64 …]

Prints a page of Markdown (`make docs` writes it to docs/hot-loops.md). Needs NVRTC and nvdisasm, both from wheels, and
no GPU. qcompiler/runtime/sass.py defines how instructions are counted. tests/cuda/test_hot_loops.py compares the page,
and every comment that quotes it, with the compiled kernels.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from qcompiler.kernels.cuda import emit, linear, signature
from qcompiler.kernels.cuda.geometry import SHARED_LIMIT
from qcompiler.kernels.cuda.weights import weight_of
from qcompiler.plan.kernel import FormatRef, KernelSpec, Operand
from qcompiler.plan.kinds.linear import LinearKernel
from qcompiler.runtime import nvrtc, sass
from qcompiler.runtime.emitter import emitter_version

FORMATS: dict[str, FormatRef] = {
    "nf4": FormatRef(name="nf4", params={"block": 64}),
    "int4_g32": FormatRef(name="int4", params={"group": 32}),
    "int4_g128": FormatRef(name="int4", params={"group": 128}),
    "q4_K": FormatRef(name="q4_K"),
    "int8": FormatRef(name="int8"),
    "mxfp4": FormatRef(name="mxfp4"),
}
ROWS = (1, 8, 16, 64, 512)
ARCHS = ("sm_90a", "sm_80")
SIZE = 4096
"""N and K."""

THREADS_PER_SM = {80: 2048, 86: 1536, 89: 1536, 90: 2048, 100: 2048, 120: 1536}
COLUMNS = tuple(name for name in (*sass.CLASSES, "other"))


@dataclass(frozen=True)
class Figure:
    """One row of the table. `blocks` is the number of blocks that a multiprocessor holds at once, `stores` the bytes of
    its stores to global memory, the widest first."""

    format: str
    rows: int
    arch: str
    per_weight: float
    classes: Mapping[str, float]
    registers: int
    local: int
    shared: int
    threads: int
    blocks: int
    stores: tuple[int, ...]


def spec(weight: str, m: int) -> KernelSpec:
    """x (m, K) times the weight (N, K), all bf16, without bias."""
    classes: tuple[tuple[int, Any], ...] = ((1, "1"), (8, "2-8"), (64, "9-64"))
    m_class: Any = next((name for most, name in classes if m <= most), "large")

    def rows_of(name: str, rows: int, columns: int) -> Operand:
        access: Any = "w" if name == "out" else "r"
        return Operand(name=name, dtype="bf16", access=access, shape=(rows, columns), strides=(columns, 1))

    packed = Operand(
        name="w", dtype="bf16", access="r", shape=(SIZE, SIZE), format=FORMATS[weight], layout="cuda_t16_v1"
    )
    return KernelSpec(
        name=f"{weight}_m{m}",
        symbols=(),
        operands=(rows_of("x", m, SIZE), packed, rows_of("out", m, SIZE)),
        body=LinearKernel(m=m, n=SIZE, k=SIZE, m_class=m_class, has_bias=False),
    )


def tokens(m: int) -> int:
    """Rows of x that the tensor-core kernel for `m` rows multiplies by a weight: kernels/cuda/linear_mma.py."""
    return next((count for count in (8, 16, 32, 64) if m <= count), 128)


def measure(weights: Iterable[str], rows: Sequence[int], arch: str) -> list[Figure]:
    """A figure for each weight and number of rows; all kernels in one module."""
    chosen = [(weight, m, spec(weight, m)) for weight in weights for m in rows]
    text = emit.emit_module([each for _, _, each in chosen], arch)
    cubin = nvrtc.compile_cubin(text, arch, name="hot-loops", emitter_version=emitter_version("cuda"))
    functions = sass.disassemble(cubin.path)
    return [figure(weight, m, each, arch, cubin, functions) for weight, m, each in chosen]


def figure(
    weight: str, m: int, kernel: KernelSpec, arch: str, cubin: nvrtc.Cubin, functions: Mapping[str, sass.Function]
) -> Figure:
    emitted, symbol, number = (
        emit.emit_kernel(kernel, arch),
        nvrtc.kernel_symbol(kernel.name),
        signature.arch_number(arch),
    )
    products = Fraction(tokens(m), 64) if emitted.engine == "mma" else Fraction(m)
    if emitted.engine == "mma" and m <= 8 and weight_of(kernel.name, kernel.operands[1]).late == "adds":
        products *= 2  # of x with ones, for the offsets
    if linear.decision_of(kernel, arch).key == "wgmma":
        products = Fraction(1, 8)  # of 64 rows by 16 columns, over 128 lanes
    loop = sass.hot_loop(functions[symbol], 8 if weight == "int8" else 4, products)
    found, threads = cubin.resources[symbol], emitted.geometry.threads
    shared = found.shared_static + emitted.geometry.shared
    registers = -(-found.registers // 8) * 8 * threads
    room = SHARED_LIMIT[number] + 1024  # of a multiprocessor; each block takes 1 KiB in addition to its own
    blocks = min(65536 // registers, room // (shared + 1024), THREADS_PER_SM[number] // threads)
    local = found.stack + found.spill_stores
    stores = tuple(sorted({store_bytes(each) for each in functions[symbol].instructions if each.opcode == "STG"}))[::-1]
    return Figure(
        weight, m, arch, loop.per_weight, loop.classes, found.registers, local, shared, threads, blocks, stores
    )


def store_bytes(store: sass.Instruction) -> int:
    """Bytes of a store by one warp lane."""
    widths = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
    return next((widths[each] for each in store.modifiers if each in widths), 4)


PAGE = """# Hot loops: instructions per weight

Generated by `make docs` (`benchmarks/hot_loops.py`) from SASS by {compiler}. The figures are the instructions that one
warp lane issues per weight in the steady state of a kernel's hot loop, all of them: decoding, products, loads,
addresses, branches. `runtime/sass.py` defines the count. N = K = {size}, x and results in bf16, M rows of x.
`tests/cuda/test_hot_loops.py` compiles the kernels again and compares them with this page and with comments that quote
it. Columns after the classes: registers, bytes of local memory, shared memory per block, threads per block, blocks that
a multiprocessor holds, bytes of the stores of results.

Stores of 2 bytes beside those of 16 serve results that begin or end off 16 bytes. With up to 8 rows of x there are only
stores of 2 bytes: a block has 16 results of each row, 32 bytes, one sector of memory, which one instruction of half a
warp writes. If two threads stored 16 bytes each, each would add the warps' sums of eight results one after the other,
where now sixteen threads add the sums of one result each.

A multiprocessor issues four instructions per clock, of 32 lanes each. An H200 (132 multiprocessors, 1.755 GHz) has
29.7 · 10¹² such slots per second; at 75 % of 4.3 TB/s of copy bandwidth it reads 5.7 · 10¹² weights of 4.5 bits, scales
included. That leaves 5.2 slots per weight (6.2 · 10¹² of 4.125 bits: 4.7; 3.2 · 10¹² of 8 bits: 9.2).
"""


def page(figures: Sequence[Figure], compiler: str) -> str:
    """Markdown: one table per architecture."""
    lines = [PAGE.format(compiler=compiler, size=SIZE)]
    for arch in dict.fromkeys(each.arch for each in figures):
        lines += [
            f"## {arch}",
            "",
            f"| format | M | per weight | {' | '.join(COLUMNS)} "
            "| registers | local | shared KiB | threads | blocks | stores |",
            "|---|---|---|" + "---|" * (len(COLUMNS) + 6),
            *(row(each) for each in figures if each.arch == arch),
            "",
        ]
    return "\n".join(lines)


def row(each: Figure) -> str:
    classes = " | ".join(f"{each.classes[name]:.2f}" for name in COLUMNS)
    resources = f"{each.registers} | {each.local} | {each.shared / 1024:.3g} | {each.threads} | {each.blocks}"
    stores = ", ".join(map(str, each.stores))
    return f"| {each.format} | {each.rows} | {each.per_weight:.2f} | {classes} | {resources} | {stores} |"


_QUOTED = re.compile(r"(\w+),(?:\s|//)+M = (\d+),(?:\s|//)+(sm_\w+): (\d+\.\d+)")


def quotes(text: str) -> list[tuple[str, int, str, str]]:
    """(format, M, architecture, figure) of every quote of the table: `nf4, M = 1, sm_90a: 3.47`."""
    return [(found[1], int(found[2]), found[3], found[4]) for found in _QUOTED.finditer(text)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", default=ARCHS, choices=sorted(set(signature.ARCHS) - {"sm_70", "sm_75"}))
    parser.add_argument("--format", nargs="+", default=tuple(FORMATS), choices=tuple(FORMATS))
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--output", type=Path, help="a file for the page instead of the terminal")
    chosen = parser.parse_args()
    found = []
    for arch in chosen.arch:
        print(f"{len(chosen.format) * len(chosen.rows)} kernels for {arch}", file=sys.stderr)
        found += measure(chosen.format, chosen.rows, arch)
    text = page(found, nvrtc.compiler_version(chosen.arch[0]))
    if chosen.output:
        chosen.output.write_text(text + "\n", encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
