"""Scatter along one dim as CUDA C++: a thread owns one column and applies its entries in order.

So equal indices are applied in a fixed order, without atomics. Negative indices count from the end. An index out of
range writes nothing (a kernel on the device cannot report it).
"""

from __future__ import annotations

from qcompiler.kernels.cuda.engines import CUDA_CORES
from qcompiler.kernels.cuda.geometry import CudaKernel
from qcompiler.kernels.cuda.offsets import THREADS, element_geometry, offset, unravel
from qcompiler.kernels.cuda.signature import signature
from qcompiler.kernels.scalar import FLOATS, fold_text
from qcompiler.kernels.text import STORAGE_TYPES, VALUE_TYPES, c_dim, header_comment, identifier, indent
from qcompiler.plan.dims import product
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.scatter import ScatterKernel

ENGINES = CUDA_CORES


def store(out: str, dtype: str, value: str) -> str:
    """The statement that rounds a value to `dtype` and writes it at the pointer `out`."""
    stored = value if dtype in FLOATS else f"({STORAGE_TYPES[dtype]})({value})"
    return f"qc_store({out}, {stored});"


def emit(spec: KernelSpec, arch: str) -> CudaKernel:
    """One scatter for any architecture."""
    del arch
    body = spec.body
    assert isinstance(body, ScatterKernel)
    index, src, out = spec.operands
    sizes, kind = (body.outer, body.inner), VALUE_TYPES[out.dtype]
    folded = fold_text(body.fold, out.dtype, f"({kind})qc_load(place)", "value")
    lines = [
        f"const int64_t e = (int64_t)blockIdx.x * {THREADS} + threadIdx.x;",
        f"if (e < {c_dim(product(sizes))}) {{",
        *indent(unravel("e", ("o", "n"), sizes)),
        f"    for (int64_t i = 0; i < {c_dim(body.count)}; i++) {{",
        f"        int64_t at = (int64_t){identifier(index.name)}[{offset(index, ['o', 'i', 'n'])}];",
        f"        if (at < 0) at += {c_dim(body.length)};",
        f"        if (at < 0 || at >= {c_dim(body.length)}) continue;",
        f"        const {kind} value = ({kind})qc_load({identifier(src.name)} + {offset(src, ['o', 'i', 'n'])});",
        f"        {STORAGE_TYPES[out.dtype]}* const place = {identifier(out.name)} + {offset(out, ['o', 'at', 'n'])};",
        f"        {store('place', out.dtype, folded)}",
        "    }",
        "}",
    ]
    head = header_comment(spec, f"scatter ({body.fold}), a thread per column, entries in order")
    text = "\n".join([head, signature(spec, THREADS), *indent(lines), "}\n"])
    return CudaKernel(text, element_geometry(sizes))
