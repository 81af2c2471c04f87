"""The `grouped_linear` template: products with the weights of the chosen MoE experts.

    few pairs     (at most 64, known at compile time) qc_linear_few of linear_fma.cuh: a block per panel and pair, which
                  reads the panel of the pair's expert; on tensor cores if they multiply the weight's type
    combined      (of as few pairs) grouped_combined.py: the same, for what an epilogue makes of several sums
    any number    grouped_mma.py on tensor cores; else grouped.cuh: a block per expert and 32 of its columns, in fp32,
                  for all rows that chose the expert
    int8 rows     grouped_int8.py: products of integers

The device reads which expert a pair has. Weights are read like those of linears (weights.py), in any format; an expert
may begin inside a panel. A kernel on the device cannot report an index outside [0, experts); such an index gives a row
of NaN.
"""

from __future__ import annotations

from qcompiler.errors import KernelSelectionError
from qcompiler.kernels.cuda import engines, grouped_combined, grouped_int8, grouped_mma, linear_mma
from qcompiler.kernels.cuda.engines import GROUPS, IN_TILES, AtMost, Engine, Mma, Shared
from qcompiler.kernels.cuda.geometry import SHARED_LIMIT, CudaKernel, Geometry, SharedMemory
from qcompiler.kernels.cuda.grouped_pairs import chosen, expert_of, grouped_body, most_tiles
from qcompiler.kernels.cuda.linear_fma import TILED_THREADS, Few, code_table, resident, shape_for
from qcompiler.kernels.cuda.signature import arch_number, signature
from qcompiler.kernels.cuda.weights import Weight, weight_of
from qcompiler.kernels.text import STORAGE_TYPES, c_dim, header_comment, identifier, indent
from qcompiler.plan.dims import dim
from qcompiler.plan.kernel import DType, KernelSpec
from qcompiler.plan.kinds.grouped_linear import GroupedLinearKernel

ENGINES = (
    Engine("few_mma", "few pairs, tensor cores", (AtMost("pairs", 64), IN_TILES, Mma())),
    Engine("few_fma", "few pairs, CUDA cores", (AtMost("pairs", 64), IN_TILES)),
    Engine("mma", "tensor cores", (IN_TILES, Mma(), GROUPS, Shared("mma shared bytes"))),
    Engine("fma", "CUDA cores"),
)  # fmt: skip
"""Up to 64 pairs have blocks of their own: a token or a few with their experts."""

TN, TM = 32, 64
"""Columns of an expert, and rows of x, that a block multiplies at a time."""


def facts_of(x: DType, weight: Weight, body: GroupedLinearKernel) -> engines.Facts:
    """What `ENGINES` ask of a grouped linear."""
    pairs = (dim(body.rows) * body.repeat).to_dim()
    groups, shared = linear_mma.takes(weight), grouped_mma.least_shared(body)
    return engines.grouped_facts(x, weight, pairs, groups=groups, shared=shared)


def decision_of(spec: KernelSpec, arch: str) -> engines.EngineChoice:
    """The engine of a grouped linear on `arch`, and why not the others."""
    facts = facts_of(spec.operands[0].dtype, weight_of(spec.name, spec.operands[1]), grouped_body(spec))
    return engines.choose(ENGINES, facts, arch_number(arch))


def emit(spec: KernelSpec, arch: str) -> CudaKernel:
    """Text and geometry on `arch`. KernelSelectionError for operands that no kernel takes."""
    if grouped_body(spec).codes:
        return grouped_int8.emit(spec, arch)
    weight, key = weight_of(spec.name, spec.operands[1]), decision_of(spec, arch).key
    if grouped_body(spec).combines:
        if key not in ("few_mma", "few_fma"):
            raise KernelSelectionError(
                f"kernel '{spec.name}' ({spec.serves}): experts are combined where at most 64 pairs, known at compile "
                "time, read a weight in tiles"
            )
        return grouped_combined.emit(spec, weight, arch, mma=key == "few_mma")
    if key in ("few_mma", "few_fma"):
        return _emit_pairs(spec, weight, arch, mma=key == "few_mma")
    if key == "mma":
        return grouped_mma.emit(spec, weight, arch)
    return _emit_tiled(spec, weight)


def _emit_pairs(spec: KernelSpec, weight: Weight, arch: str, *, mma: bool) -> CudaKernel:
    body = grouped_body(spec)
    pairs = (dim(body.rows) * body.repeat).value
    panels = most_tiles(body, 16)
    shape = shape_for(1, weight, panels * pairs, mma=mma)
    x, _, _, out = spec.operands
    threads = 32 * shape.warps
    shared = SharedMemory()
    staged, item = (STORAGE_TYPES[x.dtype], 2) if mma else ("float", 4)
    shared.add("x_tile", staged, shape.chunk * shape.warps * weight.tile, item)
    shared.add("partial", "float", shape.warps * 16, 4)
    table = code_table(shared, weight, SHARED_LIMIT[arch_number(arch)])
    names = [identifier(operand.name) for operand in spec.operands]
    row = "pair" if body.repeat == 1 else f"pair / {body.repeat}"
    place = "int" if (body.experts + 2) * body.n < 1 << 31 else "int64_t"  # of a column among all experts
    lines = [
        *shared.declarations(),
        "const int pair = blockIdx.y;  // at most 64",
        f"const int64_t expert = {expert_of(spec, 'pair')};",
        f"const bool there = expert >= 0 && expert < {body.experts};",
        f"const {place} first = there ? ({place})expert * {body.n} : 0, panel = first / 16 + blockIdx.x;",
        f"if (panel * 16 >= first + {body.n}) return;",
        f"qc_linear_few<{weight.struct}, {_few(weight, STORAGE_TYPES[x.dtype], shape)}>(",
        f"        (const uint8_t*){names[1]}, {names[0]} + (int64_t)({row}) * {c_dim(x.strides[0])}, 0,",
        f"        1, panel, x_tile, {table},",
        "        true, threadIdx.x, partial);",
        "__syncthreads();",
        "if (threadIdx.x < 16) {",
        "    float sum = 0.0f;",
        f"    for (int warp = 0; warp < {shape.warps}; warp++) sum += partial[warp * 16 + threadIdx.x];",
        f"    const {place} column = panel * 16 + threadIdx.x - first;",
        f"    if (column >= 0 && column < {body.n})",
        f"        qc_store({names[3]} + (int64_t)pair * {c_dim(out.strides[0])} + column, there ? sum : NAN);",
        "}",
    ]
    geometry = Geometry((panels, pairs, 1), (threads, 1, 1), shared.nbytes)
    engine = "mma" if mma else "fma"
    note = f"{engine}: {shape.warps} warps share K, a block per panel and pair; {shared.nbytes} bytes of shared memory"
    return _kernel(spec, weight, geometry, lines, note, engine)


def _few(weight: Weight, x_type: str, shape: Few) -> str:
    return (
        f"qc_few<{weight.struct}, {x_type}, 1, {shape.warps}, {shape.depth}, {shape.chunk}, {str(shape.mma).lower()}>"
    )


def _emit_tiled(spec: KernelSpec, weight: Weight) -> CudaKernel:
    body, (x, w, _, out) = grouped_body(spec), spec.operands
    names = [identifier(operand.name) for operand in spec.operands]
    shared = SharedMemory()
    shared.add("x_step", "float", 32 * (TM + 4), 4)
    shared.add("w_step", "float", 32 * (TN + 4), 4)
    shared.add("listed", "int", TM, 4)
    shared.add("counts", "int", 8, 4)
    shared.add("next", "int", 1, 4)
    table = code_table(shared, weight, 0)
    if weight.storage == "strided":
        down, right = (c_dim(s) for s in (w.strides or (weight.cols, 1)))
        stage = f"qc_gather_step<{TN}>({names[1]}, {down}, {right}, {weight.rows}, {weight.cols}, n0, k0, to);"
    else:
        stage = f"qc_decode_step<{weight.struct}, {TN}>((const uint8_t*){names[1]}, n0, k0, {table}, to);"
    rows, columns = TM // 16, TN // 16
    pairs = c_dim((dim(body.rows) * body.repeat).to_dim())
    out_place = f"{names[3]} + (int64_t)listed[row] * {c_dim(out.strides[0])} + column"
    lines = [
        *shared.declarations(),
        f"const int64_t expert = blockIdx.y, first = expert * {body.n};  // the last one: pairs without an expert",
        f"const int64_t n0 = first / 16 * 16 + (int64_t)blockIdx.x * {TN};",
        f"if (n0 >= first + {body.n}) return;",
        *([f"qc_fill<{weight.struct}, {TILED_THREADS}>({table});"] if weight.lookup else []),
        f"const auto stage_w = [&](int64_t k0, float* to) {{ {stage} }};",
        *chosen(spec),
        "int64_t from = 0;",
        f"while (const int live = qc_list_pairs<{TM}, {TILED_THREADS}>(",
        f"           {pairs}, from, chosen, {{listed, counts, next}})) {{",
        f"    float sums[{rows}][{columns}];",
        f"    if (expert < {body.experts})",
        f"        qc_grouped_tiled<{TN}, {TM}>({names[0]}, {c_dim(x.strides[0])}, listed, {body.repeat}, live, "
        f"{weight.cols},",
        "                x_step, w_step, stage_w, sums);",
        "    #pragma unroll 1",
        f"    for (int i = 0; i < {rows * columns}; i++) {{",
        f"        const int row = threadIdx.x / 16 * {rows} + i / {columns};",
        f"        const int64_t column = n0 + threadIdx.x % 16 * {columns} + i % {columns} - first;",
        f"        if (row < live && column >= 0 && column < {body.n})",
        f"            qc_store({out_place}, expert < {body.experts} ? qc_pick(sums, i) : NAN);",
        "    }",
        "}",
    ]
    geometry = Geometry((most_tiles(body, TN), body.experts + 1, 1), (TILED_THREADS, 1, 1), shared.nbytes)
    note = f"fma: {TN} columns of an expert for {TM} of its rows at a time; {shared.nbytes} bytes of shared memory"
    return _kernel(spec, weight, geometry, lines, note)


def _kernel(
    spec: KernelSpec, weight: Weight, geometry: Geometry, lines: list[str], note: str, engine: str = "fma"
) -> CudaKernel:
    head = header_comment(spec, note, "an index out of range gives NaN")
    bound = signature(spec, geometry.threads, resident(geometry, weight, one_row=engine == "mma", one_pass=True))
    text = "\n".join([head, weight.definitions, bound, *indent(lines), "}\n"])
    return CudaKernel(text, geometry, engine, (note,))
