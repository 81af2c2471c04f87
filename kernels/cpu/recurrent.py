"""The `recurrent` template: all steps of one direction of a recurrent layer, over recurrent.h.

The kernel is a loop over steps. Each step starts the threads once, twice with a projection, or never if the layer is
small. Weights are read like those of linears (linear.py), packed or plain, once per step.
"""

from __future__ import annotations

import re

from qcompiler.kernels import text as shared
from qcompiler.kernels.cpu import text
from qcompiler.kernels.cpu.linear import (
    Weight,
    block_of,
    most_raised,
    most_totals,
    product_scratch,
    tile_of,
    used_symbols,
    weight_of,
)
from qcompiler.kernels.cpu.weights import PANEL_LAYOUTS
from qcompiler.kernels.text import STORAGE_TYPES, c_dim
from qcompiler.plan.kernel import KernelSpec, Operand
from qcompiler.plan.kinds.recurrent import RecurrentKernel

UNITS = 64
"""recurrent.h's QR_UNITS."""


def _body(spec: KernelSpec) -> RecurrentKernel:
    assert isinstance(spec.body, RecurrentKernel)
    return spec.body


def _operands(spec: KernelSpec) -> dict[str, tuple[int, Operand]]:
    """The operands by role, with their numbers."""
    body, lstm = _body(spec), _body(spec).kind == "lstm"
    names = [
        "x", "w", *["projection"] * body.projects, *["bias"] * body.has_bias, "start", *["cell_start"] * lstm,
        "out", *["cell"] * lstm, *["room"] * body.projects,
    ]  # fmt: skip
    return {name: (number, spec.operands[number]) for number, name in enumerate(names)}


# --- scratch ---------------------------------------------------------------------------------------------------------


def _most_rows(body: RecurrentKernel, isa: str) -> int:
    """The most rows of an item: recurrent.h's QR_ROWS, or the batch if it is known and smaller."""
    most = 4 * tile_of(isa).rows
    return min(max(body.batch, 1), most) if isinstance(body.batch, int) else most


def _few(weight: Operand, body: RecurrentKernel, isa: str) -> int:
    """The most rows that are multiplied directly from codes; 0 for a row-major weight."""
    if weight.format is None and weight.layout not in PANEL_LAYOUTS:
        return 0
    return min(tile_of(isa).few, _most_rows(body, isa))


def _product(k: int, rows: int, few: int, isa: str, *, converts: bool) -> int:
    """Scratch bytes per thread of a product with up to `rows` rows, of which `few` are multiplied directly from
    codes."""
    block = block_of(k)
    row = 16 * tile_of(isa).panels + (-(-k // 16) * 16 if converts else 0)
    straight = 4 * (few * row + most_totals(k) + most_raised(k, few))
    panels = product_scratch(isa, block, whole=block >= k) if rows > few else 0
    return max(straight, panels)


def headers(spec: KernelSpec) -> tuple[str, ...]:
    return ("decode.h", "gemm.h", "few_rows.h", "recurrent.h")


def scratch_bytes(spec: KernelSpec, isa: str) -> int:
    """Scratch bytes per thread."""
    body, named = _body(spec), _operands(spec)
    rows, converts = _most_rows(body, isa), named["out"][1].dtype != "f32"
    step = _product(body.width, rows, _few(named["w"][1], body, isa), isa, converts=converts)
    size = 4 * rows * body.gates * UNITS + step
    if "projection" in named:
        few = _few(named["projection"][1], body, isa)
        size = max(size, _product(body.hidden, rows, few, isa, converts=False))
    return size


# --- text ------------------------------------------------------------------------------------------------------------


def emit(spec: KernelSpec, isa: str) -> str:
    """C++ text of one kernel. KernelSelectionError for operands without a decoder."""
    body, named = _body(spec), _operands(spec)
    weight = weight_of(spec.name, named["w"][1])
    definitions = weight.definitions
    lines = [*_scratch_check(spec, isa), *_job(spec, weight), *_begin(spec)]
    few = _few(named["w"][1], body, isa)
    step = f"qr_step<{_layer(spec)}, {weight.decoder}, {few}>(ctx, &job);"
    x, start, out = (named[name] for name in ("x", "start", "out"))
    state, given = STORAGE_TYPES[out[1].dtype], STORAGE_TYPES[x[1].dtype]
    inside = [
        f"const int64_t t = {'steps - 1 - step' if body.reverse else 'step'};",
        f"job.given = (const char*)((const {given}*)op[{x[0]}] + t * {c_dim(x[1].strides[0])});",
        f"char* const out = (char*)(({state}*)op[{out[0]}] + t * {c_dim(out[1].strides[0])});",
    ]
    if "projection" in named:
        projection = weight_of(spec.name, named["projection"][1])
        definitions += projection.definitions
        lines += _projection(spec, projection)
        inside += [step, "projection.out = out;", _project(spec, projection, isa)]
    else:
        inside += ["job.state = out;", step]
    inside.append(f"job.x = out, job.x_row = {c_dim(out[1].strides[1])};")
    lines += [
        f"job.x = (const char*)op[{start[0]}], job.x_row = {c_dim(start[1].strides[0])};",
        "for (int64_t step = 0; step < steps; step++) {",
        *shared.indent(inside),
        "}",
    ]
    header = shared.header_comment(
        spec, f"{body.kind}, {weight.decoder}; {scratch_bytes(spec, isa)} bytes of scratch per thread"
    )
    lines = [*used_symbols(spec, lines, "sym"), *lines]
    return "\n".join([header, definitions, text.entry_function(spec, lines)])


def _layer(spec: KernelSpec) -> str:
    """recurrent.h's qr_layer for this kernel."""
    named = _operands(spec)
    state = named["out"][1].dtype
    made = "f32" if "room" in named else state
    kinds = [named["x"][1].dtype, named["bias"][1].dtype if "bias" in named else "f32", state, made]
    kinds.append(named["cell"][1].dtype if "cell" in named else "f32")
    return f"qr_layer<QR_{_body(spec).kind.upper()}, {', '.join(STORAGE_TYPES[kind] for kind in kinds)}>"


def _scratch_check(spec: KernelSpec, isa: str) -> list[str]:
    """A static assertion that recurrent.h and this module agree on the scratch size."""
    body, named = _body(spec), _operands(spec)
    rows, few = _most_rows(body, isa), _few(named["w"][1], body, isa)
    converts = str(named["out"][1].dtype != "f32").lower()
    size = f"qr_scratch({body.width}, {rows}, {few}, {body.gates}, {converts})"
    return [f'static_assert({size} <= {scratch_bytes(spec, isa)}, "scratch");']


def _job(spec: KernelSpec, weight: Weight) -> list[str]:
    """The job that all steps share."""
    body, named = _body(spec), _operands(spec)
    out = named["out"][1]
    converts = [] if out.dtype == "f32" else [f"job.load_x = qg_convert_x<{STORAGE_TYPES[out.dtype]}>;"]
    lines = [
        f"const int64_t steps = {c_dim(body.steps)}, batch = {c_dim(body.batch)};",
        "qr_job job = {};",
        f"job.m = batch, job.n = {body.gates * body.hidden}, job.k = {body.width};",
        f"job.hidden = {body.hidden}, job.x_col = 1, job.finish = qr_keep<{body.gates}>;",
        *converts,
        f"const char* const w = (const char*)op[{named['w'][0]}];",
        *weight.statements,
        *([] if weight.in_place else [f"job.decode = qg_decode_panel<{weight.decoder}>;"]),
        f"job.given_row = {c_dim(named['x'][1].strides[1])};",
        *([f"job.bias = (const char*)op[{named['bias'][0]}];"] if body.has_bias else []),
    ]
    if "room" in named:
        room_number, room = named["room"]
        return [*lines, f"job.state = (char*)op[{room_number}], job.state_row = {c_dim(room.strides[0])};"]
    return [*lines, f"job.state_row = {c_dim(out.strides[1])};"]


def _begin(spec: KernelSpec) -> list[str]:
    """Writes before the first step: the given cells, and zeros in `room` if there are no steps at all."""
    body, named, lines = _body(spec), _operands(spec), list[str]()
    if "cell" in named:
        (source, given), (number, cell) = named["cell_start"], named["cell"]
        kind = STORAGE_TYPES[cell.dtype]
        lines += [
            f"job.cell = (char*)op[{number}], job.cell_row = {c_dim(cell.strides[0])};",
            f"qr_copy((const {kind}*)op[{source}], {c_dim(given.strides[0])}, ({kind}*)job.cell, job.cell_row, batch, "
            f"{body.hidden});",
        ]
    if "room" in named:
        row = f"job.state + i * job.state_row * 4, 0, {4 * body.hidden}"
        lines.append(f"for (int64_t i = 0; i < batch && steps == 0; i++) memset({row});")
    return [*lines, "if (batch <= 0) return;", "qr_cut(ctx, &job);"]


def _projection(spec: KernelSpec, weight: Weight) -> list[str]:
    """The job of the projection: a linear that reads `room`."""
    body, named = _body(spec), _operands(spec)
    kind, out = STORAGE_TYPES[named["out"][1].dtype], named["out"][1]
    statements = [re.sub(r"= w\b", "= p", line).replace("job.", "projection.") for line in weight.statements]
    return [
        f"const int64_t projected_row = {c_dim(out.strides[1])};",
        "qg_job projection = {};",
        f"projection.m = batch, projection.n = {body.width}, projection.k = {body.hidden};",
        "projection.x = job.state, projection.x_row = job.state_row, projection.x_col = 1;",
        f"const char* const p = (const char*)op[{named['projection'][0]}];",
        *statements,
        *([] if weight.in_place else [f"projection.decode = qg_decode_panel<{weight.decoder}>;"]),
        f"projection.finish = qr_store<{kind}>, projection.sym = &projected_row;",
    ]


def _project(spec: KernelSpec, weight: Weight, isa: str) -> str:
    """The statement that projects the states of one step."""
    body, named = _body(spec), _operands(spec)
    few = _few(named["projection"][1], body, isa)
    straight = f"qg_run_few<{weight.decoder}, {few}>(ctx, &projection);"
    if few == 0 or (isinstance(body.batch, int) and body.batch <= few):
        return straight if few else "qg_run(ctx, &projection);"
    return f"if (batch <= {few}) {straight[:-1]}; else qg_run(ctx, &projection);"
