"""The `hadamard` template: an orthogonal transform of each run of columns in registers, over hadamard.cuh."""

from __future__ import annotations

from qcompiler.kernels.cuda.engines import CUDA_CORES
from qcompiler.kernels.cuda.geometry import CudaKernel, Geometry, SharedMemory
from qcompiler.kernels.cuda.signature import signature
from qcompiler.kernels.scalar import float_literal
from qcompiler.kernels.text import c_dim, header_comment, identifier, indent
from qcompiler.plan.dims import dim
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.hadamard import HadamardKernel, scale_of

ENGINES = CUDA_CORES

WARP = 32
KEPT = 8
"""Numbers of a run in a thread's registers: a run of 256 is one warp's, and the largest is that of 1024 threads."""
WARPS = 4
"""Warps of a block if no run has more than one."""


def emit(spec: KernelSpec, arch: str) -> CudaKernel:
    """One kernel for any architecture."""
    del arch
    body, (x, out) = spec.body, spec.operands
    assert isinstance(body, HadamardKernel)
    kept = min(max(body.block // WARP, 1), KEPT)
    threads = body.block // kept  # of one run
    block = threads if threads > WARP else WARP * WARPS
    together, runs = block // threads, body.cols // body.block
    shared = SharedMemory()
    if threads > WARP:
        shared.add("exchanged", "float", body.block, 4)
    element = f"lane + {threads} * i"
    if threads > WARP:
        element = f"lane % {WARP} + {WARP} * i + lane / {WARP} * {WARP * KEPT}"
    at = f"run % {runs} * {body.block} + {element}"
    lines = [
        *shared.declarations(),
        f"const int64_t all = ({c_dim(body.rows)}) * {runs};",
        f"const int64_t run = (int64_t)blockIdx.x * {together} + threadIdx.x / {threads};",
        f"const int lane = (int)threadIdx.x % {threads};",
        f"float v[{kept}];",
        "#pragma unroll",
        f"for (int i = 0; i < {kept}; i++)  // a run that does not exist takes part in the shuffles",
        f"    v[i] = run < all ? qc_load({identifier(x.name)} + run / {runs} * {c_dim(x.strides[0])} + {at}) : 0.0f;",
        f"qh_transform<{body.block}>(v, {'exchanged' if threads > WARP else 'nullptr'});",
        "if (run < all) {",
        "#pragma unroll",
        f"    for (int i = 0; i < {kept}; i++)",
        f"        qc_store({identifier(out.name)} + run / {runs} * {c_dim(out.strides[0])} + {at}, "
        f"v[i] * {float_literal(scale_of(body.block), 'f32')});",
        "}",
    ]
    blocks = (dim(body.rows) * runs + (together - 1)) // together
    note = f"Hadamard transforms of {body.block} columns, {kept} in each of {threads} threads, {together} to a block"
    text = "\n".join([header_comment(spec, note), signature(spec, block), *indent(lines), "}\n"])
    return CudaKernel(text, Geometry((blocks.to_dim(), 1, 1), (block, 1, 1), shared.nbytes), notes=(note,))
