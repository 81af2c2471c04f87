"""Sort and top-k along one dim as CUDA C++: the place of an element is the number of elements before it.

A thread owns one element and reads its row once. This is quadratic in the length, needs no barriers and no extra
memory, and is stable by construction. NaN counts as the largest value; equal values keep their order.
"""

from __future__ import annotations

from qcompiler.kernels.cuda.engines import CUDA_CORES
from qcompiler.kernels.cuda.geometry import CudaKernel
from qcompiler.kernels.cuda.places import THREADS, element_geometry, offset, unravel
from qcompiler.kernels.cuda.signature import signature
from qcompiler.kernels.text import c_dim, header_comment, identifier, indent
from qcompiler.plan.dims import product
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.order import OrderKernel

ENGINES = CUDA_CORES


def precedes(kind: str, other: str, own: str, other_at: str, own_at: str) -> str:
    """C++ text: whether the value `other` comes before `own` in an order of `kind` ("less" or "greater")."""
    less = f"({other} == {other} && ({own} != {own} || {other} < {own}))"
    greater = f"({own} == {own} && ({other} != {other} || {own} < {other}))"
    first, second = (less, greater) if kind == "less" else (greater, less)
    return f"{first} || (!{second} && {other_at} < {own_at})"


def emit(spec: KernelSpec, arch: str) -> CudaKernel:
    """One sort or top-k for any architecture."""
    del arch
    body = spec.body
    assert isinstance(body, OrderKernel)
    x, values, indices = spec.operands
    sizes = (body.outer, body.length, body.inner)
    kind = "greater" if body.descending else "less"
    lines = [
        f"const int64_t e = (int64_t)blockIdx.x * {THREADS} + threadIdx.x;",
        f"if (e < {c_dim(product(sizes))}) {{",
        *indent(unravel("e", ("o", "i", "n"), sizes)),
        f"    const auto own = qc_load({identifier(x.name)} + {offset(x, ['o', 'i', 'n'])});",
        "    int64_t rank = 0;",
        f"    for (int64_t j = 0; j < {c_dim(body.length)}; j++) {{",
        f"        const auto other = qc_load({identifier(x.name)} + {offset(x, ['o', 'j', 'n'])});",
        f"        rank += ({precedes(kind, 'other', 'own', 'j', 'i')}) ? 1 : 0;",
        "    }",
        f"    if (rank < {c_dim(body.count)}) {{",
        f"        {identifier(values.name)}[{offset(values, ['o', 'rank', 'n'])}] = "
        f"{identifier(x.name)}[{offset(x, ['o', 'i', 'n'])}];",
        f"        {identifier(indices.name)}[{offset(indices, ['o', 'rank', 'n'])}] = i;",
        "    }",
        "}",
    ]
    head = header_comment(spec, "a thread per element counts what comes before it; NaN the largest")
    text = "\n".join([head, signature(spec, THREADS), *indent(lines), "}\n"])
    return CudaKernel(text, element_geometry(sizes))
