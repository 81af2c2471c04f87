"""The position of the first maximum along the middle dim as CUDA C++; the first NaN counts as the maximum.

One thread per column, in order.
"""

from __future__ import annotations

from qcompiler.kernels.cuda.engines import CUDA_CORES
from qcompiler.kernels.cuda.geometry import CudaKernel
from qcompiler.kernels.cuda.order import precedes
from qcompiler.kernels.cuda.places import THREADS, element_geometry, offset, unravel
from qcompiler.kernels.cuda.signature import signature
from qcompiler.kernels.text import c_dim, header_comment, identifier, indent
from qcompiler.plan.dims import product
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.argmax import ArgmaxKernel

ENGINES = CUDA_CORES


def emit(spec: KernelSpec, arch: str) -> CudaKernel:
    """One argmax for any architecture."""
    del arch
    body = spec.body
    assert isinstance(body, ArgmaxKernel)
    x, out = spec.operands
    sizes = (body.outer, body.inner)
    name = identifier(x.name)
    lines = [
        f"const int64_t e = (int64_t)blockIdx.x * {THREADS} + threadIdx.x;",
        f"if (e < {c_dim(product(sizes))}) {{",
        *indent(unravel("e", ("o", "n"), sizes)),
        "    int64_t at = 0;",
        f"    auto best = qc_load({name} + {offset(x, ['o', '0', 'n'])});",
        f"    for (int64_t i = 1; i < {c_dim(body.length)}; i++) {{",
        f"        const auto value = qc_load({name} + {offset(x, ['o', 'i', 'n'])});",
        f"        if ({precedes('greater', 'value', 'best', 'i', 'at')}) {{",
        "            best = value;",
        "            at = i;",
        "        }",
        "    }",
        f"    {identifier(out.name)}[{offset(out, ['o', 'n'])}] = at;",
        "}",
    ]
    head = header_comment(spec, "a thread per column, in order")
    text = "\n".join([head, signature(spec, THREADS), *indent(lines), "}\n"])
    return CudaKernel(text, element_geometry(sizes))
