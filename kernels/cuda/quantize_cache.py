"""The `quantize_cache` template: keys and values as rows of a cache, a warp per row, over cache.cuh."""

from __future__ import annotations

from qcompiler.kernels.cuda.engines import CUDA_CORES
from qcompiler.kernels.cuda.geometry import CudaKernel, Geometry
from qcompiler.kernels.cuda.per_element import blocks_of
from qcompiler.kernels.cuda.signature import signature
from qcompiler.kernels.text import c_dim, header_comment, identifier, indent, offset, unravel
from qcompiler.plan.dims import product
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.quantize_cache import QuantizeCacheKernel

ENGINES = CUDA_CORES

ROWS = 4
"""Rows of a block: a warp for each."""


def emit(spec: KernelSpec, arch: str) -> CudaKernel:
    """One kernel for any architecture."""
    del arch
    body, (x, out) = spec.body, spec.operands
    assert isinstance(body, QuantizeCacheKernel)
    names, sizes = ["o", "m", "i"], [body.outer, body.middle, body.inner]
    rows, threads = product(sizes), 32 * ROWS
    at = [*names, "0"]
    one = f"qc_quantise_cache_row<qc_code_{body.kind}, {body.cols}>"
    if body.kind == "int4":
        one = f"qc_quantise_int4_row<{body.cols}>"
    lines = [
        "const int lane = (int)threadIdx.x % 32;",
        f"const int64_t number = (int64_t)blockIdx.x * {ROWS} + threadIdx.x / 32;",
        f"if (number >= {c_dim(rows)}) return;",
        *unravel("number", names, sizes),
        *(f"(void){name};" for name in names),
        f"{one}(",
        f"    {identifier(x.name)} + {offset(x, at)}, {identifier(out.name)} + {offset(out, at)}, lane);",
    ]
    note = f"rows of {body.kind} with their scales; a warp per row"
    text = "\n".join([header_comment(spec, note), signature(spec, threads), *indent(lines), "}\n"])
    return CudaKernel(text, Geometry((blocks_of(rows, ROWS).to_dim(), 1, 1), (threads, 1, 1)), "rows", (note,))
