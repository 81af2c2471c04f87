"""The `recurrent` template: all steps of one direction of a recurrent layer; one block serves a few rows of the batch.

A step needs the whole state of the step before it, so several blocks would have to wait for each other. One block only
waits at barriers, and one launch serves any number of steps. In return, a layer is limited by the speed at which one
multiprocessor reads its weight. Weights are read like those of linears (weights.py), packed or plain, once per step.
"""

from __future__ import annotations

from dataclasses import dataclass

from qcompiler.errors import KernelSelectionError
from qcompiler.kernels.cuda.engines import CUDA_CORES
from qcompiler.kernels.cuda.geometry import SHARED_LIMIT, CudaKernel, Geometry, SharedMemory, check_extent
from qcompiler.kernels.cuda.per_element import blocks_of
from qcompiler.kernels.cuda.signature import arch_number, signature
from qcompiler.kernels.cuda.weights import Weight, weight_of
from qcompiler.kernels.text import STORAGE_TYPES, c_dim, header_comment, identifier, indent, offset
from qcompiler.plan.dims import dim
from qcompiler.plan.kernel import KernelSpec, Operand
from qcompiler.plan.kinds.recurrent import RecurrentKernel

ENGINES = CUDA_CORES

MOST_ROWS_WITH_OWN_BLOCK = 64
"""Up to this many rows of the batch, each row has its own block: all of them fit on a GPU at once."""

ROWS_PER_BLOCK = 4
"""Rows per block for larger batches, so that each weight read serves four rows. Fewer if their sums do not fit."""

MOST_WARPS = 16


@dataclass(frozen=True)
class _Product:
    """The product of a block's rows with one weight: where x is staged, and where the sums go."""

    weight: Weight
    operand: Operand
    rows: int
    warps: int
    table: str
    x_dtype: str

    @property
    def shape(self) -> str:
        """recurrent.cuh's qc_step_shape."""
        depth = 1 if self.weight.scattered else 4 if self.rows == 1 else 2
        return f"qc_step_shape<{self.weight.struct}, {STORAGE_TYPES[self.x_dtype]}, {self.rows}, {self.warps}, {depth}>"

    @property
    def padded(self) -> int:
        """Columns of a staged row; 0 if x is read in place."""
        if self.weight.storage == "strided":
            return 0
        return -(-self.weight.tiles * self.weight.tile // 16) * 16

    def statements(self, x: str, x_row: str) -> list[str]:
        """Statements that compute `sums` from the rows at `x`, with a barrier before and after them."""
        name = identifier(self.operand.name)
        if self.weight.storage == "strided":
            down, right = (c_dim(s) for s in (self.operand.strides or (self.weight.cols, 1)))
            call = f"qc_strided_sums<{self.rows}, {self.warps}>({name}, {down}, {right}, {self.weight.rows}, "
            return ["__syncthreads();", f"{call}{self.weight.cols}, {x}, {x_row}, live, sums);", "__syncthreads();"]
        stage = f"qc_stage_x<{self.weight.struct}, {self.shape}, false>({x}, {x_row}, live, 0, {self.table}, false, "
        sums = f"qc_panel_sums<{self.weight.struct}, {self.shape}>((const uint8_t*){name}, live, x_tile, {self.table}, "
        return [
            "__syncthreads();",
            f"{stage}threadIdx.x, x_tile);",
            "__syncthreads();",
            f"{sums}sums);",
            "__syncthreads();",
        ]


def _body(spec: KernelSpec) -> RecurrentKernel:
    assert isinstance(spec.body, RecurrentKernel)
    return spec.body


def _named(spec: KernelSpec) -> dict[str, Operand]:
    """The operands by role."""
    body, lstm = _body(spec), _body(spec).kind == "lstm"
    names = [
        "x", "w", *["projection"] * body.projects, *["bias"] * body.has_bias, "start", *["cell_start"] * lstm,
        "out", *["cell"] * lstm, *["room"] * body.projects,
    ]  # fmt: skip
    return dict(zip(names, spec.operands, strict=True))


def emit(spec: KernelSpec, arch: str) -> CudaKernel:
    """Text and geometry on `arch`. KernelSelectionError for operands without a kernel, and for layers whose sums do not
    fit a block's shared memory."""
    body, named = _body(spec), _named(spec)
    weights = {"w": weight_of(spec.name, named["w"])}
    if body.projects:
        weights["projection"] = weight_of(f"{spec.name}_projection", named["projection"])
    for name in weights:
        check_extent(spec, named[name], 0)
        check_extent(spec, named[name], 1)
    warps = _warps(max(weight.panels for weight in weights.values()))
    limit = SHARED_LIMIT[arch_number(arch)]
    rows = 1 if isinstance(body.batch, int) and body.batch <= MOST_ROWS_WITH_OWN_BLOCK else ROWS_PER_BLOCK
    made, shared = _products(named, weights, rows, warps)
    while shared.nbytes > limit:
        if rows == 1:
            raise KernelSelectionError(
                f"kernel '{spec.name}' ({spec.serves}): a recurrent layer of {body.hidden} units keeps "
                f"{shared.nbytes:,} bytes of sums and states in shared memory, and a block on {arch} has {limit:,}. "
                "Use smaller layers, or compile this one for the CPU"
            )
        rows //= 2
        made, shared = _products(named, weights, rows, warps)
    threads = 32 * warps
    geometry = Geometry((blocks_of(dim(body.batch), rows).to_dim(), 1, 1), (threads, 1, 1), shared.nbytes)
    note = f"{body.kind}: a block of {warps} warps per {rows} rows of the batch; {shared.nbytes} bytes of shared memory"
    lines = [
        *shared.declarations(),
        *(f"qc_fill<{p.weight.struct}, {threads}>({p.table});" for p in made.values() if p.weight.lookup),
        f"const int64_t row0 = (int64_t)blockIdx.x * {rows}, steps = {c_dim(body.steps)};",
        f"const int live = (int)qc_min({rows}, {c_dim(body.batch)} - row0);",
        *_begin(spec, named, threads),
        "#pragma unroll 1",
        "for (int64_t step = 0; step < steps; step++) {",
        *indent(_step(spec, named, made, threads)),
        "}",
    ]
    definitions = [weight.definitions for weight in weights.values()]
    head = [header_comment(spec, note), *definitions, signature(spec, threads, 1)]
    return CudaKernel("\n".join([*head, *indent(lines), "}\n"]), geometry, "fma", (note,))


def _warps(panels: int) -> int:
    """A power of two of warps from 4 to 16, one per panel if possible."""
    warps = 4
    while warps < min(panels, MOST_WARPS):
        warps *= 2
    return warps


def _products(
    named: dict[str, Operand], weights: dict[str, Weight], rows: int, warps: int
) -> tuple[dict[str, _Product], SharedMemory]:
    """The products of a step, and shared memory: staged rows, sums, and a table for each weight that needs one."""
    shared = SharedMemory()
    x_dtypes = {"w": named["out"].dtype, "projection": "f32"}
    plain = {
        name: _Product(weight, named[name], rows, warps, "qc_no_table()", x_dtypes[name])
        for name, weight in weights.items()
    }
    staged = max(product.padded for product in plain.values())
    if staged:
        shared.add("x_tile", "float", rows * staged, 4)
    shared.add("sums", "float", rows * 16 * max(weight.panels for weight in weights.values()), 4)
    made = {}
    for name, product in plain.items():
        table = product.table
        if product.weight.lookup:
            shared.add(f"{name}_table", "float", 16 * 32, 4)
            table = f"qc_singles({name}_table)"
        made[name] = _Product(product.weight, product.operand, rows, warps, table, product.x_dtype)
    return made, shared


# --- statements ------------------------------------------------------------------------------------------------------


def _units(count: int, threads: int, body: list[str]) -> list[str]:
    """A loop of all threads over `count` units of each live row: `r` is a row of the block, `j` a unit."""
    return [
        f"for (int i = threadIdx.x; i < live * {count}; i += {threads}) {{",
        f"    const int r = i / {count}, j = i % {count};",
        *indent(body),
        "}",
    ]


def _at(operand: Operand, indices: list[str]) -> str:
    return f"{identifier(operand.name)} + {offset(operand, indices)}"


def _begin(spec: KernelSpec, named: dict[str, Operand], threads: int) -> list[str]:
    """Writes before the first step: the given cells, and zeros in `room` if there are no steps at all."""
    lines, hidden = list[str](), _body(spec).hidden
    if "cell" in named:
        cell, given = (_at(named[name], ["(row0 + r)", "j"]) for name in ("cell", "cell_start"))
        lines += _units(hidden, threads, [f"qc_store({cell}, qc_load({given}));"])
    if "room" in named:
        room = _at(named["room"], ["(row0 + r)", "j"])
        lines += ["if (steps == 0) {", *indent(_units(hidden, threads, [f"qc_store({room}, 0.0f);"])), "}"]
    return lines


def _step(spec: KernelSpec, named: dict[str, Operand], made: dict[str, _Product], threads: int) -> list[str]:
    body, out, start = _body(spec), named["out"], named["start"]
    kind = STORAGE_TYPES[out.dtype]
    first = "steps - 1 - step" if body.reverse else "step"
    last = f"t {'+' if body.reverse else '-'} 1"
    lines = [
        f"const int64_t t = {first};",
        f"const {kind}* const before = step == 0 ? (const {kind}*)({_at(start, ['row0', '0'])}) : "
        f"(const {kind}*)({_at(out, [f'({last})', 'row0', '0'])});",
        f"const int64_t before_row = step == 0 ? {c_dim(start.strides[0])} : {c_dim(out.strides[1])};",
        *made["w"].statements("before", "before_row"),
        *_units(body.hidden, threads, _new_state(spec, named, made["w"].rows)),
    ]
    if "projection" not in made:
        return lines
    room, rows = named["room"], made["projection"].rows
    store = f"qc_store({_at(out, ['t', '(row0 + r)', 'j'])}, qc_sum_at<{rows}>(sums, r, j));"
    source = f"(const float*)({_at(room, ['row0', '0'])})"
    return [
        *lines,
        *made["projection"].statements(source, c_dim(room.strides[0])),
        *_units(body.width, threads, [store]),
    ]


def _new_state(spec: KernelSpec, named: dict[str, Operand], rows: int) -> list[str]:
    """Statements that compute the new state of unit `j` of row `r` from `sums`."""
    body = _body(spec)
    target = named["room"] if body.projects else named["out"]
    indices = ["(row0 + r)", "j"] if body.projects else ["t", "(row0 + r)", "j"]
    bias = f" + qc_load({_at(named['bias'], [f'(gate * {body.hidden} + j)'])})" if body.has_bias else ""
    own = f"qc_load({_at(named['x'], ['t', '(row0 + r)', f'(gate * {body.hidden} + j)'])})"
    lines = [
        "const auto share = [&](int gate) QC_INLINED {",
        f"    return qc_sum_at<{rows}>(sums, r, gate * {body.hidden} + j){bias};",
        "};",
        f"const auto store = [&](float value) QC_INLINED {{ qc_store({_at(target, indices)}, value); }};",
    ]
    given = f"const auto given = [&](int gate) QC_INLINED {{ return {own}; }};"
    both = f"const auto given = [&](int gate) QC_INLINED {{ return {own} + share(gate); }};"
    match body.kind:
        case "lstm":
            return [*lines, both, f"qc_lstm_unit(given, {_at(named['cell'], ['(row0 + r)', 'j'])}, store);"]
        case "gru":
            return [*lines, given, "qc_gru_unit(given, share, qc_load(before + r * before_row + j), store);"]
        case "tanh":
            return [*lines, both, "store(tanhf(given(0)));"]
        case "relu":
            return [*lines, both, "store(qc_relu(given(0)));"]
