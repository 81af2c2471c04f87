"""Kernels built for aarch64 by a cross compiler, run by qemu: what the plain C++ kernels give on an Arm processor.

Needs `aarch64-linux-gnu-g++` and `qemu-aarch64` (Debian: g++-aarch64-linux-gnu, qemu-user); skipped without them.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from by_path import load
from kernel_cases import same_bits

from qcompiler import formats
from qcompiler.formats import int8_rows
from qcompiler.kernels import layouts
from qcompiler.kernels.cpu.emit import emit_kernels, scratch_bytes
from qcompiler.plan.kernel import FormatRef, KernelSpec, Operand
from qcompiler.plan.kinds.linear import LinearKernel

int8 = load("tests/kernels/test_linear_int8.py")
TOOLS = ("aarch64-linux-gnu-g++", "qemu-aarch64")
N, K = 48, 512
FORMATS = ("nf4", "int4", "int8", "q4_K", "tq", "fp8_e4m3")
CLASSES: dict[int, Any] = {1: "1", 7: "2-8", 33: "large"}
MAIN = r"""
#include <stdio.h>
#include <stdlib.h>
static void in_order(struct qc_ctx* ctx, int64_t tasks, qc_task fn, void* arg) {
    for (int64_t task = 0; task < tasks; task++) fn(arg, task, ctx->scratch);
}
static void* room(int64_t nbytes) { return aligned_alloc(64, (nbytes + 63) / 64 * 64); }
static void read_all(void* to, int64_t nbytes) {
    if (fread(to, 1, nbytes, stdin) != (size_t)nbytes) exit(2);
}
// From stdin: the kernel's number, counts of symbols and operands, the symbols, the operands' sizes, their bytes. To
// stdout: the last operand.
int main() {
    int64_t head[3], symbols[8], sizes[8];
    void* operands[8];
    read_all(head, sizeof head);
    read_all(symbols, 8 * head[1]);
    read_all(sizes, 8 * head[2]);
    for (int64_t i = 0; i < head[2]; i++) read_all(operands[i] = room(sizes[i]), sizes[i]);
    qc_ctx ctx = {in_order, 0, (char*)room(SCRATCH), SCRATCH, 2, 0, 0, 0, -1, 0};
    memset(ctx.scratch, 255, SCRATCH);
    KERNELS[head[0]](&ctx, operands, symbols);
    const int64_t last = sizes[head[2] - 1];
    return fwrite(operands[head[2] - 1], 1, last, stdout) == (size_t)last ? 0 : 3;
}
"""

pytestmark = pytest.mark.slow


def float_spec(name: str, m: int) -> KernelSpec:
    """x, w, out in fp32, by the kernel that serves m rows."""
    operands = (
        Operand(name="x", dtype="f32", access="r", shape=("m", K), strides=(K, 1)),
        Operand(name="w", dtype="f32", access="r", shape=(N, K), format=FormatRef(name=name), layout="cpu_p16_v2"),
        Operand(name="out", dtype="f32", access="w", shape=("m", N), strides=(N, 1)),
    )
    body = LinearKernel(m="m", n=N, k=K, m_class=CLASSES[m], has_bias=False)
    return KernelSpec(name=f"f_{name}_{m}", symbols=("m",), operands=operands, body=body)


SPECS = [*(int8.linear_spec(case) for case in int8.FAST), *(float_spec(name, m) for name in FORMATS for m in CLASSES)]
Run = Callable[[str, int, Sequence[Any]], Any]


@pytest.fixture(scope="module")
def on_arm(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """``on_arm(name, m, operands)``: the last operand after the kernel ran on m rows."""
    if lacks := [tool for tool in TOOLS if shutil.which(tool) is None]:
        pytest.skip(f"{' and '.join(lacks)} not found")
    names = [spec.name for spec in SPECS]
    table = f"static const qc_kernel KERNELS[] = {{{', '.join(f'qk_{name}' for name in names)}}};\n"
    scratch = f"enum {{ SCRATCH = {max(scratch_bytes(spec, 'generic') for spec in SPECS) + 64} }};\n"
    source, program = (tmp_path_factory.mktemp("aarch64") / file for file in ("kernels.cpp", "kernels"))
    source.write_text(emit_kernels(tuple(SPECS), "generic") + table + scratch + MAIN)
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-fno-math-errno", "-static", "-o", str(program)]
    subprocess.run([TOOLS[0], *flags, str(source)], check=True)

    def run(name: str, m: int, operands: Sequence[Any]) -> Any:
        sizes = [each.nbytes for each in operands]
        head = struct.pack(f"<{4 + len(sizes)}q", names.index(name), 1, len(sizes), m, *sizes)
        given = head + b"".join(np.ascontiguousarray(each).tobytes() for each in operands)
        done = subprocess.run([TOOLS[1], str(program)], input=given, capture_output=True, check=True)
        return np.frombuffer(done.stdout, operands[-1].dtype).reshape(operands[-1].shape)

    return run


@pytest.mark.parametrize("case", int8.FAST)
def test_products_of_int8_have_the_bits_of_their_definition(on_arm: Run, case: str) -> None:
    packed, (_, _, n, k, dtype) = int8.packed_weight(case), int8.WEIGHTS[case]
    data = layouts.get("cpu_p16_v2").pack(packed.format, "f32", n, k, packed.data)
    bias = np.random.default_rng(1).standard_normal(n).astype(np.float32)
    for m in (1, 2, 14, 33):
        rows = int8_rows.quantise(int8.activations(m, k, m), "token", 0.0, None)
        found = on_arm(f"l_{case}", m, [rows, data, bias, np.zeros((m, n), int8.DTYPES[dtype])])
        assert same_bits(found, int8.expected(case, packed, rows, bias)), (case, m)


@pytest.mark.parametrize("name", FORMATS)
def test_products_in_fp32_are_those_of_the_decoded_weight(on_arm: Run, name: str) -> None:
    rng = np.random.default_rng(2)
    packed = formats.get(name).encode(rng.standard_normal((N, K)).astype(np.float32))
    data, weight = layouts.get("cpu_p16_v2").pack(packed.format, "f32", N, K, packed.data), packed.format.decode(packed)
    for m in CLASSES:
        x = rng.standard_normal((m, K)).astype(np.float32)
        found = on_arm(f"f_{name}_{m}", m, [x, data, np.zeros((m, N), np.float32)])
        exact, terms = (
            x.astype(float) @ weight.T.astype(float),
            np.abs(x).astype(float) @ np.abs(weight).T.astype(float),
        )
        # A sum of K products, each rounded, and K additions: at most (K + 1) half units in the last place of the terms.
        assert (np.abs(found - exact) <= (K + 1) * 2.0**-24 * terms).all()
