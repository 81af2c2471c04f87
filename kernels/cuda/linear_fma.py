"""Linears in fp32 on the CUDA cores, and all linears with few rows of x, over linear_fma.cuh.

    M class "1", "2-8"      qc_linear_few: a block per panel of 16 rows of the weight, its warps share K
    "9-64", "large"         qc_linear_tiled: tiles of the result, weights decoded into shared memory
    strided plain weights   qc_linear_tiled, whatever the class

Every class gives correct results for any M; the class only says for which M it is fast. With few rows, tensor cores do
the products if they support the weight's type: this costs nothing, and leaves the CUDA cores to decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from qcompiler.kernels.cuda import linear_norm, linear_statistics
from qcompiler.kernels.cuda.geometry import PAIR_TABLE, SHARED_LIMIT, CudaKernel, Geometry, SharedMemory
from qcompiler.kernels.cuda.im2col import PLACE_BYTES, declaration
from qcompiler.kernels.cuda.linear_finish import Finish, finish_of, linear_body, row_offset
from qcompiler.kernels.cuda.panel_text import Launch, PanelText
from qcompiler.kernels.cuda.signature import arch_number, signature
from qcompiler.kernels.cuda.weights import LAYOUT, Weight, weight_of
from qcompiler.kernels.layouts.panels import planes
from qcompiler.kernels.norm_prologue import note_of
from qcompiler.kernels.text import STORAGE_TYPES, c_dim, header_comment, identifier, indent
from qcompiler.plan.dims import Dim, dim
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.pairs import HALF

RING = 4
"""The most tiles in flight per warp lane: 64 bytes."""

X_BYTES = 32768
"""Shared memory for x with few rows. With the table of pairs, three blocks fit a multiprocessor with 228 KiB."""

FEW_ROWS = 8
TILED_THREADS = 256
MAX_GRID_Y = 65535


def _ceil(value: Dim, step: int) -> Dim:
    """value / step, rounded up."""
    if isinstance(value, int):
        return -(-value // step)
    return dim(f"({value} + {step - 1}) // {step}").to_dim() if step > 1 else value


def _definitions(weight: Weight, finish: Finish) -> str:
    return weight.definitions + finish.definition


# --- few rows of x ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Few:
    """Template arguments of `qc_few`: rows of x per pass, warps, tiles in flight per lane, tiles of x per warp in
    shared memory, tensor cores."""

    rows: int
    warps: int
    depth: int
    chunk: int
    mma: bool


def few_shape(spec: KernelSpec, weight: Weight, *, mma: bool, launch: Launch | None = None) -> Few:
    """The shape of a linear's kernel, or of its blocks in a launch of several."""
    body = linear_body(spec)
    most = FEW_ROWS if isinstance(body.m, str) else min(FEW_ROWS, max(body.m, 1))
    rows = 1 if body.m_class == "1" else most
    launch = launch or Launch(weight.panels)
    loops = not isinstance(body.m, int) or body.m > rows
    ring = RING // 2 if mma and loops and weight.codes == "values" else RING
    return shape_for(rows, weight, launch.blocks, mma=mma, warps=launch.warps, ring=ring)


def shape_for(
    rows: int, weight: Weight, blocks: int, *, mma: bool, groups: int = 1, warps: int | None = None, ring: int = RING
) -> Few:
    """Enough warps that each keeps its ring of tiles busy, and more if there are few `blocks` to fill a GPU.

    With several `groups` of warps in a block (grouped_combined.py), the shape is that of one, and they share what a
    block has. At most `ring` tiles are in flight per lane: a loop over rows of x has registers for half of them if the
    values of codes come from global memory (QC_VALUES), since ptxas asks early for those of the next tiles.
    """
    depth = ring if mma or rows <= RING else RING // 2
    if weight.scattered:  # each piece loads its own entries and needs the registers for them
        depth = 1
    row_bytes = rows * (2 if mma else 4) * weight.tile * depth  # bytes of x for one round of a warp's ring
    room = X_BYTES // groups
    if warps is None:
        warps, most_warps = 1, (16 if blocks <= 128 or groups > 4 else 8) // groups
        while 2 * warps <= min(most_warps, weight.tiles // RING, room // row_bytes):
            warps *= 2
    rounds = min(room // (row_bytes * warps), -(-weight.tiles // (depth * warps)))
    return Few(rows, warps, depth, depth * max(rounds, 1), mma)


CROWDED_ARCH = 100
"""From here on ptxas needs four to nine registers more than 128 for pairs of rows whose codes a table decodes, in a
loop over rows of x: it gets the registers of one block per multiprocessor, and spills none. Sums that are scaled late
need more here, and before sm_80, beside a norm or pairs."""


def few(spec: KernelSpec, arch: str, *, mma: bool, launch: Launch | None = None) -> PanelText:
    """A linear of few rows, on tensor cores if `mma`. KernelSelectionError for weights that no kernel decodes."""
    weight, number = weight_of(spec.name, spec.operands[1]), arch_number(arch)
    body, finish, shape = linear_body(spec), finish_of(spec), few_shape(spec, weight, mma=mma, launch=launch)
    x, threads = spec.operands[0], 32 * shape.warps
    x_type = STORAGE_TYPES[x.dtype]
    shared = SharedMemory()
    pitch = shape.chunk * shape.warps * weight.tile + (16 if shape.mma and shape.rows > 1 else 0)
    staged, item = (x_type, 2) if shape.mma else ("float", 4)
    shared.add("x_tile", staged, shape.rows * pitch, item)
    shared.add("partial", "float", shape.warps * shape.rows * 16, 4)
    if body.norms:
        linear_norm.room(shared, spec, shape.rows)
    table = code_table(shared, weight, SHARED_LIMIT[number])
    numbers = f"{shape.rows}, {shape.warps}, {shape.depth}, {shape.chunk}"
    one_pass = isinstance(body.m, int) and body.m <= shape.rows
    late = one_pass and shape.mma and weight.late != "no"
    kind = f"qc_few<{weight.struct}, {x_type}, {numbers}, {str(shape.mma).lower()}, {str(late).lower()}>"
    m0, first = ("0", "true") if one_pass else ("m0", f"m0 == (int64_t)blockIdx.y * {shape.rows}")
    live = str(body.m) if one_pass else f"(int)qc_min({shape.rows}, {c_dim(body.m)} - m0)"
    product = [
        *([linear_norm.declaration(spec, m0)] if body.norms else []),
        f"qc_linear_few<{weight.struct}, {kind}>(",
        f"        {identifier(spec.operands[1].name)}_bytes, {identifier(x.name)} + {row_offset(x, m0)}, "
        f"{c_dim(x.strides[0])},",
        f"        {live}, panel, x_tile, {table},",
        f"        {first}, {'threadIdx.x' if one_pass else 'thread'}, partial{', norm' if body.norms else ''});",
        "__syncthreads();",
        *(_paired_stores if finish.pairs else _stores)(finish, shape, m0),
    ]
    if not one_pass:
        step = f"(int64_t)gridDim.y * {shape.rows}"
        head = f"for (int64_t m0 = (int64_t)blockIdx.y * {shape.rows}; m0 < {c_dim(body.m)}; m0 += {step}) {{"
        thread = ["int thread = threadIdx.x;", "QC_KEEP_32(thread);"]
        product = [head, *indent([*thread, *product]), "    __syncthreads();  // `partial` is read", "}"]
    lines = [
        *shared.declarations(),
        _bytes(spec),
        *product,
    ]
    passes = _ceil(body.m, shape.rows)
    grid_y: Dim = min(passes, MAX_GRID_Y) if isinstance(passes, int) else dim(f"min({passes}, {MAX_GRID_Y})").to_dim()
    geometry = Geometry((weight.panels, grid_y, 1), (threads, 1, 1), shared.nbytes)
    engine = "mma" if shape.mma else "fma"
    note = (
        f"{engine}: {shape.warps} warps share K ({weight.tiles} tiles of {weight.tile} columns), {shape.rows} rows of "
        f"x at a time; {shared.nbytes} bytes of shared memory"
    )
    definitions, notes = _definitions(weight, finish), [note]
    if body.norms:
        before = linear_norm.definition(spec, shape.warps, shape.rows, weight.panels)
        definitions = weight.definitions + before + finish.definition
        notes = [f"after a norm of the rows of x: {note_of(spec)}", note]
    blocks = resident(geometry, weight, one_row=shape.mma and body.m_class == "1", one_pass=body.m == 1)
    if finish.pairs and weight.lookup and body.m != 1 and number >= CROWDED_ARCH:
        blocks = 1
    if late and (number < 80 or number >= CROWDED_ARCH) and (body.norms or finish.pairs):
        blocks = 1 if weight.late == "adds" else min(blocks, 2)
    heads = (f"M class {body.m_class}", *notes)
    return PanelText(definitions, tuple(lines), geometry, heads, engine, blocks, waits=True)


def _stores(finish: Finish, shape: Few, m0: str) -> list[str]:
    """The statements that finish the panel's sums, one in each thread."""
    return [
        f"for (int i = threadIdx.x; i < {16 * shape.rows}; i += {32 * shape.warps}) {{",
        "    float sum = 0.0f;",
        f"    for (int warp = 0; warp < {shape.warps}; warp++) sum += partial[warp * {16 * shape.rows} + i];",
        "    " + finish.call(("sum",), f"{m0} + i / 16", "(int64_t)panel * 16 + i % 16"),
        "}",
    ]


def _paired_stores(finish: Finish, shape: Few, m0: str) -> list[str]:
    """The same for the panel's pairs: rows r and r + 8."""
    return [
        f"for (int i = threadIdx.x; i < {HALF * shape.rows}; i += {32 * shape.warps}) {{",
        f"    const float* const from = partial + i / {HALF} * 16 + i % {HALF};",
        "    float sum = 0.0f, other = 0.0f;",
        f"    for (int warp = 0; warp < {shape.warps}; warp++) {{",
        f"        sum += from[warp * {16 * shape.rows}];",
        f"        other += from[warp * {16 * shape.rows} + {HALF}];",
        "    }",
        "    " + finish.call(("sum", "other"), f"{m0} + i / {HALF}", f"(int64_t)panel * {HALF} + i % {HALF}"),
        "}",
    ]


def code_table(shared: SharedMemory, weight: Weight, limit: int) -> str:
    """The expression of a lane's view of the table of code values.

    Pairs of codes if `limit` bytes of shared memory have room for them, else single codes.
    """
    if not weight.lookup:
        return "qc_no_table()"
    if shared.nbytes + 128 + PAIR_TABLE <= limit:
        shared.add("table", "float2", 256 * 16, 8)
        return "qc_pairs(table)"
    shared.add("table", "float", 16 * 32, 4)
    return "qc_singles(table)"


def _bytes(spec: KernelSpec) -> str:
    w = identifier(spec.operands[1].name)
    return f"const uint8_t* const {w}_bytes = (const uint8_t*){w};"


def _kernel(
    spec: KernelSpec,
    weight: Weight,
    finish: Finish,
    geometry: Geometry,
    lines: Sequence[str],
    notes: tuple[str, ...],
    engine: str,
) -> CudaKernel:
    head = [header_comment(spec, f"M class {linear_body(spec).m_class}", *notes), _definitions(weight, finish)]
    blocks = resident(geometry, weight, one_row=False, one_pass=linear_body(spec).m == 1)
    text = "\n".join([*head, signature(spec, geometry.threads, blocks), *indent(lines), "}\n"])
    return CudaKernel(text, geometry, engine, notes)


def resident(geometry: Geometry, weight: Weight, *, one_row: bool, one_pass: bool) -> int:
    """Minimum blocks per multiprocessor. Without it ptxas aims at more blocks and spills.

    Three with one row of x on tensor cores: 48 KiB of weights in flight, while 75 % of an H200's bandwidth needs 25
    KiB. Two if 80 registers (what three blocks leave) are too few: codes looked up in tables, elements with several
    entries. If a loop over rows of x keeps values from pass to pass, also codes in several planes and tiles with
    several groups.
    """
    if geometry.threads > 256 or weight.entry_registers > 4 or weight.scattered:
        return 1
    light = weight.fields == 1 and not weight.lookup
    if not one_pass:
        light = light and len(planes(weight.bits)) == 1 and weight.covers >= weight.tile
    return 3 if one_row and light else 2


# --- tiles of the result ---------------------------------------------------------------------------------------------


def emit_tiled(spec: KernelSpec) -> CudaKernel:
    """A linear of any number of rows. KernelSelectionError for weights that no kernel decodes."""
    weight = weight_of(spec.name, spec.operands[1])
    body, finish = linear_body(spec), finish_of(spec)
    n, m = (32, 64) if body.m_class != "large" else (64, 64)
    shared = SharedMemory()
    shared.add("x_step", "float", 32 * (m + 4), 4)
    shared.add("w_step", "float", 32 * (n + 4), 4)
    if body.window is not None:
        shared.add("places", "qc_window_place", m, PLACE_BYTES)
    if body.given is not None:
        linear_statistics.room(shared, spec, m, vectors=False)
    table = code_table(shared, weight, 0)
    name = identifier(spec.operands[1].name)
    if weight.storage == "strided":
        down, right = (c_dim(s) for s in (spec.operands[1].strides or (weight.cols, 1)))
        stage = f"qc_gather_step<{n}>({name}, {down}, {right}, {weight.rows}, {weight.cols}, n0, k0, to);"
    else:
        stage = f"qc_decode_step<{weight.struct}, {n}>({name}_bytes, n0, k0, {table}, to);"
    rows, columns = m // 16, n // 16
    lines = [
        *shared.declarations(),
        *([f"qc_fill<{weight.struct}, {TILED_THREADS}>({table});"] if weight.lookup else []),
        *([_bytes(spec)] if weight.storage != "strided" else []),
        f"const int64_t m0 = (int64_t)blockIdx.x * {m}, n0 = (int64_t)blockIdx.y * {n};",
        f"const auto stage_w = [&](int64_t k0, float* to) {{ {stage} }};",
        f"float sums[{rows}][{columns}];",
        *_tiled_sums(spec, weight, n, m),
        *_tiled_stores(finish, rows, columns),
        *linear_statistics.written(spec, m, n, TILED_THREADS, "m0", "n0"),
    ]
    geometry = Geometry((_ceil(body.m, m), _ceil(weight.rows, n), 1), (TILED_THREADS, 1, 1), shared.nbytes)
    source = f"decoded from {LAYOUT}" if weight.storage == "codes" else weight.storage
    note = f"fma: tiles of {m} rows of x by {n} rows of w ({source}); {shared.nbytes} bytes of shared memory"
    notes: tuple[str, ...] = (note,)
    if body.given is not None:
        finish = replace(finish, definition=linear_statistics.definition(spec, in_pieces=False) + finish.definition)
        notes = (linear_statistics.note(spec), note)
    return _kernel(spec, weight, finish, geometry, lines, notes, "fma")


def _tiled_stores(finish: Finish, rows: int, columns: int) -> list[str]:
    """The statements that finish a thread's `sums`, a row of them at a time if one store takes a row."""
    row, column = f"m0 + threadIdx.x / 16 * {rows}", f"n0 + threadIdx.x % 16 * {columns}"
    if finish.pairs:
        return _paired_tiled_stores(finish, rows, columns)
    if columns == finish.group:
        return [
            "#pragma unroll 1",
            f"for (int i = 0; i < {rows}; i++) {{",
            f"    float mine[{columns}];",
            "    qc_pick_row(sums, i, mine);",
            "    " + finish.call_group(("mine",), f"{row} + i", column),
            "}",
        ]
    return [
        "#pragma unroll 1",
        f"for (int i = 0; i < {rows * columns}; i++)",
        "    " + finish.call(("qc_pick(sums, i)",), f"{row} + i / {columns}", f"{column} + i % {columns}"),
    ]


def _paired_tiled_stores(finish: Finish, rows: int, columns: int) -> list[str]:
    """The same for pairs: the other half's sums are those of the thread `HALF // columns` further on in the warp."""
    apart = HALF // columns
    row, column = f"m0 + threadIdx.x / 16 * {rows} + i", f"n0 / 2 + place / {2 * apart} * {HALF}"
    names = ("mine", "others")
    whole = [finish.call_group(names, row, f"{column} + place % {apart} * {columns}")]
    if columns != finish.group:
        totals = tuple(f"qc_pick({name}, j)" for name in names)
        call = finish.call(totals, row, f"{column} + place % {apart} * {columns} + j")
        whole = ["#pragma unroll 1", f"for (int j = 0; j < {columns}; j++)", f"    {call}"]
    return [
        "const int place = threadIdx.x % 16;",
        "#pragma unroll 1",
        f"for (int i = 0; i < {rows}; i++) {{",
        f"    float mine[{columns}], others[{columns}];",
        "    qc_pick_row(sums, i, mine);",
        "#pragma unroll",
        f"    for (int j = 0; j < {columns}; j++) others[j] = __shfl_xor_sync(QC_ALL_LANES, mine[j], {apart});",
        f"    if (place % {2 * apart} < {apart}) {{",
        *indent(whole, 2),
        "    }",
        "}",
    ]


def _tiled_sums(spec: KernelSpec, weight: Weight, n: int, m: int) -> list[str]:
    """The statements that fill `sums`."""
    body, x = linear_body(spec), spec.operands[0]
    name, rows, cols = identifier(x.name), c_dim(body.m), weight.cols
    if body.given is not None:
        return [
            linear_statistics.declaration(spec, in_pieces=False),
            f"norm.begin<{m}, {TILED_THREADS}>(m0, (int)qc_min({m}, {rows} - m0));",
            "const auto stage_x = [&](int64_t k0, float* to) {",
            f"    qc_normed_step<{m}>({name}, {c_dim(x.strides[0])}, {rows}, {cols}, m0, k0, norm, to);",
            "};",
            f"qc_tiled_sums<{n}, {m}>({cols}, x_step, w_step, stage_x, stage_w, sums);",
        ]
    if body.window is None:
        return [
            f"qc_linear_tiled<{n}, {m}>({name}, {c_dim(x.strides[0])}, {rows}, {cols}, m0,",
            "        x_step, w_step, stage_w, sums);",
        ]
    return [
        declaration(x, body.window),
        f"qc_place_windows<{m}>(window, m0, {rows}, places);",
        "const auto stage_x = [&](int64_t k0, float* to) {",
        f"    qc_window_step<{m}>({name}, window, places, {rows} - m0, {cols}, k0, to);",
        "};",
        f"qc_tiled_sums<{n}, {m}>({cols}, x_step, w_step, stage_x, stage_w, sums);",
    ]
