"""The contract of kernels of several parts: what `loop_contract.py` is for one loop.

Every part is a pointwise loop on operands of its own numbers, and is held to the contract of loops: `part_specs` are
those loops.  An output that is a row of x is to the loop a tensor without x's axis of rows: it covers row 0, and the
kernel moves it by the row number, which it compares with x's length first.  Each operand that is written belongs to one
part alone.  That no part reads or writes another's memory follows from the rule of aliases (verify_steps.py), which
makes no exception for this kind.

Where a part has a norm, `norm_spec` is the norm's kernel, held to the contract of norms, and the loop reads its result:
an operand of the loop alone, which has no memory.  `row_axes` proves which loops go over rows.  A norm of rows wider
than `MOST_COLUMNS` is alone in its launch, and its loop reads each column where it stands (`in_order`): on a GPU a
block has such a row, and its threads exchange sums alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from qcompiler.errors import DimError, PlanError
from qcompiler.plan.contracts import check_operand_sizes, check_sizes, check_spec, injective
from qcompiler.plan.dims import Dim, contiguous_strides, dim
from qcompiler.plan.kernel import DType, KernelSpec, Operand
from qcompiler.plan.kernel_body import FLOATS, INDICES
from qcompiler.plan.kinds.loop import LoopKernel
from qcompiler.plan.kinds.parts import Part, PartNorm, PartsKernel
from qcompiler.plan.loop_contract import MAX_OPERANDS, check_loop, check_loop_sizes
from qcompiler.plan.sizes import Ranges, check_extent
from qcompiler.plan.view_regions import is_packed

MAX_PARTS = 64

MOST_COLUMNS = 256
"""Of a row that a part normalises: a lane of a warp keeps up to 8 columns in registers, beside what the loop needs."""

MOST_IN_ORDER = 8192
"""Of such a row in a launch of its own, whose loop reads each column where it stands (`in_order`): a thread of a block
keeps up to 8 columns."""

ROWS = 1
"""The axis of rows of an operand (outer, length, inner)."""


def parts_body(spec: KernelSpec) -> PartsKernel:
    assert isinstance(spec.body, PartsKernel)
    return spec.body


def part_specs(spec: KernelSpec) -> tuple[KernelSpec, ...]:
    """The loop of each part, on its own operands. The spec has passed `check_parts`."""
    return tuple(_part_spec(spec, number, part) for number, part in enumerate(parts_body(spec).parts))


def _part_spec(spec: KernelSpec, number: int, part: Part) -> KernelSpec:
    inputs = len(part.operands) - len(part.loop.body.yields)
    operands = []
    for i, place in enumerate(part.operands):
        operand = spec.operands[place]
        if part.norm is not None and i in part.norm.inputs:
            operand = _normalised(operand, part.loop.body.inputs[i][1])
        if i >= inputs and part.index is not None:
            operand = row_of(operand)
        name = f"in{i}" if i < inputs else f"out{i - inputs}"
        operands.append(msgspec.structs.replace(operand, name=name))
    return KernelSpec(f"{spec.name}_part{number}", spec.symbols, tuple(operands), part.loop, spec.serves)


def norm_spec(spec: KernelSpec, number: int) -> KernelSpec | None:
    """The kernel of a part's norm: x, weight, bias, and the result that the part's loop reads. None without a norm."""
    part = parts_body(spec).parts[number]
    if part.norm is None:
        return None
    position = part.norm.inputs[0]
    x = spec.operands[part.operands[position]]
    affine = [spec.operands[place] for place in part.norm.affine]
    out = msgspec.structs.replace(_normalised(x, part.loop.body.inputs[position][1]), name="out", access="w")
    return KernelSpec(f"{spec.name}_part{number}", spec.symbols, (x, *affine, out), part.norm.body, spec.serves)


def _normalised(x: Operand, dtype: DType) -> Operand:
    """The result of a norm of x, as a loop reads it."""
    return msgspec.structs.replace(x, access="r", dtype=dtype, strides=contiguous_strides(x.shape))


def row_axes(loop: LoopKernel, norm: PartNorm) -> tuple[int, ...]:
    """The loops that go from row to row of a norm's result; the others stay in a row.

    PlanError unless that is proven of every input that reads the result, and unless all of them read the same row.
    """
    cols = norm.body.cols
    reads = [loop.accesses[position] for position in norm.inputs]
    rows = tuple(
        axis
        for axis, extent in enumerate(loop.extents)
        if extent == 1 or all(dim(read.coefficients[axis]) % cols == 0 for read in reads)
    )
    for axis in rows:
        if loop.extents[axis] != 1 and len({dim(read.coefficients[axis]) for read in reads}) > 1:
            raise PlanError(f"a part reads two rows of its norm in one iteration of loop {axis}")
    for read in reads:
        low = high = read.offset
        for axis in set(range(len(loop.extents))) - set(rows):
            step, extent = read.coefficients[axis], loop.extents[axis]
            if not isinstance(step, int) or not isinstance(extent, int):
                raise PlanError(f"loop {axis} of a part takes the step {step} {extent} times in rows of {cols}")
            low, high = _reached(low, high, step * (extent - 1))
        if not isinstance(low, int) or not isinstance(high, int) or not 0 <= low <= high < cols:
            raise PlanError(f"a part reads the elements {low} to {high} of a row of {cols} that its norm makes")
    if len(rows) == len(loop.extents):
        raise PlanError("no loop of a part goes over the columns that its norm makes")
    return rows


def in_order(loop: LoopKernel, norm: PartNorm) -> bool:
    """Whether a loop goes over all columns of a row in one loop and reads the norm of each where it stands."""
    rows = row_axes(loop, norm)
    columns = [axis for axis in range(len(loop.extents)) if axis not in rows]
    return len(columns) == 1 and all(
        loop.extents[axis] == norm.body.cols and loop.accesses[position].coefficients[axis] == 1
        for axis in columns
        for position in norm.inputs
    )


def _reached(low: Dim, high: Dim, span: int) -> tuple[Dim, Dim]:
    """The range of elements with one more loop."""
    return (dim(low) + min(span, 0)).to_dim(), (dim(high) + max(span, 0)).to_dim()


def row_of(x: Operand) -> Operand:
    """Row 0 of x (outer, length, inner), as a loop writes it."""
    outer, _, inner = x.shape
    return msgspec.structs.replace(x, access="w", shape=(outer, inner), strides=(x.strides[0], x.strides[2]))


def check_parts(spec: KernelSpec) -> PartsKernel:
    """PlanError unless the parts and the operands of a launch fit together, whatever the sizes are."""
    body, where = parts_body(spec), f"kernel '{spec.name}' (parts)"
    if not 1 <= len(body.parts) <= MAX_PARTS or len(spec.operands) > MAX_OPERANDS:
        raise PlanError(
            f"{where} has {len(body.parts)} parts and {len(spec.operands)} operands; 1 to {MAX_PARTS} parts and at "
            f"most {MAX_OPERANDS} operands are taken"
        )
    written: list[int] = []
    used: set[int] = set()
    for part in body.parts:
        written += _check_part(where, spec.operands, part)
        used |= set(_numbers(part))
    for place, operand in enumerate(spec.operands):
        times = written.count(place)
        if place not in used or times != (operand.access != "r"):
            raise PlanError(
                f"{where}: its operand '{operand.name}' ('{operand.access}') is "
                + (f"written by {times} parts" if place in used else "used by no part")
            )
    for number, each in enumerate(part_specs(spec)):
        normed = norm_spec(spec, number)
        if normed is not None:
            check_spec(normed)
        check_loop(each)
        part = body.parts[number]
        if part.norm is not None:
            try:
                row_axes(part.loop, part.norm)
            except PlanError as error:
                raise PlanError(f"{where}: {error}") from error
            _check_wide(where, body, part.loop, part.norm)
    return body


def _numbers(part: Part) -> tuple[int, ...]:
    """The operands of a launch that a part names."""
    affine = () if part.norm is None else part.norm.affine
    return (*part.operands, *affine, *(() if part.index is None else (part.index,)))


def _check_part(where: str, operands: Sequence[Operand], part: Part) -> Sequence[int]:
    """The operands that a part writes. PlanError unless its numbers are operands of the kinds that they stand for."""
    outputs = len(part.loop.body.yields)
    numbers = _numbers(part)
    if any(not 0 <= number < len(operands) for number in numbers):
        raise PlanError(f"{where}: a part takes the operands {list(numbers)} of {len(operands)}")
    if not 1 <= outputs <= len(part.operands) or "reduction" in part.loop.iterators:
        raise PlanError(f"{where}: a part has {outputs} results of {len(part.operands)} operands, or it reduces")
    written = part.operands[len(part.operands) - outputs :]
    if part.norm is not None:
        _check_norm(where, operands, part, part.norm)
    for number in written:
        x = operands[number]
        if part.index is None and x.access != "w":
            raise PlanError(f"{where} declares '{x.name}' as '{x.access}'; a part writes all of it, or a row by index")
        if part.index is not None:
            _check_rows(where, x, outputs)
    if part.index is not None:
        index = operands[part.index]
        if index.access != "r" or index.dtype not in INDICES or index.shape != (1,) or is_packed(index):
            raise PlanError(
                f"{where}: a row number is one plain integer ({' or '.join(INDICES)}) that is read; '{index.name}' is "
                f"{index.dtype} {list(index.shape)}, '{index.access}'"
            )
        if len(index.strides) != 1:
            raise PlanError(f"{where}: '{index.name}' has rank 1 but {len(index.strides)} strides")
    return written


def _check_norm(where: str, operands: Sequence[Operand], part: Part, norm: PartNorm) -> None:
    """PlanError unless a part's norm stands at inputs of its loop that are one operand and have one type."""
    last = len(part.operands) - len(part.loop.body.yields)
    given = part.loop.body.inputs
    places = norm.inputs
    inside = places and len(set(places)) == len(places) and all(0 <= place < min(last, len(given)) for place in places)
    if not inside or len(part.loop.accesses) != len(part.operands):
        raise PlanError(f"{where}: the norm of a part stands at the inputs {list(places)} of {last}")
    if any(len(each.coefficients) != len(part.loop.extents) for each in part.loop.accesses):
        raise PlanError(f"{where}: a part with a norm is accessed by another number of loops than it has")
    x, dtypes = operands[part.operands[places[0]]], {given[place][1] for place in places}
    if len({part.operands[place] for place in places}) > 1 or len(dtypes) > 1 or not dtypes <= set(FLOATS):
        raise PlanError(f"{where}: a part reads one norm of one operand as one type of float, not as {sorted(dtypes)}")
    if is_packed(x) or not 1 <= norm.body.cols <= MOST_IN_ORDER:
        raise PlanError(
            f"{where}: a part normalises plain rows of 1 to {MOST_IN_ORDER} columns; '{x.name}' has {norm.body.cols}"
        )
    if norm.body.has_residual:
        raise PlanError(f"{where}: the norm of a part adds no residual")
    positions = [i for i, number in enumerate(part.operands) if number == part.operands[places[0]]]
    if set(positions) != set(places):
        raise PlanError(f"{where}: a part reads '{x.name}' and the norm of it")


def _check_wide(where: str, body: PartsKernel, loop: LoopKernel, norm: PartNorm) -> None:
    """PlanError unless a norm of wide rows is alone in its launch, and its loop reads them in order."""
    if norm.body.cols <= MOST_COLUMNS:
        return
    if len(body.parts) > 1 or not in_order(loop, norm):
        raise PlanError(
            f"{where}: a part that normalises rows of {norm.body.cols} columns, more than {MOST_COLUMNS}, is the only "
            "one of its launch and reads each column where it stands"
        )


def _check_rows(where: str, x: Operand, outputs: int) -> None:
    plain = not is_packed(x) and len(x.shape) == len(x.strides) == 3
    if outputs != 1 or x.access != "rw" or not plain:
        raise PlanError(
            f"{where}: a part that writes a row has one result, a plain operand of rank 3 that is 'rw'; '{x.name}' is "
            f"{list(x.shape)}, '{x.access}', one of {outputs}"
        )


def check_parts_sizes(spec: KernelSpec, ranges: Ranges) -> None:
    """PlanError unless each part stays inside its operands and writes each element of its outputs, or of one row of
    them, once, for all values of the symbols."""
    body = check_parts(spec)
    for number, each in enumerate(part_specs(spec)):
        normed = norm_spec(spec, number)
        if normed is not None:
            check_sizes(normed, ranges)
        check_loop_sizes(each, ranges)
    try:
        for operand in spec.operands:
            check_operand_sizes(operand, ranges)
        for part in body.parts:
            if part.index is None:
                continue
            x = spec.operands[part.operands[-1]]
            check_extent(x.shape[ROWS], ranges)
            if not injective(x.shape, x.strides, ranges):
                raise PlanError(
                    f"kernel '{spec.name}' (parts) writes rows of '{x.name}', whose elements may overlap each other: "
                    f"shape {list(x.shape)}, strides {list(x.strides)}"
                )
    except DimError as error:
        raise PlanError(f"kernel '{spec.name}' (parts): {error}") from error
