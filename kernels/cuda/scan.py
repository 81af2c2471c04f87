"""Running sums along the middle dim as CUDA C++, and other folds.

f32 and narrower floats accumulate in fp32, with one rounding per element for narrow results. f64 accumulates in f64.
Integers, and booleans with an integer result, accumulate modulo 2^64, which wraps in the result's type.

    one column per row (inner = 1)   a block per row: 256 elements at a time, lanes by shuffles, warps in order
    several columns                  a thread per column, in order, eight loads ahead
    other folds than sums, booleans  a thread per column, as kernels/kinds/scan.py says

Both orders are fixed. The first is not the order of a plain loop, so floats differ from a plain loop by rounding.
"""

from __future__ import annotations

from qcompiler.kernels.cuda import items
from qcompiler.kernels.cuda.engines import CUDA_CORES
from qcompiler.kernels.cuda.geometry import CudaKernel, Geometry, SharedMemory
from qcompiler.kernels.cuda.per_element import blocks_of
from qcompiler.kernels.cuda.signature import signature
from qcompiler.kernels.kinds import scan
from qcompiler.kernels.text import (
    STORAGE_TYPES,
    c_dim,
    header_comment,
    identifier,
    indent,
    offset,
)
from qcompiler.plan.dims import dim
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.scan import ScanKernel

ENGINES = CUDA_CORES

_FLOATS = {"f64": "double", "f32": "float", "bf16": "float", "f16": "float"}
_BLOCK = 256
_COLUMNS = 128
_AHEAD = 8
"""Loads of a column in flight at once."""


def emit(spec: KernelSpec, arch: str) -> CudaKernel:
    """One scan for any architecture."""
    del arch
    body = spec.body
    assert isinstance(body, ScanKernel)
    if body.fold != "add" or spec.operands[1].dtype == "i1":
        return items.write(spec, scan.form(spec))
    return _rows(spec, body) if body.inner == 1 else _columns(spec, body)


def _kind(spec: KernelSpec) -> str:
    """The type that holds sums."""
    return _FLOATS.get(spec.operands[1].dtype, "uint64_t")


def _value(spec: KernelSpec, row: str, column: str) -> str:
    x = spec.operands[0]
    read = f"qc_load({identifier(x.name)} + {offset(x, ['o', row, column])})"
    kind = _kind(spec)
    return f"({kind}){scan.converted(read, x.dtype, 'i64')}" if kind == "uint64_t" else f"({kind}){read}"


def _store(spec: KernelSpec, row: str, column: str, value: str) -> str:
    out = spec.operands[1]
    if out.dtype not in _FLOATS:
        value = f"({STORAGE_TYPES[out.dtype]})({value})"
    return f"qc_store({identifier(out.name)} + {offset(out, ['o', row, column])}, {value});"


def _rows(spec: KernelSpec, body: ScanKernel) -> CudaKernel:
    kind, length, warps = _kind(spec), c_dim(body.length), _BLOCK // 32
    memory = SharedMemory()
    memory.add("partial", kind, warps, 4 if kind == "float" else 8)
    lines = [
        *memory.declarations(),
        "const int64_t o = blockIdx.x;",
        "const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;",
        f"{kind} carry = 0;  // the sum of all elements before `first`",
        f"for (int64_t first = 0; first < {length}; first += {_BLOCK}) {{",
        "    const int64_t i = first + threadIdx.x;",
        f"    const {kind} upto = qc_warp_scan(i < {length} ? {_value(spec, 'i', '0')} : ({kind})0);",
        "    __syncthreads();  // the sums of the last turn are used",
        "    if (lane == 31) partial[warp] = upto;",
        "    __syncthreads();",
        f"    {kind} before = carry;",
        "#pragma unroll",
        f"    for (int w = 0; w < {warps}; w++) {{",
        "        if (w == warp) before = carry;",
        "        carry += partial[w];",
        "    }",
        f"    if (i < {length}) {_store(spec, 'i', '0', 'before + upto')}",
        "}",
    ]
    head = header_comment(spec, f"running sums, a block of {_BLOCK} threads per row")
    text = "\n".join([head, signature(spec, _BLOCK), *indent(lines), "}\n"])
    return CudaKernel(text, Geometry((body.outer, 1, 1), (_BLOCK, 1, 1), memory.nbytes))


def _columns(spec: KernelSpec, body: ScanKernel) -> CudaKernel:
    kind, length = _kind(spec), c_dim(body.length)
    blocks = blocks_of(dim(body.inner), _COLUMNS)
    lines = [
        f"const int64_t blocks = {c_dim(blocks)}, o = blockIdx.x / blocks;",
        f"const int64_t n = blockIdx.x % blocks * {_COLUMNS} + threadIdx.x;",
        f"if (n < {c_dim(body.inner)}) {{",
        f"    {kind} sum = 0;",
        f"    for (int64_t first = 0; first < {length}; first += {_AHEAD}) {{",
        f"        {kind} value[{_AHEAD}];",
        "#pragma unroll",
        f"        for (int s = 0; s < {_AHEAD}; s++) {{",
        "            const int64_t i = first + s;",
        f"            value[s] = i < {length} ? {_value(spec, 'i', 'n')} : ({kind})0;",
        "        }",
        "#pragma unroll",
        f"        for (int s = 0; s < {_AHEAD}; s++) {{",
        "            const int64_t i = first + s;",
        "            sum += value[s];",
        f"            if (i < {length}) {_store(spec, 'i', 'n', 'sum')}",
        "        }",
        "    }",
        "}",
    ]
    head = header_comment(spec, f"running sums in order, a thread per column, {_AHEAD} loads ahead")
    text = "\n".join([head, signature(spec, _COLUMNS), *indent(lines), "}\n"])
    return CudaKernel(text, Geometry(((blocks * dim(body.outer)).to_dim(), 1, 1), (_COLUMNS, 1, 1)))
