"""The `linear` template: dequantising matrix products over gemm.h.

A linear becomes three pieces of C++: the decoder of a packed weight (weights.py), a `finish` function (bias, epilogue,
one rounding, store), and the kernel itself, which fills a `qg_job` and runs the driver for its M class:

    "1", "2-8"  qg_run_rows<decoder, rows>: codes are decoded in registers straight into the accumulators
    "large"     qg_run: panels are decoded once per task, then the microkernel runs over the rows of x; on AVX-512,
                qg_run_passes decodes a weight in panels while it multiplies; qb_run is for bf16, where the processor
                can

Every class gives correct results for any M >= 0; the class only says for which M it is fast.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

from qcompiler import formats
from qcompiler.errors import KernelSelectionError
from qcompiler.formats import Format
from qcompiler.kernels import text as shared
from qcompiler.kernels.cpu import fp32_tiles, linear_norm, text, vector
from qcompiler.kernels.cpu.weights import ANY_PANELS, PANEL_LAYOUTS, panel_weight
from qcompiler.kernels.norm_prologue import note_of
from qcompiler.kernels.paired import columns_of, in_panels
from qcompiler.kernels.scalar import scalar_statements
from qcompiler.kernels.text import STORAGE_TYPES, c_dim
from qcompiler.plan.kernel import ITEMSIZE, FormatRef, KernelSpec, Operand
from qcompiler.plan.kinds.linear import LinearKernel, Window

FLOATS = ("f32", "bf16", "f16")
KC, GROUP, BLOCKS = 512, 8, 16
"""gemm.h's QG_KC, QG_GROUP, QG_BLOCKS. Emitted kernels assert that the scratch sizes computed here match gemm.h's."""

TARGETS = 3
"""gemm.h's QG_TARGETS, which emitted kernels assert: the result, and operands of which rows are read with its rows."""

KEPT = 360448
"""Most bytes of converted rows that a task keeps: a third of an L2 cache of 1 MiB, which also holds decoded panels."""


@dataclass(frozen=True)
class Tile:
    """gemm.h's tile for an ISA: rows and panels of the microkernel, and the most rows multiplied directly from
    codes."""

    rows: int
    panels: int
    few: int


TILES: dict[str, Tile] = {
    "x86-64-v4": Tile(14, 2, 8),
    "x86-64-v3": Tile(6, 1, 4),
    "x86-64": Tile(2, 1, 2),
    "generic": Tile(6, 1, 4),
}


def tile_of(isa: str) -> Tile:
    """The register tile for `isa`. KernelSelectionError for an ISA that gemm.h does not know."""
    if isa not in TILES:
        raise KernelSelectionError(f"no CPU matrix kernels for ISA '{isa}' (there are: {', '.join(TILES)})")
    return TILES[isa]


# --- scratch ---------------------------------------------------------------------------------------------------------


def _up(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def block_of(k: int) -> int:
    """Columns per block of k, as gemm.h's qg_block."""
    return k if k <= KC else _up(_up(k, _up(k, KC)), 32) * 32


def most_totals(k: int) -> int:
    """few_rows.h's qg_most_totals: floats that the sums of groups of x take."""
    return _up(2 * (k // 16), 16) * 16


def most_raised(k: int, rows: int) -> int:
    """few_rows.h's qg_most_raised: floats of the rows of x for codes that are multiplied where they stand."""
    return _up(k, 16) * 16 * min(rows, 2)


def product_scratch(isa: str, block: int, *, whole: bool) -> int:
    """Scratch bytes per thread of gemm.h's qg_product (its qg_scratch): decoded panels, converted or copied rows of x,
    tiles of sums."""
    rows = tile_of(isa).rows
    panels = GROUP * block * 16
    converted = rows * (block + 16)
    tiles = rows * GROUP * 16 * (1 if whole else BLOCKS)
    return 4 * (panels + converted + tiles)


def few_rows(spec: KernelSpec, body: LinearKernel, isa: str) -> int:
    """Rows that the kernel multiplies directly from codes at a time; 0 if it decodes panels.

    Row-major weights always become panels: transposing them is most of the work, for any M.
    """
    weight = spec.operands[1]
    if weight.format is None and weight.layout not in PANEL_LAYOUTS:
        return 0
    return {"1": 1, "2-8": tile_of(isa).few, "large": 0}[body.m_class]


def headers(spec: KernelSpec) -> tuple[str, ...]:
    body = spec.body
    assert isinstance(body, LinearKernel)
    common = (
        "decode.h",
        "bf16.h",
        "gemm.h",
        "few_rows.h",
        "columns.h",
        "gemm_bf16.h",
        "bf16_blocks.h",
        "amx.h",
        "bf16_tiles.h",
        "bf16_kept.h",
        "fp32_tiles.h",
        "bf16_run.h",
    )
    windows = body.window is not None
    if not body.codes:
        return (*common, *["im2col.h"] * windows)
    return (*common, *["im2col.h"] * windows, *_int8().HEADERS, *["im2col_int8.h"] * windows)


def scratch_bytes(spec: KernelSpec, isa: str) -> int:
    """Scratch bytes per thread."""
    spec = in_panels(spec)
    body = spec.body
    assert isinstance(body, LinearKernel)
    if body.codes:
        return int(_int8().scratch_bytes(spec, isa))
    own = linear_norm.scratch_with_rows(spec, _own_scratch(spec, body, isa))
    kept = kept_bytes(spec, body, isa)
    return linear_norm.begin_of_rows(own) + kept if kept else own


def kept_bytes(spec: KernelSpec, body: LinearKernel, isa: str) -> int:
    """Bytes of the scratch of a thread in which converted rows of x are kept for all panels of w; 0: none are."""
    made = _converts(spec, body) or body.window is not None
    if body.norms or body.m_class != "large" or not made or body.n <= 16 * GROUP:
        return 0
    most = tile_of(isa).rows * BLOCKS
    return min(KEPT, 4 * most * (_up(body.k, 16) * 16 + 16))


def _own_scratch(spec: KernelSpec, body: LinearKernel, isa: str) -> int:
    """What the product itself needs of it."""
    tile, block, rows = tile_of(isa), block_of(body.k), few_rows(spec, body, isa)
    row = 16 * tile.panels + (_up(body.k, 16) * 16 if _converts(spec, body) else 0)
    few = 4 * ((rows or tile.few) * row + most_totals(body.k) + most_raised(body.k, rows or tile.few))
    if by_columns(spec, isa) and rows > 2:
        few += 4 * (_columns(body.k, rows) + _columns(body.k // 16, rows))
    if multiplies_bf16(spec, isa):
        few = max(few, _few_bf16(body.k, rows or tile.few, tile.panels, rounds=rounds_to_bf16(spec)))
        if rows != 1:
            blocks = block_bf16(body.k, rows or MOST_BF16, tile.panels, rounds=rounds_to_bf16(spec))
            few = max(few, blocks, _tiles_bf16(body.k, _most_rows(body, rows)))
    if rows:
        return few
    panels = product_scratch(isa, block, whole=block >= body.k)
    if by_columns(spec, isa):
        panels = max(panels, _pass_scratch(body.k, block, tile.panels))
    if _by_tiles(spec, body, isa):
        panels = max(panels, fp32_tiles.scratch(body.k, _most_rows(body, 0)))
    return max(few, panels) if multiplies_bf16(spec, isa) else panels


def by_columns(spec: KernelSpec, isa: str) -> bool:
    """Whether rows of x are put in order by columns (columns.h): on AVX-512, for a weight in panels, in fp32."""
    weight = spec.operands[1]
    panels = weight.format is not None or weight.layout in PANEL_LAYOUTS
    return isa == "x86-64-v4" and panels and not multiplies_bf16(spec, isa)


def _by_tiles(spec: KernelSpec, body: LinearKernel, isa: str) -> bool:
    """Whether a kernel for many rows has a form by tiles of AMX, in fp32."""
    many = few_rows(spec, body, isa) == 0 and not (isinstance(body.m, int) and body.m <= tile_of(isa).few)
    return many and by_columns(spec, isa) and fp32_tiles.multiplies(spec.operands[1], isa)


def _columns(k: int, rows: int) -> int:
    """columns.h's qg_columns: floats of rows by columns."""
    return _up(k, 16) * 16 * rows + 16


def _pass_scratch(k: int, block: int, panels: int) -> int:
    """columns.h's qg_pass_scratch."""
    rows = max(16, min(128, (1 << 19) // max(k, 1) // 8 * 8))
    wide = 16 * panels
    return 4 * (rows * wide + wide * 16 * _up(block, 16) + _columns(k, rows) + 2 * _columns(k // 32, 8))


def _few_bf16(k: int, rows: int, panels: int, *, rounds: bool) -> int:
    """gemm_bf16.h's qb_few_scratch."""
    return rows * (64 * panels + 64 * _up(k, 32) * (1 + rounds) + (k // 16 + 1) * 4)


MOST_BF16 = 128
"""Most rows of a task of bf16_blocks.h."""


def block_bf16(k: int, rows: int, panels: int, *, rounds: bool) -> int:
    """bf16_blocks.h's qb_block_scratch."""
    apart = _up(k, 32) * 32 | 32
    rows = min(rows, max(8, min(MOST_BF16, (3 << 19) // (2 * apart) // 8 * 8))) + 8
    return 512 * 64 + rows * (64 * panels + 2 * apart * (1 + rounds) + (k // 16 + 1) * 4) + (k // 16 + 1) * 256


_SPARE_OF_TILES = 2 * 512 * 32 + 2 * 4 * 32 * 48
"""bf16_tiles.h's QBT_SPARE."""


def _tiles_bf16(k: int, m: int) -> int:
    """bf16_run.h's qb_tiles_scratch."""
    if not 0 < k <= 2048 or 0 < m <= 64:
        return _tiles_of_sums(k, m)
    padded, unit = _up(k, 32) * 32, 64 * _up(k, 32) * 32
    own = _SPARE_OF_TILES + (1 << 20) // unit * unit + 2 * 4 * 32 * 32
    return max(_tiles_of_sums(k, 64), own + _rows_in_tiles(k, m, 4096) * (2 * padded + 4) + 4 * padded)


def _tiles_of_sums(k: int, m: int) -> int:
    """bf16_tiles.h's qbt_scratch: spare bytes, words and sums, rows of x in tiles, sums of their columns, a row."""
    padded, rows = _up(k, 32) * 32, _rows_in_tiles(k, m, 1024)
    work = 2 * 512 * 32 + 4 * max(rows * 48, min(rows * 17 * 16, 1 << 17))
    totals = _up(rows + 64 * (k // 32), 16) * 16
    return _SPARE_OF_TILES + work + rows * 2 * padded + 4 * (totals + padded)


def _rows_in_tiles(k: int, m: int, bound: int) -> int:
    """bf16_tiles.h's qbt_rows_that_fit."""
    fit = (1 << 22) // (2 * _up(k, 32) * 32) // 32 * 32 if k > 0 else bound
    return max(32, min(fit, _up(m, 32) * 32 if 0 < m < bound else bound))


def _most_rows(body: LinearKernel, few: int) -> int:
    """The number of rows for which tiles have room at a time, 0 for any. `few`: for how many the kernel is fast."""
    return body.m if isinstance(body.m, int) else few


def multiplies_bf16(spec: KernelSpec, isa: str) -> bool:
    """Whether factors are bf16 numbers, and `isa` has processors that multiply pairs of these (gemm_bf16.h)."""
    return isa == "x86-64-v4" and spec.operands[1].dtype == "bf16"


def rounds_to_bf16(spec: KernelSpec) -> bool:
    """Whether x is rounded to bf16, the type of the weight."""
    return spec.operands[1].dtype == "bf16" and spec.operands[0].dtype != "bf16"


def _int8() -> ModuleType:
    """The module of linears that multiply integers. It builds on this one."""
    return importlib.import_module("qcompiler.kernels.cpu.linear_int8")


def _converts(spec: KernelSpec, body: LinearKernel) -> bool:
    """Whether rows of x are made in scratch: converted from another type or to it, or gathered from an image."""
    return spec.operands[0].dtype != "f32" or body.window is not None or rounds_to_bf16(spec)


# --- weights ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weight:
    """How a kernel reads its weight: gemm.h's decoder, the columns of its steps, definitions before the kernel, and
    statements that fill the job."""

    decoder: str
    group: int
    definitions: str
    statements: tuple[str, ...]
    in_place: bool


def packed_format(ref: FormatRef) -> Format:
    """The format that a FormatRef names."""
    return formats.get(ref.name, **ref.params)


def _packed_weight(name: str, operand: Operand) -> Weight:
    assert operand.format is not None
    n, k = (int(d) for d in operand.shape)
    if operand.layout not in PANEL_LAYOUTS:
        raise KernelSelectionError(
            f"kernel '{name}': a packed weight needs layout {ANY_PANELS}, not '{operand.layout}'"
        )
    made = panel_weight(packed_format(operand.format), operand.dtype, n, k, operand.layout)
    parts = [f"job.packed.part[{i}] = w + {offset};" for i, offset in enumerate(made.parts)]
    sizes = f"job.packed.n = {n}, job.packed.k = {k};"
    return Weight(made.decoder, made.group, made.definitions, (sizes, *parts), False)


def weight_of(name: str, operand: Operand) -> Weight:
    """How kernel `name` reads the weight `operand` (n, k). KernelSelectionError if there is no decoder."""
    if operand.dtype not in FLOATS:
        raise KernelSelectionError(f"kernel '{name}': weights decode to {', '.join(FLOATS)}, not {operand.dtype}")
    if operand.format is not None:
        return _packed_weight(name, operand)
    kind = STORAGE_TYPES[operand.dtype]
    if operand.layout in PANEL_LAYOUTS:
        return Weight(f"qg_plain<{kind}>", 8, "", ("job.codes = w;",), operand.dtype == "f32")
    if operand.layout not in (None, "canonical"):
        raise KernelSelectionError(f"kernel '{name}': no decoder for plain weights in layout '{operand.layout}'")
    down, right = (operand.strides or (operand.shape[1], 1))[:2]
    strides = f"job.w_row = {c_dim(down)}, job.w_col = {c_dim(right)};"
    return Weight(f"qg_strided<{kind}>", 16, "", ("job.codes = w;", strides), False)


# --- finish ----------------------------------------------------------------------------------------------------------


def row_begin(operand: Operand, index: int, name: str) -> str:
    """Declares `name`: the start of row m of an (m, n) operand."""
    kind = ("const " if operand.access == "r" else "") + STORAGE_TYPES[operand.dtype]
    return f"{kind}* const {name} = ({kind}*)job->op[{index}] + m * {c_dim(operand.strides[0])};"


def row_lanes(operand: Operand, name: str) -> str:
    """The 16 elements of row `name` from column n on, for any stride."""
    stride = c_dim(operand.strides[1])
    if stride == "1":
        return f"qg_load_lanes({name} + n, lanes)"
    return f"vset(qc_load({name}))" if stride == "0" else f"vload_s({name} + n * {stride}, {stride}, lanes)"


def row_lane(operand: Operand, name: str) -> str:
    """The scalar at column n + l of row `name`."""
    stride = c_dim(operand.strides[1])
    return f"qc_load({name} + (n + l) * {stride})"


def _vector_body(spec: KernelSpec, body: LinearKernel, extras: list[tuple[str, Operand]]) -> list[str]:
    """Statements that finish 16 columns at row m, column n."""
    totals, lines = _totals(spec, body), []
    for total, sums, place in totals:
        bias = f" + qg_load_lanes(bias + {place}, lanes)" if body.has_bias else ""
        lines.append(f"const vf {total} = vload({sums}){bias};")
    result = "sum"
    if body.epilogue is not None:
        inputs = [total for total, _, _ in totals]
        for name, operand in extras:
            inputs.append(f"{name}_n")
            lines.append(f"const {text.VECTOR_TYPES[operand.dtype]} {name}_n = {row_lanes(operand, name)};")
        statements = vector.vector_statements(body.epilogue, inputs, stored=(spec.operands[-1].dtype,))
        lines += statements.lines
        (result,) = statements.results
    return [*lines, f"qg_store_lanes(out + n, {result}, lanes);"]


def _totals(spec: KernelSpec, body: LinearKernel) -> list[tuple[str, str, str]]:
    """(name, where its 16 sums begin, where their biases begin) of each input of the epilogue that is a sum."""
    if not body.pairs:
        return [("sum", "sums + j", "n")]
    return [("sum", "pairs[0]", "n"), ("other", "pairs[1]", f"n + {columns_of(spec)}")]


def _scalar_body(spec: KernelSpec, body: LinearKernel, extras: list[tuple[str, Operand]]) -> list[str]:
    """The same, column by column, for an epilogue without a vector form."""
    assert body.epilogue is not None
    totals, lines = _totals(spec, body), []
    for total, sums, place in totals:
        bias = f" + qc_load(bias + {place} + l)" if body.has_bias else ""
        lines.append(f"const float {total} = ({sums})[l]{bias};")
    inputs = [total for total, _, _ in totals]
    for name, operand in extras:
        inputs.append(f"{name}_n")
        lines.append(f"const {shared.VALUE_TYPES[operand.dtype]} {name}_n = {row_lane(operand, name)};")
    statements = scalar_statements(body.epilogue, inputs, stored=(spec.operands[-1].dtype,))
    lines += [*statements.lines, f"qc_store(out + n + l, {statements.results[0]});"]
    return ["for (int l = 0; l < lanes; l++) {", *shared.indent(lines), "}"]


def finish_of(spec: KernelSpec, body: LinearKernel) -> str:
    """The function that turns fp32 sums into the result: bias, epilogue, one rounding."""
    places = body.extras(len(spec.operands))
    extras = [(f"e{i}", spec.operands[i]) for i in places]
    obstacle = None if body.epilogue is None else vector.vector_obstacle(body.epilogue)
    inner = _vector_body(spec, body, extras) if obstacle is None else _scalar_body(spec, body, extras)
    rows = [row_begin(spec.operands[i], i, f"e{i}") for i in places]
    rows.append(row_begin(spec.operands[-1], len(spec.operands) - 1, "out"))
    columns = [
        "for (int64_t j = 0; j < cols; j += 16) {",
        "    const int64_t n = n0 + j;",
        "    const int lanes = (int)qc_min(cols - j, 16);",
    ]
    if body.pairs:  # two panels are 16 pairs
        columns = [
            "for (int64_t j = 0; j < cols; j += 32) {",
            "    const int64_t n = (n0 + j) / 2;",
            f"    const int lanes = (int)qc_min(qc_min(cols - j, 32) / 2, {columns_of(spec)} - n);",
            "    if (lanes <= 0) break;",
            "    float pairs[2][16];",
            "    qg_pairs(sums + j, cols - j, pairs);",
        ]
    lines = [
        *([text.pointer(spec.operands[2], 2, "bias", "job->op")] if body.has_bias else []),
        "for (int64_t i = 0; i < rows; i++) {",
        "    const int64_t m = m0 + i;",
        "    const float* const sums = tile + i * stride;",
        *shared.indent([*rows, *columns, *shared.indent(inner), "}"]),
        "}",
    ]
    return finish_function(spec, lines)


def finish_function(spec: KernelSpec, lines: list[str]) -> str:
    """The `qg_finish` function of a kernel around `lines`, with the symbols that they use declared."""
    return "\n".join(
        [
            f"static void qk_{spec.name}_finish(const qg_job* job, const float* tile, int64_t stride,",
            "        int64_t m0, int64_t rows, int64_t n0, int64_t cols) {",
            *shared.indent([*used_symbols(spec, lines, "job->sym"), *lines]),
            "}\n",
        ]
    )


def used_symbols(spec: KernelSpec, lines: Sequence[str], source: str) -> list[str]:
    """Declarations of the symbols that `lines` use, read from the array `source`."""
    words = set(re.findall(r"\w+", " ".join(lines)))
    declarations = zip(spec.symbols, text.symbol_declarations(spec.symbols, source), strict=True)
    return [declaration for name, declaration in declarations if shared.symbol(name) in words]


# --- the kernel ------------------------------------------------------------------------------------------------------


def source_of(x: Operand, window: Window | None) -> list[str]:
    """Statements that set in the job where x is."""
    if window is None:
        return [f"job.x = (const char*)op[0], job.x_row = {c_dim(x.strides[0])}, job.x_col = 1;"]
    sizes = [*window.image[1:], *x.strides[:3], *window.size]
    numbers = [*window.kernel, *window.strides, *window.padding, *window.dilation]
    return [
        f"const qg_window window = {{{', '.join(c_dim(n) for n in (*sizes, *numbers))}}};",
        "job.x = (const char*)op[0], job.window = &window;",
    ]


def targets_of(spec: KernelSpec, body: LinearKernel) -> list[str]:
    """Statements that set in the job which lines the result has, and operands of the epilogue with a row for each of
    its rows, where rows are in one piece."""
    found, last = [f'static_assert(QG_TARGETS == {TARGETS}, "targets");'], len(spec.operands) - 1
    for number, place in enumerate((last, *body.extras(len(spec.operands)))[:TARGETS]):
        operand, size = spec.operands[place], ITEMSIZE[spec.operands[place].dtype]
        if operand.strides[1] == 1 and operand.strides[0] != 0:
            row, panel = f"{size} * {c_dim(operand.strides[0])}", 16 * size // (2 if body.pairs else 1)
            found.append(f"job.targets[{number}] = {{(const char*)op[{place}], {row}, {panel}}};")
    return found


def _keeping(spec: KernelSpec, body: LinearKernel, isa: str) -> list[str]:
    """Statements that set in the job where converted rows are kept."""
    kept = kept_bytes(spec, body, isa)
    return [f"job.kept_at = {scratch_bytes(spec, isa) - kept}, job.kept_bytes = {kept};"] if kept else []


def _conversion(spec: KernelSpec, window: Window | None) -> list[str]:
    """Statements that set in the job how to read x."""
    x, rounds = spec.operands[0], rounds_to_bf16(spec)
    kind = STORAGE_TYPES[x.dtype]
    if rounds and window is not None:
        raise KernelSelectionError(
            f"kernel '{spec.name}' ({spec.serves}): windows of {x.dtype} are not rounded to bf16"
        )
    if rounds:
        return [f"job.load_x = qg_round_x<{kind}>;"]
    if window is not None:
        words = [f"job.load_words = qg_load_windows<{kind}, {kind}>;"] if x.dtype == "bf16" else []
        return [f"job.load_x = qg_load_windows<{kind}>;", *words]
    return [] if x.dtype == "f32" else [f"job.load_x = qg_convert_x<{kind}>;"]


def emit(spec: KernelSpec, isa: str) -> str:
    """C++ text: the values of the codes, the finish function, ``qk_<name>``. KernelSelectionError without a suitable
    kernel."""
    spec = in_panels(spec)
    body = spec.body
    assert isinstance(body, LinearKernel)
    if body.codes:
        return str(_int8().emit(spec, isa))
    if body.statistics is not None or body.given is not None:
        raise KernelSelectionError(
            f"kernel '{spec.name}' ({spec.serves}) writes or reads statistics of rows; only GPUs have kernels that do, "
            "and on a CPU threads share the kernel of the norm: compile the model for the CPU"
        )
    x = spec.operands[0]
    weight = weight_of(spec.name, spec.operands[1])
    rows, scratch = few_rows(spec, body, isa), _own_scratch(spec, body, isa)
    converts = str(_converts(spec, body)).lower()
    lines = [
        "qg_job job = {};",
        f"job.m = {c_dim(body.m)}, job.n = {body.n}, job.k = {body.k};",
        *(linear_norm.source(spec, scratch) if body.norms else source_of(x, body.window)),
        *_conversion(spec, body.window),
        "const char* const w = (const char*)op[1];",
        *weight.statements,
        f"job.finish = qk_{spec.name}_finish;",
        *targets_of(spec, body),
        *_keeping(spec, body, isa),
        "job.op = op, job.sym = sym;",
    ]
    dots = multiplies_bf16(spec, isa) and weight.group % 2 == 0
    kind = STORAGE_TYPES[x.dtype]
    straight = 0 if body.window is not None or weight.decoder.startswith("qg_strided") else tile_of(isa).few
    tiles = _by_tiles(spec, body, isa)
    if tiles:
        run = f"qft_run<{weight.decoder}>(ctx, &job, {_most_rows(body, 0)})"
        lines.append(f"if (qft_takes(ctx, &job)) return {run};")
    if rows:
        columns = by_columns(spec, isa) and rows > 2
        driver = "qg_run_rows" if columns else "qg_run_few"
        chosen = f"qb_run_few<{weight.decoder}, {kind}" if dots and straight else f"{driver}<{weight.decoder}"
        most = f", {_most_rows(body, rows)}" if dots and straight else ""
        lines.append(f"{chosen}, {rows}>(ctx, &job{most});")
        size = f"qg_few{'_columns' * columns}_scratch({body.k}, {rows}, {converts})"
    else:
        if not weight.in_place:
            lines.append(f"job.decode = qg_decode_panel<{weight.decoder}>;")
        driver = f"qg_run_passes<{weight.decoder}>" if by_columns(spec, isa) else "qg_run"
        lines.append(
            f"qb_run<{weight.decoder}, {kind}, {straight}>(ctx, &job, {_most_rows(body, 0)});"
            if dots
            else f"{driver}(ctx, &job);"
        )
        size = f"qg_scratch({body.k})"
        if by_columns(spec, isa):
            size = f"{size} <= {scratch} && qg_pass_scratch({body.k})"
    lines = [*used_symbols(spec, lines, "sym"), *lines]
    if tiles:
        size = f"{size} <= {scratch} && qft_scratch({body.k}, {_most_rows(body, 0)})"
    if dots and rows != 1:
        size = f"{size} <= {scratch} && qb_tiles_scratch({body.k}, {_most_rows(body, rows)})"
    if dots and straight:
        rounds = str(rounds_to_bf16(spec)).lower()
        size = f"{size} <= {scratch} && qb_few_scratch({body.k}, {rows or straight}, {rounds})"
        if rows != 1:
            size = f"{size} <= {scratch} && qb_block_scratch({body.k}, {rows or MOST_BF16}, {rounds})"
    lines.insert(0, f'static_assert({size} <= {scratch}, "scratch");')
    header = shared.header_comment(
        spec,
        *([f"after a norm of the rows of x: {note_of(spec)}"] if body.norms else []),
        f"M class {body.m_class}; {weight.decoder}; {scratch_bytes(spec, isa)} bytes of scratch per thread",
    )
    prologue = linear_norm.rows_functions(spec)
    definitions = weight.definitions + prologue + finish_of(spec, body)
    return "\n".join([header, definitions, text.entry_function(spec, lines)])
