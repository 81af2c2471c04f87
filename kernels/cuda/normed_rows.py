"""A part of a launch that normalises rows and reads them in a loop, as CUDA C++: a warp has a row.

    float kept[4];                             columns lane, lane + 32, … of x
    … the folds of the norm's own kernel, in its order …
    kept[i] = qc_rounded<float>(…)             the row, normalised
    for (int i = 0; i < 4; i++) {              the loop's body, for elements lane, lane + 32, …
        const float v_in1 = kept[(i + 2) % 4];

A row of more columns than a warp keeps belongs to a block, as in the norm's own kernel, and the loop reads each column
in the thread that keeps it.

Nothing is stored between the norm and the loop.  What an element of the loop reads of the row is in a register of its
own lane (a rotation of halves of 32, 64, … columns), in one register of the lane whose number differs in some bits (a
rotation of pairs, and of halves of 1, 2, 4, 8 or 16 columns), or somewhere in the warp.  The emitter goes through all
elements to find out.
"""

from __future__ import annotations

import math

from qcompiler.kernels.cuda.geometry import CudaKernel, Geometry
from qcompiler.kernels.cuda.loop_form import PART_BLOCK, WORDS, index_type, up, value_type, variables
from qcompiler.kernels.cuda.rows import WARP, WARPS_PER_BLOCK, RowWalk, row_statements
from qcompiler.kernels.cuda.signature import part_signature
from qcompiler.kernels.loop_nest import Loop
from qcompiler.kernels.normed_part import NormedPart
from qcompiler.kernels.scalar import scalar_statements
from qcompiler.kernels.text import STORAGE_TYPES, c_dim, header_comment, indent, needed
from qcompiler.plan.parts_contract import MOST_COLUMNS

RESERVED = (
    WORDS
    | {"lane", "kept", "element", "center", "scale", "square", "sum", "x", "weight", "bias", "inner"}
    | {"whole_row", "partial"}
)
"""Names that no operand of the loop may have."""


def emit_part(part: NormedPart) -> CudaKernel:
    """The function that computes one block of a part: four rows, or one wide row."""
    nest, cols, elements = part.nest, part.cols, _elements(part)
    walk = RowWalk.of(part.count.to_dim(), cols)
    step, rows = walk.threads, WARPS_PER_BLOCK if walk.by_warp else 1
    own = part.norm.operands[-1]
    kind = index_type(nest)
    folds, result = row_statements(part.form, part.roles, walk)
    body = [
        f"const int element = lane + {step} * i;" if elements > step else "const int element = lane;",
        *variables("element", part.columns, kind),
        *_reads(part, step),
    ]
    work = _body(part)
    if elements % step:
        work = [f"if (element < {elements}) {{", *indent(work), "}"]
    lines = [
        *_own_row(part, walk),
        *variables("whole_row", part.rows, "int64_t"),
        *part.places(),
        *folds,
        *walk.each([f"kept[i] = qc_rounded<{STORAGE_TYPES[own.dtype]}>({result});"]),
        *(["#pragma unroll", f"for (int i = 0; i < {-(-elements // step)}; i++) {{"] if elements > step else ["{"]),
        *indent([*body, *work]),
        "}",
    ]
    limits = [f"const int64_t {loop.limit} = {c_dim(loop.extent)};" for loop in part.rows]
    limits += [f"const {kind} {loop.limit} = {c_dim(loop.extent)};" for loop in part.columns]
    limits = needed(limits, lines)
    geometry = Geometry((up(part.count, rows).to_dim(), 1, 1), (walk.block, 1, 1), walk.shared().nbytes)
    note = f"{walk.note()}: {part.form.note}"
    names = [*part.roles, *(nest.names[i] for i in part.others)]
    head = [header_comment(part.signature, note), part_signature(part.signature, names, PART_BLOCK)]
    text = "\n".join([*head, *indent([*limits, *lines]), "}\n"])
    return CudaKernel(text, geometry, notes=(note,))


def _own_row(part: NormedPart, walk: RowWalk) -> list[str]:
    """Statements that declare the row of a warp, or of a block, and the place of a thread in it."""
    if not walk.by_warp:
        return [
            *walk.shared().declarations(),
            f"const int64_t whole_row = {PART_BLOCK};",
            "const int lane = (int)threadIdx.x;",
        ]
    return [
        f"const int64_t whole_row = {PART_BLOCK} * {WARPS_PER_BLOCK} + threadIdx.x / {WARP};",
        f"const int lane = (int)threadIdx.x % {WARP};",
        f"if (whole_row >= {c_dim(part.count)}) return;  // whole warps",
    ]


def _elements(part: NormedPart) -> int:
    """The iterations of the loops inside of a row."""
    return math.prod(loop.extent.value for loop in part.columns)


def _body(part: NormedPart) -> list[str]:
    """Loads, statements and stores of one element."""
    nest = part.nest
    values, loads = list[str](), list[str]()
    for i, operand in enumerate(nest.spec.operands[: nest.inputs]):
        values.append(f"v_{nest.names[i]}" if nest.used(i) else "?")
        if nest.used(i) and i not in part.reads:
            loads.append(f"const {value_type(operand)} {values[i]} = qc_load({nest.address(i, nest.parallel)});")
    made = scalar_statements(nest.program, values + ["?"] * len(nest.outputs), nest.indices)
    stores = [
        f"qc_store({nest.address(nest.inputs + i, nest.parallel)}, {result});" for i, result in enumerate(made.results)
    ]
    return [*loads, *made.lines, *stores]


def _reads(part: NormedPart, step: int) -> list[str]:
    """Statements that declare what an element reads of the row. All lanes take part in an exchange."""
    nest, lines = part.nest, list[str]()
    for i in part.reads:
        if nest.used(i):
            positions = _positions(part, i)
            own = "kept[i]" if len(positions) > step else "kept[0]"
            wide = part.cols > MOST_COLUMNS  # the contract says that each column is read where it stands
            lines.append(f"const float v_{nest.names[i]} = {own if wide else _read(part, i, positions)};")
    return lines


def _read(part: NormedPart, i: int, positions: list[int]) -> str:
    """The expression of an element's value, from the column that each element reads."""
    per = -(-part.cols // WARP)
    index = "i" if len(positions) > WARP else "0"
    for mask in (0, 1, 2, 4, 8, 16):
        for shift in range(per):
            if all(
                at % WARP == element % WARP ^ mask and at // WARP == (element // WARP + shift) % per
                for element, at in enumerate(positions)
            ):
                place = index if not shift else f"({index} + {shift}) % {per}"
                kept = f"kept[{place}]"
                return kept if not mask else f"__shfl_xor_sync(QC_ALL_LANES, {kept}, {mask})"
    at = _column(part, i)
    elements = len(positions)
    if elements % WARP:  # lanes behind the last element must name a lane, too
        at = f"element < {elements} ? {at} : 0"
    return f"qc_kept(kept, {at})"


def _positions(part: NormedPart, i: int) -> list[int]:
    """The column of the row that each element of the loops inside of it reads."""
    found = [part.nest.offsets[i].value]
    for loop in part.columns:
        step = loop.steps[i].value
        found = [at + step * k for at in found for k in range(loop.extent.value)]
    return found


def _column(part: NormedPart, i: int) -> str:
    """The same as C++ text, at the loops' variables."""
    terms = [_term(loop, loop.steps[i].value) for loop in part.columns if loop.steps[i] != 0]
    offset = part.nest.offsets[i].value
    return "(int)(" + " + ".join([*([str(offset)] if offset or not terms else []), *terms]) + ")"


def _term(loop: Loop, step: int) -> str:
    return loop.name if step == 1 else f"{loop.name} * {step}"
