"""Gather along one dim as CUDA C++: `take` (one index list for all) and `along` (one index per element).

A thread copies one element. Negative indices count from the end. A kernel on the device cannot report an index out of
range; its result is `qc_poison` (NaN, or the lowest integer), never another element.
"""

from __future__ import annotations

from qcompiler.kernels.cuda.engines import CUDA_CORES
from qcompiler.kernels.cuda.geometry import CudaKernel
from qcompiler.kernels.cuda.offsets import THREADS, element_geometry, offset, unravel
from qcompiler.kernels.cuda.signature import signature
from qcompiler.kernels.gather_order import counts_fastest
from qcompiler.kernels.text import c_dim, header_comment, identifier, indent
from qcompiler.plan.dims import product
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.gather import GatherKernel

ENGINES = CUDA_CORES


def emit(spec: KernelSpec, arch: str) -> CudaKernel:
    """One gather for any architecture."""
    del arch
    body = spec.body
    assert isinstance(body, GatherKernel)
    x, index, out = spec.operands
    sizes = (body.outer, body.count, body.inner)
    by_name = {"o": body.outer, "i": body.count, "n": body.inner}
    # adjacent threads write adjacent elements of out
    names = ("o", "n", "i") if counts_fastest(body, out) else ("o", "i", "n")
    place = ["i"] if body.mode == "take" else ["o", "i", "n"]
    length = c_dim(body.length)
    lines = [
        f"const int64_t e = (int64_t)blockIdx.x * {THREADS} + threadIdx.x;",
        f"if (e < {c_dim(product(sizes))}) {{",
        *indent(unravel("e", names, [by_name[name] for name in names])),
        f"    int64_t at = (int64_t){identifier(index.name)}[{offset(index, place)}];",
        f"    if (at < 0) at += {length};",
        f"    const bool there = at >= 0 && at < {length};",
        f"    {identifier(out.name)}[{offset(out, ['o', 'i', 'n'])}] = there "
        f"? {identifier(x.name)}[{offset(x, ['o', 'at', 'n'])}] : qc_poison({identifier(x.name)});",
        "}",
    ]
    head = header_comment(spec, f"gather ({body.mode}), a thread per element; an index out of range gives poison")
    text = "\n".join([head, signature(spec, THREADS), *indent(lines), "}\n"])
    return CudaKernel(text, element_geometry(sizes))
