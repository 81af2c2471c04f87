"""Grouped linears that combine their sums: the pairs of rows of an expert, or the experts of a row. For few pairs.

A block has one panel of 16 columns of the result, and a group of warps (`threadIdx.y`) for each sum that a column
needs: the two halves of an expert, or the row's experts. Each group multiplies with `qc_linear_few`, all at the same
time, and 16 threads combine the groups' sums in the order of the groups. No result depends on the order of blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from qcompiler.errors import KernelSelectionError
from qcompiler.kernels.cuda.geometry import SHARED_LIMIT, CudaKernel, Geometry, SharedMemory
from qcompiler.kernels.cuda.grouped_pairs import expert_of, grouped_body
from qcompiler.kernels.cuda.linear_fma import code_table, resident, shape_for
from qcompiler.kernels.cuda.signature import arch_number, signature
from qcompiler.kernels.cuda.weights import Weight
from qcompiler.kernels.scalar import scalar_statements
from qcompiler.kernels.text import STORAGE_TYPES, VALUE_TYPES, c_dim, header_comment, identifier, indent
from qcompiler.plan.dims import dim
from qcompiler.plan.kernel import KernelSpec, Operand
from qcompiler.plan.kinds.grouped_linear import PANEL, GroupedLinearKernel

MOST_GROUPS = 8
"""The most experts of a row: with more, a group would be left with less than two warps of a block."""


def emit(spec: KernelSpec, weight: Weight, arch: str, *, mma: bool) -> CudaKernel:
    """Text and geometry on `arch`, for at most 64 pairs. KernelSelectionError for too many experts of a row."""
    body = grouped_body(spec)
    groups = 2 if body.pairs else body.top
    if groups > MOST_GROUPS:
        raise KernelSelectionError(
            f"kernel '{spec.name}' ({spec.serves}): a block sums at most {MOST_GROUPS} experts of a row, not {groups}"
        )
    panels, rows = body.columns // PANEL, int((dim(body.rows) * body.repeat).value) // max(body.top, 1)
    shape = shape_for(1, weight, panels * rows, mma=mma, groups=groups)
    x = spec.operands[0]
    shared = SharedMemory()
    staged, item = (STORAGE_TYPES[x.dtype], 2) if mma else ("float", 4)
    pitch = shape.chunk * shape.warps * weight.tile
    shared.add("x_tile", staged, groups * pitch, item)
    shared.add("partial", "float", groups * shape.warps * PANEL, 4)
    table = code_table(shared, weight, SHARED_LIMIT[arch_number(arch)])
    few = f"qc_few<{weight.struct}, {STORAGE_TYPES[x.dtype]}, 1, {shape.warps}, {shape.depth}, {shape.chunk}, "
    lines = [
        *shared.declarations(),
        "const int row = blockIdx.y, group = threadIdx.y;",
        *_expert(spec, body),
        f"qc_linear_few<{weight.struct}, {few}{str(mma).lower()}>>(",
        f"        (const uint8_t*){identifier(spec.operands[1].name)},",
        f"        {identifier(x.name)} + (int64_t)({_row_of_x(body)}) * {c_dim(x.strides[0])}, 0,",
        f"        1, panel, x_tile + group * {pitch}, {table},",
        f"        group == 0, threadIdx.x, partial + group * {shape.warps * PANEL});",
        "__syncthreads();",
        f"if (group == 0 && threadIdx.x < {PANEL}) {{",
        f"    const int64_t column = (int64_t)blockIdx.x * {PANEL} + threadIdx.x;",
        *indent(combined(spec, body, partial_sums(shape.warps))),
        "}",
    ]
    geometry = Geometry((panels, rows, 1), (32 * shape.warps, groups, 1), shared.nbytes)
    engine = "mma" if mma else "fma"
    note = (
        f"{engine}: a block per panel and row, {groups} groups of {shape.warps} warps share K; "
        f"{shared.nbytes} bytes of shared memory"
    )
    head = header_comment(spec, note, "an index out of range gives NaN")
    bound = signature(spec, geometry.threads, resident(geometry, weight, one_row=mma, one_pass=True))
    text = "\n".join([head, weight.definitions, bound, *indent(lines), "}\n"])
    return CudaKernel(text, geometry, engine, (note,))


def _row_of_x(body: GroupedLinearKernel) -> str:
    pair = "row" if body.pairs else f"(row * {body.top} + group)"
    return pair if body.repeat == 1 else f"{pair} / {body.repeat}"


def _expert(spec: KernelSpec, body: GroupedLinearKernel) -> list[str]:
    """The statements that declare the group's `panel`: of its expert, or of the first where there is none."""
    place = "int" if (body.experts + 2) * body.n < 1 << 31 else "int64_t"
    half = f" + group * {body.columns // PANEL}" if body.pairs else ""
    return [
        f"const int64_t expert = {expert_of(spec, 'row' if body.pairs else f'row * {body.top} + group')};",
        f"const bool there = expert >= 0 && expert < {body.experts};",
        f"const {place} panel = (there ? ({place})expert : 0) * {body.n // PANEL}{half} + blockIdx.x;",
    ]


@dataclass(frozen=True)
class Sums:
    """The statements by which the thread of a column reads its sums. `halves` declares `sum` and `other`, those of an
    expert's two halves. `place(there)` declares `sum`, that of pair `place`, or NaN where `there` does not hold."""

    halves: list[str]
    place: Callable[[str], list[str]]


def partial_sums(warps: int) -> Sums:
    """Those of `qc_linear_few`, which `warps` warps of each group leave behind."""
    add = f"for (int warp = 0; warp < {warps}; warp++)"
    return Sums(
        [
            "float sum = 0.0f, other = 0.0f;",
            f"{add} {{",
            f"    sum += partial[warp * {PANEL} + threadIdx.x];",
            f"    other += partial[({warps} + warp) * {PANEL} + threadIdx.x];",
            "}",
        ],
        lambda there: [
            f"float sum = {there} ? 0.0f : NAN;",
            f"{add} sum += partial[(place * {warps} + warp) * {PANEL} + threadIdx.x];",
        ],
    )


def combined(spec: KernelSpec, body: GroupedLinearKernel, sums: Sums) -> list[str]:
    """The statements of the thread that makes the element (row, column) of the result. `there`: whether the expert of a
    row of pairs exists."""
    out = spec.operands[-1]
    assert body.epilogue is not None
    target = f"{identifier(out.name)} + (int64_t)row * {c_dim(out.strides[0])} + column"
    if body.pairs:
        statements = scalar_statements(body.epilogue, ["sum", "other"])
        return [*sums.halves, *statements.lines, f"qc_store({target}, there ? {statements.results[0]} : NAN);"]
    assert body.mix is not None
    weights, mix = spec.operands[3], scalar_statements(body.mix, ["sum", "weight", "total"])
    down, right = (c_dim(stride) for stride in weights.strides)
    weight = f"qc_load({identifier(weights.name)} + (int64_t)row * {down} + place * {right})"
    extras = spec.operands[4:-1]
    last = scalar_statements(body.epilogue, ["total", *(f"e{i}" for i in range(len(extras)))])
    return [
        "float total = 0.0f;",
        "#pragma unroll 1",
        f"for (int place = 0; place < {body.top}; place++) {{",
        f"    const int64_t its = {expert_of(spec, f'row * {body.top} + place')};",
        *indent(sums.place(f"its >= 0 && its < {body.experts}")),
        f"    const {VALUE_TYPES[weights.dtype]} weight = {weight};",
        *indent(mix.lines),
        f"    total = {mix.results[0]};",
        "}",
        *(f"const {VALUE_TYPES[e.dtype]} e{i} = {_element(e)};" for i, e in enumerate(extras)),
        *last.lines,
        f"qc_store({target}, {last.results[0]});",
    ]


def _element(extra: Operand) -> str:
    down, right = (c_dim(stride) for stride in extra.strides)
    return f"qc_load({identifier(extra.name)} + (int64_t)row * {down} + column * {right})"
