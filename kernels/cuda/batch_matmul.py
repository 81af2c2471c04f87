"""Batched products of strided operands on the CUDA cores: tiles in shared memory, fp32 accumulation, one rounding.

A block computes 64 x 64 elements (16 x 64 for few rows) of one product, 32 columns of k at a time. A thread owns 4 rows
and 4 columns, 16 apart. Tiles are staged along the dim that has unit stride.
"""

from __future__ import annotations

from qcompiler.kernels.cuda.engines import CUDA_CORES
from qcompiler.kernels.cuda.geometry import CudaKernel, Geometry, SharedMemory
from qcompiler.kernels.cuda.per_element import blocks_of
from qcompiler.kernels.cuda.signature import signature
from qcompiler.kernels.text import c_dim, header_comment, identifier, indent, offset, unravel
from qcompiler.plan.dims import dim, product
from qcompiler.plan.kernel import KernelSpec, Operand
from qcompiler.plan.kinds.batch_matmul import BatchMatmulKernel

ENGINES = CUDA_CORES

_COLUMNS = 64
_DEPTH = 32
_ROW = _DEPTH + 4


def emit(spec: KernelSpec, arch: str) -> CudaKernel:
    """One batched product for any architecture."""
    del arch
    body = spec.body
    assert isinstance(body, BatchMatmulKernel)
    rows = 16 if isinstance(body.m, int) and body.m <= 16 else 64
    threads = rows * 4
    memory = SharedMemory()
    memory.add("a_tile", "float", rows * _ROW, 4)
    memory.add("b_tile", "float", _COLUMNS * _ROW, 4)
    down, right = blocks_of(dim(body.m), rows), blocks_of(dim(body.n), _COLUMNS)
    blocks = down * right * product(body.batch)
    lines = [
        *memory.declarations(),
        "const int lane = (int)threadIdx.x % 16, first = (int)threadIdx.x / 16 * 4;  // of its 4 rows",
        f"const int64_t across = {c_dim(right)}, down = {c_dim(down)}, batch = blockIdx.x / across / down;",
        f"const int64_t n0 = blockIdx.x % across * {_COLUMNS}, m0 = blockIdx.x / across % down * {rows};",
        *_batch(spec, body),
        f"const int m_count = (int)qc_min({rows}, {c_dim(body.m)} - m0);",
        f"const int n_count = (int)qc_min({_COLUMNS}, {c_dim(body.n)} - n0);",
        "float sum[4][4] = {};",
        f"for (int64_t k0 = 0; k0 < {c_dim(body.k)}; k0 += {_DEPTH}) {{",
        f"    const int k_count = (int)qc_min({_DEPTH}, {c_dim(body.k)} - k0);",
        *indent(_stage(spec, rows, threads)),
        "    __syncthreads();",
        f"    qc_dot_tile<{_DEPTH}, {_ROW}>(sum, a_tile + first * {_ROW}, b_tile + lane * {_ROW});",
        "    __syncthreads();  // the tiles are used",
        "}",
        *_finish(spec.operands[2]),
    ]
    head = header_comment(spec, f"tiles of {rows} x {_COLUMNS}, {_DEPTH} columns of k at a time, {threads} threads")
    text = "\n".join([head, signature(spec, threads, 1), *indent(lines), "}\n"])
    return CudaKernel(text, Geometry((blocks.to_dim(), 1, 1), (threads, 1, 1), memory.nbytes))


def _batch(spec: KernelSpec, body: BatchMatmulKernel) -> list[str]:
    """Where the operands' matrices begin for this block's product."""
    names = [f"i{axis}" for axis in range(len(body.batch))]
    lines = unravel("batch", names, body.batch) if names else []
    for role, operand in zip(("a", "b", "out"), spec.operands, strict=True):
        leading = operand.strides[: len(names)]
        terms = [f"{name} * {c_dim(step)}" for name, step in zip(names, leading, strict=True) if step != 0]
        lines.append(f"const auto {role}_matrix = {' + '.join([identifier(operand.name), *terms])};")
    return lines


def _stage(spec: KernelSpec, rows: int, threads: int) -> list[str]:
    """Stages a as rows of k, and b as columns of k."""
    a, b, _ = spec.operands
    (a_down, a_right), (b_down, b_right) = a.strides[-2:], b.strides[-2:]

    def call(role: str, size: int, down: object, origin: str, step: str, along: str, count: str) -> str:
        template = f"qc_stage_strided<{size}, {_DEPTH}, {_ROW}, {threads}, {'true' if down else 'false'}>"
        return f"{template}({role}_tile, {role}_matrix + {origin}, {step}, {along}, {count}, k_count);"

    return [
        call("a", rows, a_down == 1 and a_right != 1, f"m0 * {c_dim(a_down)} + k0 * {c_dim(a_right)}",
             c_dim(a_down), c_dim(a_right), "m_count"),
        call("b", _COLUMNS, b_right == 1 and b_down != 1, f"n0 * {c_dim(b_right)} + k0 * {c_dim(b_down)}",
             c_dim(b_right), c_dim(b_down), "n_count"),
    ]  # fmt: skip


def _finish(out: Operand) -> list[str]:
    matrix = Operand(name="m", dtype=out.dtype, access="w", shape=(1, 1), strides=out.strides[-2:])
    place = offset(matrix, ["(m0 + first + r)", "(n0 + lane + 16 * c)"])
    return [
        "#pragma unroll",
        "for (int r = 0; r < 4; r++) {",
        "#pragma unroll",
        "    for (int c = 0; c < 4; c++) {",
        "        if (first + r < m_count && lane + 16 * c < n_count)",
        f"            qc_store(out_matrix + {place}, sum[r][c]);",
        "    }",
        "}",
    ]
