"""The contract of loop kernels. For all other kinds see contracts.py.

A loop accesses its operands at affine offsets, and reads inputs only inside their views. It writes each output in full:
exactly one iteration of the parallel loops writes each element. So the order of threads never shows in a result.
"""

from __future__ import annotations

from collections.abc import Sequence

from qcompiler.errors import DimError, PlanError
from qcompiler.plan.contracts import check_operand_sizes, check_work, injective
from qcompiler.plan.coverage import Coverage
from qcompiler.plan.dims import Dim, Expr, dim, never_negative
from qcompiler.plan.kernel import KernelSpec, Operand
from qcompiler.plan.kinds.loop import AffineAccess, LoopKernel
from qcompiler.plan.scalar_types import FLOATS, check_program, is_float
from qcompiler.plan.sizes import Ranges, check_extent, check_view_sizes
from qcompiler.plan.view_regions import is_packed, region_of

MAX_OPERANDS = 256
MAX_LOOPS = 64

MOST_OPERATIONS_PER_OP = 16
"""The most elementary operations that emitters count for one op of a body."""


def loop_body(spec: KernelSpec) -> LoopKernel:
    assert isinstance(spec.body, LoopKernel)
    return spec.body


def check_loop(spec: KernelSpec) -> LoopKernel:
    """PlanError unless the parts of a loop kernel fit together. This needs no sizes."""
    body, where = loop_body(spec), f"loop kernel '{spec.name}'"
    outputs, rank = len(body.body.yields), len(body.extents)
    if not {len(spec.operands)} == {len(body.accesses), len(body.body.inputs)}:
        raise PlanError(f"{where}: operands, accesses and body inputs differ in number")
    if len(body.iterators) != rank or not 1 <= outputs <= len(spec.operands):
        raise PlanError(f"{where} has {len(body.iterators)} iterators for {rank} loops and {outputs} results")
    if len(spec.operands) > MAX_OPERANDS or rank > MAX_LOOPS:
        raise PlanError(f"{where} has {len(spec.operands)} operands and {rank} loops; at most 256 and 64 are taken")
    reduces = "reduction" in body.iterators
    if len(body.init) != (outputs if reduces else 0) and (reduces or body.init):
        raise PlanError(f"{where} has {outputs} results and {len(body.init)} initial values")
    types = check_program(body.body, rank)
    first = len(spec.operands) - outputs
    for number, (operand, access) in enumerate(zip(spec.operands, body.accesses, strict=True)):
        _check_operand(where, body, operand, access, is_output=number >= first)
        if operand.dtype != body.body.inputs[number][1]:
            raise PlanError(f"{where}: its body takes '{operand.name}' as {body.body.inputs[number][1]}")
    for operand, name in zip(spec.operands[first:], body.body.yields, strict=True):
        if types[name] != operand.dtype:
            raise PlanError(f"{where}: its body gives {types[name]} for '{operand.name}', which is {operand.dtype}")
    if not reduces:
        _check_no_accumulator(where, body, first)
    for operand, text in zip(spec.operands[first:], body.init, strict=False):
        if not (is_float(text) if operand.dtype in FLOATS else _is_integer(text)):
            raise PlanError(f"{where}: '{operand.name}' begins as {text[:40]!r}, which is no {operand.dtype}")
    return body


def _check_no_accumulator(where: str, body: LoopKernel, first: int) -> None:
    """PlanError if a body without a reduction uses an output's argument: the argument is an accumulator, and there is
    none."""
    program = body.body
    outputs = {name for name, _ in program.inputs[first:]}
    used = outputs & {*program.yields, *(arg for op in program.ops for arg in op.args)}
    if used:
        raise PlanError(f"{where} does not reduce, and its body uses '{min(used)}', the accumulator of a result")


def _is_integer(text: str) -> bool:
    if text in ("true", "false"):
        return True
    try:
        return len(text) <= 40 and -(1 << 63) <= int(text) < 1 << 63
    except ValueError:
        return False


def _check_operand(where: str, body: LoopKernel, operand: Operand, access: AffineAccess, *, is_output: bool) -> None:
    if operand.access != ("w" if is_output else "r"):
        raise PlanError(f"{where} declares operand '{operand.name}' as '{operand.access}'")
    if is_packed(operand):
        raise PlanError(f"{where}: its operand '{operand.name}' must be plain")
    if len(access.coefficients) != len(body.extents):
        raise PlanError(f"{where}: '{operand.name}' is accessed by another number of loops")
    for kind, step in zip(body.iterators, access.coefficients, strict=True):
        if is_output and kind == "reduction" and dim(step) != 0:
            raise PlanError(f"{where}: its output '{operand.name}' moves along a reduction loop")


def check_loop_sizes(spec: KernelSpec, ranges: Ranges) -> None:
    """PlanError unless a loop stays inside its operands, and writes each element of its outputs once, for all values
    of the symbols."""
    body, where = check_loop(spec), f"loop kernel '{spec.name}'"
    outputs = len(body.body.yields)
    try:
        for extent in body.extents:
            check_extent(extent, ranges)
        check_work(body.extents, ranges, MOST_OPERATIONS_PER_OP * (len(body.body.ops) + len(spec.operands)))
        for number, (operand, access) in enumerate(zip(spec.operands, body.accesses, strict=True)):
            if len(operand.strides) != len(operand.shape):
                raise PlanError(f"{where}: its operand '{operand.name}' needs a stride for each dim")
            check_operand_sizes(operand, ranges)
            check_view_sizes(operand.dtype, body.extents, access.coefficients, access.offset, ranges)
            _check_reach(where, operand, access, body.extents, ranges)
            if number >= len(spec.operands) - outputs:
                _check_output(where, body, operand, access, ranges)
    except DimError as error:
        raise PlanError(f"{where}: {error}") from error


def _check_reach(where: str, operand: Operand, access: AffineAccess, extents: Sequence[Dim], ranges: Ranges) -> None:
    low, high = _reach(access, extents, ranges)
    first, last = _reach(AffineAccess(offset=0, coefficients=operand.strides), operand.shape, ranges)
    if not never_negative(low - first, ranges) or not never_negative(last - high, ranges):
        raise PlanError(
            f"{where} accesses elements {low} to {high} of its operand '{operand.name}', which covers {first} to {last}"
        )


def _reach(access: AffineAccess, extents: Sequence[Dim], ranges: Ranges) -> tuple[Expr, Expr]:
    """The lowest and the highest element offset. DimError where a coefficient has no definite sign."""
    low = high = dim(access.offset)
    for coefficient, extent in zip(access.coefficients, extents, strict=True):
        step = dim(coefficient)
        if never_negative(step, ranges):
            high = high + step * (dim(extent) - 1)
        elif never_negative(-step, ranges):
            low = low + step * (dim(extent) - 1)
        else:
            raise DimError(f"the step '{step}' may be positive or negative")
    return low, high


def _check_output(where: str, body: LoopKernel, operand: Operand, access: AffineAccess, ranges: Ranges) -> None:
    """PlanError unless the parallel iterations and the elements of the view are proven to correspond one to one."""
    loops = [
        (extent, step)
        for extent, step, kind in zip(body.extents, access.coefficients, body.iterators, strict=True)
        if kind == "parallel"
    ]
    extents, steps = tuple(extent for extent, _ in loops), tuple(step for _, step in loops)
    if not injective(extents, steps, ranges) or not injective(operand.shape, operand.strides, ranges):
        raise PlanError(
            f"{where} writes elements of '{operand.name}' more than once: loops over {list(extents)} with steps "
            f"{list(steps)}, and a view of {list(operand.shape)} with strides {list(operand.strides)}"
        )
    view = region_of(operand.dtype, operand.shape, operand.strides, 0, ranges)
    written = region_of(operand.dtype, extents, steps, access.offset, ranges)
    if not Coverage(ranges).proven(view, [written]):
        raise PlanError(
            f"{where} does not write all of '{operand.name}': loops over {list(extents)} with steps {list(steps)} from "
            f"{access.offset} on, of a view of {list(operand.shape)} with strides {list(operand.strides)}"
        )
