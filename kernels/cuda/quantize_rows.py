"""The `quantize_rows` template: activations to int8 rows (formats/int8_rows.py), a block per row, over int8.cuh."""

from __future__ import annotations

from qcompiler.formats.int8_rows import KINDS, clip_factors
from qcompiler.kernels.cuda.engines import CUDA_CORES
from qcompiler.kernels.cuda.geometry import CudaKernel, Geometry, SharedMemory
from qcompiler.kernels.cuda.signature import signature
from qcompiler.kernels.scalar import float_literal
from qcompiler.kernels.text import c_dim, header_comment, identifier, indent
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.quantize_rows import QuantizeRowsKernel

ENGINES = CUDA_CORES

COLUMNS = 8
"""Target columns per thread: enough loads in flight, and still many threads."""


def emit(spec: KernelSpec, arch: str) -> CudaKernel:
    """One kernel for any architecture."""
    del arch
    body, x, out = spec.body, spec.operands[0], spec.operands[-1]
    assert isinstance(body, QuantizeRowsKernel)
    outliers = body.kind == "outliers"
    threads = 32
    while threads < 256 and threads * COLUMNS < body.cols:
        threads *= 2
    shared = SharedMemory()
    shared.add("tops", "int", threads // 32, 4)
    factor, fixed = clip_factors(body.value) if body.kind == "tensor" else (0.0, 0.0)
    numbers = (float(factor), float(fixed), body.value if outliers else 0.0)
    literals = [float_literal(number, "f32") for number in numbers]
    if body.kind == "image":
        literals[1] = f"{identifier(spec.operands[1].name)}[row / {c_dim(body.each)}]"
    columns = identifier(spec.operands[1].name) if outliers else "(const bool*)nullptr"
    lines = [
        *shared.declarations(),
        "const int64_t row = blockIdx.x;",
        f"qi_quantise_row<{KINDS.index(body.kind)}, {threads}>(",
        f"    {identifier(x.name)} + row * {c_dim(x.strides[0])}, {body.cols}, {', '.join(literals)}, {columns},",
        f"    {identifier(out.name)} + row * {c_dim(out.strides[0])}, tops);",
    ]
    note = f"rows of int8, {body.kind}; a block of {threads} threads per row"
    text = "\n".join([header_comment(spec, note), signature(spec, threads), *indent(lines), "}\n"])
    return CudaKernel(text, Geometry((body.rows, 1, 1), (threads, 1, 1), shared.nbytes), "rows", (note,))
