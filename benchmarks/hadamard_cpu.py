"""The Hadamard transform in front of a linear, beside that linear and the making of its int8 rows, on a CPU.

    python benchmarks/hadamard_cpu.py [--rounds 15]

Every round times each kernel once for each case, on one thread, by the processor time of the process.  The table has
the medians of the rounds' ratios: the transform's time over that of `quantize_rows` of the same rows, and over that of
the W4A8 linear (int4 in groups of 32) behind it, whose result has 4096 columns.
"""

from __future__ import annotations

import argparse
import statistics

import numpy as np
from cpubench.linears import Product, linear_spec, numbers, operands, packed, rows_spec
from cpubench.probes import Bench
from rich.console import Console
from rich.table import Table

from qcompiler.formats.int8_rows import row_bytes
from qcompiler.plan.kernel import KernelSpec, Operand
from qcompiler.plan.kinds.hadamard import HadamardKernel, block_of

COLUMNS = (1536, 4096, 11008, 8192)
ROWS = (1, 64)
WIDTH = 4096
PRODUCT = Product("int4", "int4", {"group": 32}, "int8")


def transform_spec(cols: int) -> KernelSpec:
    """The transform of m rows in the runs that `rotate_online` takes."""
    ends = (("x", "r"), ("out", "w"))
    made = tuple(
        Operand(name=name, dtype="f32", access=access, shape=("m", cols), strides=(cols, 1))  # type: ignore[arg-type]
        for name, access in ends
    )
    body = HadamardKernel(rows="m", cols=cols, block=block_of(cols))
    return KernelSpec(name=f"transform_{cols}", symbols=("m",), operands=made, body=body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    cases = [(cols, rows) for cols in COLUMNS for rows in ROWS]
    specs = {
        (cols, rows): (transform_spec(cols), rows_spec(cols), linear_spec(PRODUCT, rows, WIDTH, cols))
        for cols, rows in cases
    }
    bench = Bench([each for three in specs.values() for each in three], 1, cpu_time=True)
    calls = {}
    for (cols, rows), (transform, make, linear) in specs.items():
        x, bias, _ = numbers(rows, WIDTH, cols)
        given = operands(PRODUCT, x, packed(PRODUCT, WIDTH, cols), bias)
        calls[cols, rows] = (
            bench.caller(transform, [x, np.zeros_like(x)], [rows]),
            bench.caller(make, [x, np.zeros((rows, row_bytes(cols)), np.int8)], [rows]),
            bench.caller(linear, given, [rows]),
        )
    times: dict[tuple[int, int], list[tuple[float, ...]]] = {case: [] for case in cases}
    for number in range(options.rounds + 1):
        for case in cases:
            found = tuple(call(max(1, 2000 // case[1] if at < 2 else 1)) for at, call in enumerate(calls[case]))
            if number:  # the first round warms up
                times[case].append(found)
    table = Table("columns", "of a run", "rows", "transform", "of quantize_rows", "of the linear")
    for (cols, rows), found in times.items():
        ratios = [statistics.median(each[0] / each[at] for each in found) for at in (1, 2)]
        micro = 1e6 * statistics.median(each[0] for each in found)
        table.add_row(
            str(cols), str(block_of(cols)), str(rows), f"{micro:.2f} µs", f"{ratios[0]:.2f}", f"{ratios[1]:.4f}"
        )
    Console().print(table)


if __name__ == "__main__":
    main()
