"""Updates rows along one dim in place, as CUDA C++, like `index_copy`: the write of a KV cache.

A block owns one entry of the index list and a share of its row. If a later entry names the same row, the block leaves
the row to that one: the last of equal indices wins, in any order of blocks. An index out of range, including a negative
one, writes nothing (a kernel on the device cannot report it).
"""

from __future__ import annotations

from qcompiler.kernels.cuda.engines import CUDA_CORES
from qcompiler.kernels.cuda.geometry import CudaKernel, Geometry
from qcompiler.kernels.cuda.per_element import THREADS, blocks_of
from qcompiler.kernels.cuda.signature import signature
from qcompiler.kernels.text import c_dim, header_comment, identifier, indent, offset, unravel
from qcompiler.plan.dims import dim, product
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.index_update import IndexUpdateKernel

ENGINES = CUDA_CORES

_EACH = 4
"""Elements per thread."""


def emit(spec: KernelSpec, arch: str) -> CudaKernel:
    """One update for any architecture."""
    del arch
    body = spec.body
    assert isinstance(body, IndexUpdateKernel)
    x, index, src = spec.operands
    row = product((body.outer, body.inner))
    shares = blocks_of(row, THREADS * _EACH)
    length, count = c_dim(body.length), c_dim(body.count)
    lines = [
        f"const int64_t shares = {c_dim(shares)}, i = blockIdx.x / shares;",
        f"const int64_t first = blockIdx.x % shares * {THREADS * _EACH} + threadIdx.x;",
        f"const int64_t at = (int64_t){identifier(index.name)}[{offset(index, ['i'])}];",
        "bool again = false;",
        f"for (int64_t j = i + 1 + threadIdx.x; j < {count}; j += {THREADS}) {{",
        f"    again = again || (int64_t){identifier(index.name)}[{offset(index, ['j'])}] == at;",
        "}",
        "const bool overwritten = __syncthreads_or(again) != 0;",
        f"if (!overwritten && at >= 0 && at < {length}) {{",
        "#pragma unroll",
        f"    for (int part = 0; part < {_EACH}; part++) {{",
        f"        const int64_t e = first + part * {THREADS};",
        f"        if (e < {c_dim(row)}) {{",
        *indent(unravel("e", ("o", "n"), (body.outer, body.inner)), 3),
        f"            {identifier(x.name)}[{offset(x, ['o', 'at', 'n'])}] = "
        f"{identifier(src.name)}[{offset(src, ['o', 'i', 'n'])}];",
        "        }",
        "    }",
        "}",
    ]
    head = header_comment(spec, "a block per index and share of a row; the last of equal indices wins")
    text = "\n".join([head, signature(spec, THREADS), *indent(lines), "}\n"])
    blocks = shares * dim(body.count)
    return CudaKernel(text, Geometry((blocks.to_dim(), 1, 1), (THREADS, 1, 1)))
