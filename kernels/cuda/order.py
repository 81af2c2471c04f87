"""Sort and top-k along one dim as CUDA C++, stable; NaN counts as the largest value.

    short rows         a thread per element counts the elements that come before its own: quadratic, without barriers
    longer rows        a block per row sorts in shared memory, by a bitonic network (Batcher, 1968) over (value, place)
    long or dynamic    the same for top-k, part by part of the row: the best stay, and a part without one that belongs
    rows, top-k        among them is skipped

What is left to the first form is a sort of more than `SORTED` elements, and top-k of more than `KEPT`.
"""

from __future__ import annotations

from qcompiler.kernels.cuda.engines import CUDA_CORES
from qcompiler.kernels.cuda.geometry import CudaKernel, Geometry, SharedMemory
from qcompiler.kernels.cuda.per_element import THREADS, element_geometry
from qcompiler.kernels.cuda.signature import signature
from qcompiler.kernels.scalar import precedes
from qcompiler.kernels.text import VALUE_TYPES, c_dim, header_comment, identifier, indent, offset, unravel
from qcompiler.plan.dims import product
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.order import OrderKernel

ENGINES = CUDA_CORES

SHORT = 128
"""Elements of a row up to which a thread compares its own with all others."""
SORTED = 2048
"""Elements that a block sorts at once: 32 KiB of values and places."""
KEPT = 1024
"""The most entries of a top-k over longer rows."""


def emit(spec: KernelSpec, arch: str) -> CudaKernel:
    """One sort or top-k for any architecture."""
    del arch
    body = spec.body
    assert isinstance(body, OrderKernel)
    if isinstance(body.length, int) and body.length <= SHORT:
        return _emit_counting(spec, body)
    if isinstance(body.length, int) and body.length <= SORTED:
        return _emit_network(spec, body, _power(body.length), 0)
    if isinstance(body.count, int) and body.count <= KEPT:
        kept = _power(max(body.count, 128))
        return _emit_network(spec, body, SORTED if kept > SORTED // 8 else SORTED // 2, kept)
    return _emit_counting(spec, body)


def _power(size: int) -> int:
    """The power of two from `size` on."""
    return 1 << (size - 1).bit_length()


def _emit_network(spec: KernelSpec, body: OrderKernel, places: int, kept: int) -> CudaKernel:
    """A block per row. `places` are elements in shared memory, the first `kept` of which are the best so far."""
    x, values, indices = spec.operands
    value, sizes = VALUE_TYPES[x.dtype], (body.outer, body.inner)
    kind = "greater" if body.descending else "less"
    shared = SharedMemory()
    shared.add("held", value, places, 8)
    shared.add("at", "int64_t", places, 8)
    part = places - kept
    worst = f"at[{kept - 1}] < 0 || {precedes(kind, x.dtype, 'own', f'held[{kept - 1}]', 'i', f'at[{kept - 1}]')}"
    lines = [
        *shared.declarations(),
        *unravel("(int64_t)blockIdx.x", ("o", "n"), sizes),
        "const int t = threadIdx.x;",
        "// whether the element at `a` comes before the one at `b`; no element (at -1) comes last",
        "const auto before = [&](int a, int b) QC_INLINED {",
        f"    const {value} own = held[a], other = held[b];",
        f"    return at[a] >= 0 && (at[b] < 0 || {precedes(kind, x.dtype, 'own', 'other', 'at[a]', 'at[b]')});",
        "};",
        *([f"for (int s = t; s < {kept}; s += {THREADS}) held[s] = at[s] = -1;"] if kept else []),
        f"for (int64_t begin = 0; begin < {c_dim(body.length)}; begin += {part}) {{",
        "    __syncthreads();",
        *(["    bool wanted = false;"] if kept else []),
        f"    for (int s = t; s < {part}; s += {THREADS}) {{",
        "        const int64_t i = begin + s;",
        f"        const bool there = i < {c_dim(body.length)};",
        f"        const {value} own = there ? qc_load({identifier(x.name)} + {offset(x, ['o', 'i', 'n'])}) : 0;",
        f"        held[{kept} + s] = own;",
        f"        at[{kept} + s] = there ? i : -1;",
        *([f"        wanted = wanted || (there && ({worst}));"] if kept else []),
        "    }",
        *(["    if (!__syncthreads_or(wanted)) continue;"] if kept else ["    __syncthreads();"]),
        f"    for (int size = 2; size <= {places}; size *= 2) {{",
        "        for (int gap = size / 2; gap > 0; gap /= 2) {",
        f"            for (int s = t; s < {places // 2}; s += {THREADS}) {{",
        "                const int a = 2 * s - s % gap, b = a + gap;",
        "                if (before(a, b) == ((a & size) != 0)) {",
        f"                    const {value} own = held[a];",
        "                    const int64_t place = at[a];",
        "                    held[a] = held[b];",
        "                    at[a] = at[b];",
        "                    held[b] = own;",
        "                    at[b] = place;",
        "                }",
        "            }",
        "            __syncthreads();",
        "        }",
        "    }",
        "}",
        f"for (int64_t rank = t; rank < {c_dim(body.count)}; rank += {THREADS}) {{",
        "    const int64_t i = at[rank];",
        f"    {identifier(values.name)}[{offset(values, ['o', 'rank', 'n'])}] = "
        f"{identifier(x.name)}[{offset(x, ['o', 'i', 'n'])}];",
        f"    {identifier(indices.name)}[{offset(indices, ['o', 'rank', 'n'])}] = i;",
        "}",
    ]
    note = f"{part} elements at a time" + (f", of which {kept} stay" if kept else "")
    head = header_comment(spec, f"a block of {THREADS} threads per row sorts {note}; NaN the largest")
    text = "\n".join([head, signature(spec, THREADS), *indent(lines), "}\n"])
    return CudaKernel(text, Geometry((product(sizes).to_dim(), 1, 1), (THREADS, 1, 1), shared.nbytes))


def _emit_counting(spec: KernelSpec, body: OrderKernel) -> CudaKernel:
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
        f"        rank += ({precedes(kind, x.dtype, 'other', 'own', 'j', 'i')}) ? 1 : 0;",
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
