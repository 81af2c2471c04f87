"""Linear attention with decay as CUDA C++: a group of lanes keeps one row of a state in registers while tokens pass.

A row of `depth` columns belongs to as many lanes of a warp as it has columns, up to 32, and to nothing else: rows need
each other at no token, so that no block waits for another.  The sums over a row are shuffles within its lanes, in one
fixed order.
"""

from __future__ import annotations

from qcompiler.kernels.cuda.engines import CUDA_CORES
from qcompiler.kernels.cuda.geometry import CudaKernel, Geometry
from qcompiler.kernels.cuda.per_element import blocks_of
from qcompiler.kernels.cuda.signature import signature
from qcompiler.kernels.text import c_dim, header_comment, identifier, indent, offset
from qcompiler.plan.dims import dim
from qcompiler.plan.kernel import KernelSpec, Operand
from qcompiler.plan.kinds.linear_attention import LinearAttentionKernel

ENGINES = CUDA_CORES

_THREADS = 128

_UNROLLED = 64
"""Loops over at most so many registers are unrolled. Longer rows (depth above 2048) lie in local memory, and the text
of their loops stays short, whatever depth a program file names."""


def _lanes(depth: int) -> int:
    """The lanes of a row: a power of two."""
    return min(32, 1 << max(0, depth - 1).bit_length())


def emit(spec: KernelSpec, arch: str) -> CudaKernel:
    """Text and geometry, for any architecture."""
    del arch
    body = spec.body
    assert isinstance(body, LinearAttentionKernel)
    named = dict(zip(body.names, spec.operands, strict=True))
    lanes = _lanes(body.depth)
    each, rows = -(-body.depth // lanes), _THREADS // lanes
    blocks = blocks_of(dim(body.heads * body.width), rows).to_dim()
    note = f"{lanes} lanes and {each} register(s) a row of a state, {rows} rows a block"

    def at(name: str, *indices: str) -> str:
        operand: Operand = named[name]
        return f"{identifier(operand.name)}[{offset(operand, indices)}]"

    def columns(statement: str) -> list[str]:
        """A loop over the columns of this lane: `i` is the register, `j` the column."""
        return [
            "#pragma unroll" if each <= _UNROLLED else "#pragma unroll 8",
            f"for (int i = 0; i < {each}; i++) {{",
            f"    const int64_t j = lane + i * {lanes};",
            *indent([statement]),
            "}",
        ]

    inside = "" if body.depth % lanes == 0 else f"if (j < {body.depth}) "
    decay = at("decay", "b", "t", "h", "j" if body.decays_columns else "0")
    kept = f"expf({decay}{' * ' + at('rate', 'h', 'j') if body.has_rate else ''})"
    is_single = not body.decays_columns and not body.has_rate
    decays = [f"const float kept = {kept};"] if is_single else []
    decays += columns(f"{inside}s[i] *= {'kept' if is_single else kept};")
    token = [*decays, f"float u = {at('value', 'b', 't', 'h', 'p')};"]
    if body.has_beta:
        token += ["float seen = 0.0f;", *columns(f"{inside}seen = fmaf(s[i], {at('key', 'b', 't', 'g', 'j')}, seen);")]
        token += [f"u = {at('beta', 'b', 't', 'h')} * (u - sum_of(seen));"]
    token += [
        "float sum = 0.0f;",
        *columns(f"{inside}s[i] = fmaf(u, {at('key', 'b', 't', 'g', 'j')}, s[i]);"),
        *columns(f"{inside}sum = fmaf(s[i], {at('query', 'b', 't', 'g', 'j')}, sum);"),
        "sum = sum_of(sum);",
        f"if (is_live && lane == 0) {at('out', 'b', 't', 'h', 'p')} = sum;",
    ]
    lines = [
        f"const int64_t b = blockIdx.y, steps = {c_dim(body.steps)};",
        f"const int lane = (int)threadIdx.x % {lanes};",
        f"const int64_t number = (int64_t)blockIdx.x * {rows} + threadIdx.x / {lanes};",
        f"const bool is_live = number < {body.heads * body.width};",
        "const int64_t row = is_live ? number : 0;  // lanes without a row take part in shuffles",
        f"const int64_t h = row / {body.width}, p = row % {body.width}, g = h / {body.heads // body.groups};",
        f"const int64_t given = {at('counts', 'b')}, count = qc_max(0, qc_min(given, steps));",
        f"const bool keeps = is_live && {at('first', 'b')} != 0;",
        "const auto sum_of = [](float x) QC_INLINED -> float {",
        "#pragma unroll",
        f"    for (int step = {lanes // 2}; step > 0; step >>= 1) x += __shfl_xor_sync(QC_ALL_LANES, x, step);",
        "    return x;",
        "};",
        f"float s[{each}];",
        *columns(f"s[i] = keeps && j < {body.depth} ? {at('state', 'b', 'h', 'p', 'j')} : 0.0f;"),
        "#pragma unroll 1",
        "for (int64_t t = 0; t < count; t++) {",
        *indent(token),
        "}",
        "#pragma unroll 1",
        "for (int64_t t = count; t < steps; t++) {",
        f"    if (is_live && lane == 0) {at('out', 'b', 't', 'h', 'p')} = 0.0f;",
        "}",
        "if (!is_live || count == 0) return;",
        *columns(f"{inside}{at('state', 'b', 'h', 'p', 'j')} = s[i];"),
    ]
    text = "\n".join([header_comment(spec, note), signature(spec, _THREADS), *indent(lines), "}\n"])
    return CudaKernel(text, Geometry((blocks, body.batch, 1), (_THREADS, 1, 1)), notes=(note,))
