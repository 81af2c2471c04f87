"""Layer and RMS norm as CUDA C++: two passes over a row for the statistics, a third to write it; fp32 throughout."""

from __future__ import annotations

from qcompiler.kernels.cuda.engines import CUDA_CORES
from qcompiler.kernels.cuda.geometry import CudaKernel
from qcompiler.kernels.cuda.rows import RowWalk, element
from qcompiler.kernels.cuda.signature import signature
from qcompiler.kernels.scalar import float_literal
from qcompiler.kernels.text import c_dim, header_comment, identifier, indent
from qcompiler.plan.kernel import KernelSpec, Operand
from qcompiler.plan.kinds.norm import NormKernel

ENGINES = CUDA_CORES


def emit(spec: KernelSpec, arch: str) -> CudaKernel:
    """One norm for any architecture."""
    del arch
    body = spec.body
    assert isinstance(body, NormKernel)
    roles = ["x", *(["weight"] if body.has_weight else []), *(["bias"] if body.has_bias else []), "out"]
    operands = dict(zip(roles, spec.operands, strict=True))
    walk = RowWalk.of(body.rows, body.cols)
    lines = [*_statistics(body, operands["x"], walk), *walk.each(_write(body, operands, walk))]
    what = "(x - mean) / sqrt(var + eps)" if body.kind == "layer" else "x / sqrt(mean(x^2) + eps)"
    head = header_comment(spec, f"{what}, eps = {body.eps:g}", walk.note())
    text = "\n".join([head, signature(spec, walk.block), *indent(walk.around(lines)), "}\n"])
    return CudaKernel(text, walk.geometry())


def _read(operand: Operand) -> str:
    return element(operand, identifier(operand.name), "row", "j")


def _statistics(body: NormKernel, x: Operand, walk: RowWalk) -> list[str]:
    """`center` (layer norm only) and `scale` of the row."""
    value, eps, count = walk.value(_read(x)), float_literal(body.eps, "f32"), f"{body.cols}.0f"
    lines = walk.load(_read(x), "0.0f")
    if body.kind == "rms":
        return [
            *lines,
            "float square = 0.0f;",
            *walk.each([f"const float each = {value};", "square = fmaf(each, each, square);"]),
            f"square = {walk.reduce('sum', 'square')};",
            f"const float scale = 1.0f / sqrtf(square / {count} + {eps});",
        ]
    return [
        *lines,
        "float sum = 0.0f;",
        *walk.each([f"sum += {value};"]),
        f"const float center = {walk.reduce('sum', 'sum')} / {count};",
        "float square = 0.0f;",
        *walk.each([f"const float each = {value} - center;", "square = fmaf(each, each, square);"]),
        f"const float variance = {walk.reduce('sum', 'square')} / {count};",
        f"const float scale = 1.0f / sqrtf(variance + {eps});",
    ]


def _write(body: NormKernel, operands: dict[str, Operand], walk: RowWalk) -> list[str]:
    """Stores one element of the row."""
    value = walk.value(_read(operands["x"]))
    lines = [f"float result = {f'({value} - center)' if body.kind == 'layer' else value} * scale;"]
    for role, op in (("weight", "*"), ("bias", "+")):
        if role in operands:
            lines.append(f"result = result {op} qc_load({_vector(operands[role])});")
    out = operands["out"]
    return [*lines, f"qc_store({element(out, identifier(out.name), 'row', 'j')}, result);"]


def _vector(operand: Operand) -> str:
    """The address of element `j` of a weight or bias."""
    stride, name = operand.strides[-1], identifier(operand.name)
    if stride == 0:
        return name
    return f"{name} + j" if stride == 1 else f"{name} + (int64_t)j * {c_dim(stride)}"
