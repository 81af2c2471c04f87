"""Softmax over the last dim as CUDA C++: maximum, sum of exponentials, division; fp32 inside, rounded once.

The exponentials are computed again for the result, so no memory grows with the row. A row of -inf gives NaN, as in
torch. The maximum ignores NaN, and the sum then spreads it over the row.
"""

from __future__ import annotations

from qcompiler.kernels.cuda.engines import CUDA_CORES
from qcompiler.kernels.cuda.geometry import CudaKernel
from qcompiler.kernels.cuda.rows import RowWalk, element
from qcompiler.kernels.cuda.signature import signature
from qcompiler.kernels.text import header_comment, identifier, indent
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.softmax import SoftmaxKernel

ENGINES = CUDA_CORES


def emit(spec: KernelSpec, arch: str) -> CudaKernel:
    """One softmax for any architecture."""
    del arch
    body = spec.body
    assert isinstance(body, SoftmaxKernel)
    x, out = spec.operands
    walk = RowWalk.of(body.rows, body.cols)
    address = element(x, identifier(x.name), "row", "j")
    value = walk.value(address)
    keep = ["kept[i] = power;"] if walk.per_thread is not None else []
    power = "kept[i]" if keep else f"expf({value} - top)"
    lines = [
        *walk.load(address, "-INFINITY"),
        "float top = -INFINITY;",
        *walk.each([f"top = fmaxf(top, {value});"]),
        f"top = {walk.reduce('max', 'top')};",
        "float sum = 0.0f;",
        *walk.each([f"const float power = expf({value} - top);", "sum += power;", *keep]),
        f"const float scale = 1.0f / {walk.reduce('sum', 'sum')};",
        *walk.each([f"qc_store({element(out, identifier(out.name), 'row', 'j')}, {power} * scale);"]),
    ]
    head = header_comment(spec, "maximum, exponentials and their sum, division", walk.note())
    text = "\n".join([head, signature(spec, walk.block), *indent(walk.around(lines)), "}\n"])
    return CudaKernel(text, walk.geometry())
