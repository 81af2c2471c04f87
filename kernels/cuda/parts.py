"""Small loops in one launch, as CUDA C++: each part has a range of the blocks.

    int64_t block = blockIdx.x;
    if (block < blocks of part 0) { part 0; return; }
    block -= blocks of part 0;
    …

A block has as many threads as the part with the widest blocks.  In a part with a norm a warp has a row
(normed_rows.py).  A row number that is out of range, a negative one
included, writes nothing (a kernel on the device cannot report it).
"""

from __future__ import annotations

from qcompiler.kernels.cuda import loop, normed_rows
from qcompiler.kernels.cuda.engines import CUDA_CORES
from qcompiler.kernels.cuda.geometry import CudaKernel, Geometry
from qcompiler.kernels.cuda.signature import parameters, signature
from qcompiler.kernels.normed_part import NormedPart, numbers_of
from qcompiler.kernels.text import c_dim, header_comment, indent, offset
from qcompiler.plan.dims import Expr, dim
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.parts import Part
from qcompiler.plan.parts_contract import ROWS, part_specs, parts_body

ENGINES = CUDA_CORES


def emit(spec: KernelSpec, arch: str) -> CudaKernel:
    """A launch of several parts for any architecture."""
    del arch
    loops = part_specs(spec)
    emitted = [_emit_part(spec, number, each) for number, each in enumerate(loops)]
    threads = max(each.geometry.threads for each in emitted)
    lines = ["int64_t qc_block = blockIdx.x;"]
    total = Expr.constant(0)
    for number, (part, own, kernel) in enumerate(zip(parts_body(spec).parts, loops, emitted, strict=True)):
        call = _call(spec, number, part, own)
        width = kernel.geometry.threads
        if width < threads:
            call = [f"if (threadIdx.x < {width}) {{", *indent(call), "}"]
        blocks = kernel.geometry.grid[0]
        total = total + dim(blocks)
        if number + 1 < len(loops):
            lines += [f"if (qc_block < {c_dim(blocks)}) {{", *indent([*call, "return;"]), "}"]
            lines.append(f"qc_block -= {c_dim(blocks)};")
        else:
            lines += call
    shared = max(each.geometry.shared for each in emitted)
    note = f"{len(loops)} parts, each with blocks of its own"
    head = [header_comment(spec, note, f"{threads} threads a block, {total} blocks"), signature(spec, threads)]
    text = "\n".join([*(each.text for each in emitted), *head, *indent(lines), "}\n"])
    return CudaKernel(text, Geometry((total.to_dim(), 1, 1), (threads, 1, 1), shared), notes=(note,))


def _emit_part(spec: KernelSpec, number: int, own: KernelSpec) -> CudaKernel:
    """The function that computes one block of a part."""
    normed = NormedPart.of(spec, number, normed_rows.RESERVED)
    return loop.emit_part(own) if normed is None else normed_rows.emit_part(normed)


def _call(spec: KernelSpec, number: int, part: Part, own: KernelSpec) -> list[str]:
    """Statements that compute one block of a part."""
    names = [name for _, name in parameters(spec)]
    arguments = [names[place] for place in numbers_of(spec, number)]
    symbols = names[len(spec.operands) :]
    if part.index is None:
        return [f"qk_{own.name}({', '.join([*arguments, *symbols, 'qc_block'])});"]
    index, x = spec.operands[part.index], spec.operands[part.operands[-1]]
    arguments[-1] += f" + qc_at * {c_dim(x.strides[ROWS])}"
    return [
        f"const int64_t qc_at = (int64_t){names[part.index]}[{offset(index, ['0'])}];",
        f"if (qc_at >= 0 && qc_at < {c_dim(x.shape[ROWS])})",
        f"    qk_{own.name}({', '.join([*arguments, *symbols, 'qc_block'])});",
    ]
