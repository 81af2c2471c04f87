"""The contract of kernels of several parts: what `loop_contract.py` is for one loop.

Every part is a pointwise loop on operands of its own numbers, and is held to the contract of loops: `part_specs` are
those loops.  An output that is a row of x is to the loop a tensor without x's axis of rows: it covers row 0, and the
kernel moves it by the row number, which it compares with x's length first.  Each operand that is written belongs to one
part alone.  That no part reads or writes another's memory follows from the rule of aliases (verify_steps.py), which
makes no exception for this kind.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from qcompiler.errors import DimError, PlanError
from qcompiler.plan.contracts import check_operand_sizes, injective
from qcompiler.plan.kernel import KernelSpec, Operand
from qcompiler.plan.kernel_body import INDICES
from qcompiler.plan.kinds.parts import Part, PartsKernel
from qcompiler.plan.loop_contract import MAX_OPERANDS, check_loop, check_loop_sizes
from qcompiler.plan.sizes import Ranges, check_extent
from qcompiler.plan.view_regions import is_packed

MAX_PARTS = 64

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
        if i >= inputs and part.index is not None:
            operand = row_of(operand)
        name = f"in{i}" if i < inputs else f"out{i - inputs}"
        operands.append(msgspec.structs.replace(operand, name=name))
    return KernelSpec(f"{spec.name}_part{number}", spec.symbols, tuple(operands), part.loop, spec.serves)


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
        used |= {*part.operands, *(() if part.index is None else (part.index,))}
    for place, operand in enumerate(spec.operands):
        times = written.count(place)
        if place not in used or times != (operand.access != "r"):
            raise PlanError(
                f"{where}: its operand '{operand.name}' ('{operand.access}') is "
                + (f"written by {times} parts" if place in used else "used by no part")
            )
    for each in part_specs(spec):
        check_loop(each)
    return body


def _check_part(where: str, operands: Sequence[Operand], part: Part) -> Sequence[int]:
    """The operands that a part writes. PlanError unless its numbers are operands of the kinds that they stand for."""
    outputs = len(part.loop.body.yields)
    numbers = (*part.operands, *(() if part.index is None else (part.index,)))
    if any(not 0 <= number < len(operands) for number in numbers):
        raise PlanError(f"{where}: a part takes the operands {list(numbers)} of {len(operands)}")
    if not 1 <= outputs <= len(part.operands) or "reduction" in part.loop.iterators:
        raise PlanError(f"{where}: a part has {outputs} results of {len(part.operands)} operands, or it reduces")
    written = part.operands[len(part.operands) - outputs :]
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
    for each in part_specs(spec):
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
