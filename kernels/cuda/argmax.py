"""The position of the first maximum along the middle dim as CUDA C++; the first NaN counts as the maximum.

    long or dynamic rows    a block per row: a thread looks at every 256th element, then the block combines its bests
    short rows, columns     a thread per column, in order (kernels/kinds/argmax.py)

"Comes before" is a total order of (value, position), so every order of combining gives one answer.
"""

from __future__ import annotations

from qcompiler.kernels.cuda import items
from qcompiler.kernels.cuda.engines import CUDA_CORES
from qcompiler.kernels.cuda.geometry import CudaKernel, Geometry, SharedMemory
from qcompiler.kernels.cuda.per_element import THREADS
from qcompiler.kernels.cuda.signature import signature
from qcompiler.kernels.kinds import argmax
from qcompiler.kernels.scalar import precedes
from qcompiler.kernels.text import VALUE_TYPES, c_dim, header_comment, identifier, indent, offset
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.argmax import ArgmaxKernel

ENGINES = CUDA_CORES


LONG = 256
"""Elements of a row from which a block is worth its barriers. Columns (an inner dim above 1) are read side by side by
neighbouring threads, which is as fast."""


def emit(spec: KernelSpec, arch: str) -> CudaKernel:
    """One argmax for any architecture."""
    del arch
    body = spec.body
    assert isinstance(body, ArgmaxKernel)
    if body.inner == 1 and not (isinstance(body.length, int) and body.length < LONG):
        return _emit_rows(spec, body)
    return items.write(spec, argmax.form(spec))


def _emit_rows(spec: KernelSpec, body: ArgmaxKernel) -> CudaKernel:
    x, out = spec.operands
    value = VALUE_TYPES[x.dtype]
    shared = SharedMemory()
    shared.add("bests", value, THREADS, 8)
    shared.add("places", "int64_t", THREADS, 8)
    lines = [
        *shared.declarations(),
        "const int64_t o = blockIdx.x;",
        "const int t = threadIdx.x;",
        f"{value} best = 0;",
        "int64_t at = -1;  // none yet",
        f"for (int64_t i = t; i < {c_dim(body.length)}; i += {THREADS}) {{",
        f"    const {value} value = qc_load({identifier(x.name)} + {offset(x, ['o', 'i', '0'])});",
        f"    if (at < 0 || {precedes('greater', x.dtype, 'value', 'best', 'i', 'at')}) {{",
        "        best = value;",
        "        at = i;",
        "    }",
        "}",
        "bests[t] = best;",
        "places[t] = at;",
        f"for (int half = {THREADS // 2}; half > 0; half /= 2) {{",
        "    __syncthreads();",
        "    if (t < half && places[t + half] >= 0) {",
        f"        const {value} value = bests[t + half];",
        "        const int64_t i = places[t + half];",
        f"        if (at < 0 || {precedes('greater', x.dtype, 'value', 'best', 'i', 'at')}) {{",
        "            bests[t] = best = value;",
        "            places[t] = at = i;",
        "        }",
        "    }",
        "}",
        f"if (t == 0) {identifier(out.name)}[{offset(out, ['o', '0'])}] = at;",
    ]
    head = header_comment(spec, f"a block of {THREADS} threads per row")
    text = "\n".join([head, signature(spec, THREADS), *indent(lines), "}\n"])
    return CudaKernel(text, Geometry((body.outer, 1, 1), (THREADS, 1, 1), shared.nbytes))
