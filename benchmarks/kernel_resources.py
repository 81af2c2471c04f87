"""Resources of each CUDA kernel of a transformer layer, from ptxas: registers, shared memory, spills, per architecture.

    .venv/bin/python benchmarks/kernel_resources.py [--arch sm_90a …] [--part linear …] [--json out.json]

Prints a page of Markdown (`make docs` writes it to docs/kernel-resources.md). Needs NVRTC and no GPU; sm_70 appears
where CUDA 12's NVRTC is installed. tests/cuda/test_resources.py compiles the same kernels.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from qcompiler.kernels.cuda import emit, signature
from qcompiler.plan.attention_parts import COLUMNS_BEHIND
from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel import DType, FormatRef, KernelSpec, Operand, ScalarOp, ScalarProgram
from qcompiler.plan.kinds.attention import AttentionKernel
from qcompiler.plan.kinds.grouped_linear import GroupedLinearKernel
from qcompiler.plan.kinds.join_attention import JoinAttentionKernel
from qcompiler.plan.kinds.linear import LinearKernel
from qcompiler.plan.kinds.loop import AffineAccess, LoopKernel
from qcompiler.plan.kinds.norm import NormKernel
from qcompiler.plan.kinds.softmax import SoftmaxKernel
from qcompiler.runtime import nvrtc
from qcompiler.runtime.emitter import emitter_version

BF16_ONLY = ("q4_K", "q6_K", "fp8_e4m3", "nvfp4")
"""Formats that the table has only in the type of their models."""

FORMATS: dict[str, FormatRef | None] = {
    "nf4": FormatRef(name="nf4", params={"block": 64}),
    "int4": FormatRef(name="int4", params={"group": 32}),
    "int8": FormatRef(name="int8"),
    "plain": None,
    **{name: FormatRef(name=name) for name in BF16_ONLY},
}
DTYPES: tuple[DType, ...] = ("f32", "bf16", "f16")
M_CLASSES = ("1", "2-8", "9-64", "large")
PARTS = ("linear", "grouped_linear", "norm", "softmax", "attention", "join_attention", "loop")
GROUPED: tuple[tuple[str, DType], ...] = (("nf4", "bf16"), ("int8", "bf16"), ("q4_K", "bf16"), ("plain", "f16"))

Strides = tuple[Dim, ...]


def tensor(name: str, dtype: DType, shape: tuple[Dim, ...], strides: Strides, access: Any = "r") -> Operand:
    return Operand(name=name, dtype=dtype, access=access, shape=shape, strides=strides)


def linear(weight: str, dtype: DType, m_class: Any, n: int = 4096, k: int = 4096) -> KernelSpec:
    """A linear with bias over `weight` (a key of `FORMATS`) in the layout of CUDA targets."""
    m: Dim = 1 if m_class == "1" else "m"
    operands = (
        tensor("x", dtype, (m, k), (k, 1)),
        Operand(name="w", dtype=dtype, access="r", shape=(n, k), format=FORMATS[weight], layout="cuda_t16_v1"),
        tensor("bias", dtype, (n,), (1,)),
        tensor("out", dtype, (m, n), (n, 1), "w"),
    )
    name = f"linear_{weight}_{dtype}_{m_class.replace('-', '_')}"
    body = LinearKernel(m=m, n=n, k=k, m_class=m_class, has_bias=True)
    symbols = () if m_class == "1" else ("m",)
    return KernelSpec(name=name, symbols=symbols, operands=operands, body=body, serves=f"{weight} linear")


def grouped_linear(weight: str, dtype: DType, rows: Dim, n: int = 4096, k: int = 4096) -> KernelSpec:
    """Two of eight experts per token; `rows` tokens, a number or a symbol."""
    pairs: Dim = 2 * rows if isinstance(rows, int) else f"2*{rows}"
    w = Operand(name="w", dtype=dtype, access="r", shape=(8 * n, k), format=FORMATS[weight], layout="cuda_t16_v1")
    x, index = tensor("x", dtype, (rows, k), (k, 1)), tensor("index", "i64", (pairs,), (1,))
    operands = (x, w, index, tensor("out", dtype, (pairs, n), (n, 1), "w"))
    body = GroupedLinearKernel(rows=rows, repeat=2, experts=8, n=n, k=k)
    name = f"grouped_linear_{weight}_{dtype}_{'any' if isinstance(rows, str) else rows}"
    symbols = (rows,) if isinstance(rows, str) else ()
    return KernelSpec(name=name, symbols=symbols, operands=operands, body=body, serves=f"{weight} experts")


def norm(kind: Any, dtype: DType, cols: int = 4096) -> KernelSpec:
    vectors = [tensor("w", dtype, (cols,), (1,))] + ([tensor("b", dtype, (cols,), (1,))] if kind == "layer" else [])
    x, y = tensor("x", dtype, ("r", cols), (cols, 1)), tensor("y", dtype, ("r", cols), (cols, 1), "w")
    body = NormKernel(kind=kind, rows="r", cols=cols, eps=1e-5, has_weight=True, has_bias=kind == "layer")
    return KernelSpec(name=f"norm_{kind}_{dtype}", symbols=("r",), operands=(x, *vectors, y), body=body)


def softmax(dtype: DType) -> KernelSpec:
    x, y = tensor("x", dtype, ("r", "c"), ("c", 1)), tensor("y", dtype, ("r", "c"), ("c", 1), "w")
    return KernelSpec(
        name=f"softmax_{dtype}", symbols=("c", "r"), operands=(x, y), body=SoftmaxKernel(rows="r", cols="c")
    )


def attention(dtype: DType, *, decode: bool, heads: int = 32, kv_heads: int = 8, size: int = 128) -> KernelSpec:
    """Grouped-query attention over (batch, length, heads, size); causal, or one query."""
    length: Dim = 1 if decode else "t"

    def heads_of(name: str, count: int, rows: Dim, access: Any = "r") -> Operand:
        batch: Dim = f"{rows}*{count * size}" if isinstance(rows, str) else count * size
        return tensor(name, dtype, (1, count, rows, size), (batch, size, count * size, 1), access)

    operands = (
        heads_of("q", heads, length), heads_of("k", kv_heads, "s"), heads_of("v", kv_heads, "s"),
        heads_of("out", heads, length, "w"),
    )  # fmt: skip
    body = AttentionKernel(
        batch=1, heads=heads, kv_heads=kv_heads, q_len=length, kv_len="s", head_dim=size, value_dim=size,
        scale=size**-0.5, causal=not decode, mask="none",
    )  # fmt: skip
    name = f"attention_{'decode' if decode else 'causal'}_{dtype}"
    return KernelSpec(name=name, symbols=("s", "t"), operands=operands, body=body)


def attention_in_parts(dtype: DType, parts: int = 32) -> list[KernelSpec]:
    """The attention of one query with its keys in parts, and what joins them."""
    whole = attention(dtype, decode=True)
    _, heads, _, size = (int(n) for n in whole.operands[-1].shape)
    row = parts * (size + COLUMNS_BEHIND)
    divided = tensor(
        "out",
        "f32",
        (1, heads, 1, parts, size + COLUMNS_BEHIND),
        (heads * row, row, row, size + COLUMNS_BEHIND, 1),
        "w",
    )
    made = msgspec.structs.replace(
        whole, name=f"attention_parts_{dtype}", operands=(*whole.operands[:-1], divided),
        body=msgspec.structs.replace(whole.body, parts=parts),
    )  # fmt: skip
    x = msgspec.structs.replace(divided, name="x", access="r")
    body = JoinAttentionKernel(batch=1, heads=heads, q_len=1, parts=parts, value_dim=size)
    operands = (x, tensor("out", dtype, (1, heads, 1, size), (heads * size, size, size, 1), "w"))
    return [made, KernelSpec(name=f"join_attention_{dtype}", symbols=(), operands=operands, body=body)]


def loop(name: str, program: ScalarProgram, accesses: Sequence[Strides]) -> KernelSpec:
    """A nest over (m, 4096): `accesses` are the operands' coefficients, the output last (it reduces if that is 0)."""
    dtype, last = program.inputs[0][1], len(accesses) - 1
    reduce = accesses[last][1] == 0
    names = [*(f"x{i}" for i in range(last)), "y"]
    operands = tuple(Operand(name=each, dtype=dtype, access="w" if each == "y" else "r", shape=()) for each in names)
    body = LoopKernel(
        extents=("m", 4096),
        iterators=("parallel", "reduction" if reduce else "parallel"),
        accesses=tuple(AffineAccess(offset=0, coefficients=each) for each in accesses),
        body=program,
        init=((0.0).hex(),) if reduce else (),
    )
    return KernelSpec(name=f"loop_{name}_{dtype}", symbols=("m",), operands=operands, body=body)


def loops(dtype: DType) -> list[KernelSpec]:
    """SwiGLU's product, a transposition, and a sum over rows."""
    row: Strides = (4096, 1)
    wide = dtype != "f32"

    def program(count: int, ops: Iterable[ScalarOp], result: str) -> ScalarProgram:
        names = [*(f"in{i}" for i in range(count)), "acc"]
        extended = [scalar(f"w{i}", "arith.extf", f"in{i}") for i in range(count)] if wide else []
        last = [ScalarOp(result="out", op="arith.truncf", dtype=dtype, args=(result,))] if wide else []
        return ScalarProgram(
            inputs=tuple((name, dtype) for name in names),
            ops=(*extended, *ops, *last),
            yields=("out" if wide else result,),
        )

    def scalar(result: str, op: str, *args: str, **more: Any) -> ScalarOp:
        return ScalarOp(result=result, op=op, dtype="f32", args=args, **more)

    a, b = ("w0", "w1") if wide else ("in0", "in1")
    swiglu = [
        scalar("one", "arith.constant", value=(1.0).hex()), scalar("n", "arith.negf", a), scalar("e", "math.exp", "n"),
        scalar("d", "arith.addf", "one", "e"), scalar("s", "arith.divf", a, "d"), scalar("p", "arith.mulf", "s", b),
    ]  # fmt: skip
    doubled = [scalar("p", "arith.addf", a, a)]
    total = ScalarProgram(
        inputs=(("in0", "f32"), ("acc", "f32")), ops=(scalar("p", "arith.addf", "acc", "in0"),), yields=("p",)
    )
    return [
        loop("swiglu", program(2, swiglu, "p"), (row, row, row)),
        loop("transpose", program(1, doubled, "p"), ((1, "m"), row)),
        *([] if wide else [loop("row_sum", total, (row, (1, 0)))]),
    ]


def specs(part: str) -> list[KernelSpec]:
    """The kernels of one part of the table."""
    match part:
        case "linear":
            every = itertools.product(FORMATS, DTYPES, M_CLASSES)
            return [linear(*each) for each in every if each[1] == "bf16" or each[0] not in BF16_ONLY]
        case "grouped_linear":
            return [grouped_linear(*kind, rows) for kind in GROUPED for rows in (1, 128, "m")]
        case "norm":
            return [norm(*each) for each in itertools.product(("layer", "rms"), DTYPES)]
        case "softmax":
            return [softmax(dtype) for dtype in DTYPES]
        case "attention":
            whole = [attention(dtype, decode=decode) for dtype, decode in itertools.product(DTYPES, (True, False))]
            return [*whole, attention_in_parts("bf16")[0]]
        case "join_attention":
            return [attention_in_parts("bf16")[1]]
        case "loop":
            return [spec for dtype in DTYPES for spec in loops(dtype)]
    raise SystemExit(f"there is no part {part!r}; there are {', '.join(PARTS)}")


def archs() -> tuple[str, ...]:
    """The architectures that the installed compilers support."""
    return tuple(arch for arch in signature.ARCHS if arch != "sm_70" or nvrtc.sm70_available())


def measure(kernels: Sequence[KernelSpec], arch: str) -> dict[str, dict[str, Any]]:
    """Resources by kernel, with the dynamic shared memory and the engine of the emitted kernel; one module."""
    cubin = nvrtc.compile_cubin(
        emit.emit_module(kernels, arch), arch, name="resources", emitter_version=emitter_version("cuda")
    )
    rows = {}
    for spec in kernels:
        emitted, found = emit.emit_kernel(spec, arch), cubin.resources[nvrtc.kernel_symbol(spec.name)]
        shared = found.shared_static + emitted.geometry.shared
        rows[spec.name] = {
            **asdict(found), "shared": shared, "threads": emitted.geometry.threads, "engine": emitted.engine,
            "local": found.uses_local_memory,
        }  # fmt: skip
    return rows


PAGE = """# CUDA kernels: registers, shared memory, spills

Generated by `make docs` (`benchmarks/kernel_resources.py`) from `ptxas -v`, one column per architecture. A cell is
registers per thread / KiB of shared memory per block; kernels on tensor cores are marked `*`; bytes of local memory per
thread, if any, are in brackets. N = K = 4096; heads of 128; grouped linears have two of eight experts for 1, 128 or any
number of tokens.
"""


def page(table: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Markdown: one table per part."""
    columns = list(table)
    lines = [PAGE]
    names = list(next(iter(table.values())))
    for part in PARTS:
        chosen = [name for name in names if name.startswith(part)]
        if not chosen:
            continue
        lines += [
            f"## {part}",
            "",
            f"| kernel | threads | {' | '.join(columns)} |",
            "|---|---|" + "---|" * len(columns),
        ]
        for name in chosen:
            cells = [cell(table[arch][name]) for arch in columns]
            threads = sorted({table[arch][name]["threads"] for arch in columns})
            lines.append(f"| {name} | {'/'.join(map(str, threads))} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def cell(row: dict[str, Any]) -> str:
    local = row["stack"] + row["spill_stores"]
    marks = ("\\*" if row["engine"] == "mma" else "") + (f" [{local}]" if local else "")
    return f"{row['registers']} / {row['shared'] / 1024:.3g}{marks}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", default=None, choices=signature.ARCHS)
    parser.add_argument("--part", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    kernels = [spec for part in chosen.part for spec in specs(part)]
    table = {}
    for arch in chosen.arch or archs():
        print(f"{len(kernels)} kernels for {arch}", file=sys.stderr)
        table[arch] = measure(kernels, arch)
    if chosen.json:
        chosen.json.write_text(json.dumps(table, indent=1))
    print(page(table))


if __name__ == "__main__":
    main()
