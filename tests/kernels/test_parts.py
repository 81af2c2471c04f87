"""Launches of several parts on the CPU: each part against NumPy, with any number of tasks, and row numbers checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from by_path import load

from qcompiler.errors import KernelSelectionError, PlanError
from qcompiler.kernels.cpu.emit import emit_kernel
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.parts import Part
from qcompiler.plan.verify_kernels import _check_sizes, check_contract

CASES = load("tests/support/parts_cases.py")
RANGES = {"n": (0, 700)}


@pytest.fixture(scope="module")
def kernels(build: Callable[..., Any], isa: str) -> Any:
    return build([CASES.case()], isa)


@pytest.mark.parametrize("rows", [0, 1, 7, 64, 601])
@pytest.mark.parametrize("at", [0, 5, CASES.LENGTH - 1])
def test_every_part_computes_what_it_would_alone(kernels: Any, rows: int, at: int) -> None:
    """601 rows are many tasks, since the tests' tasks are small; one row is one for each part."""
    given = CASES.arrays(rows, at)
    got = kernels.run_both("parts", lambda: [each.copy() for each in given], [rows])
    for value, want in zip(got[5:], CASES.expected(given), strict=True):
        if want.dtype == np.float32 and want.size == 1:
            np.testing.assert_allclose(value, want, rtol=1e-6)
        else:
            assert value.tobytes() == want.tobytes()


@pytest.mark.parametrize("bad", [-1, CASES.LENGTH, 2**40, -(2**40)])
def test_a_row_out_of_range_is_reported_before_any_part_writes(kernels: Any, bad: int) -> None:
    given = CASES.arrays(64, bad)
    before = [each.copy() for each in given]
    context = kernels.run("parts", given, [64])
    assert (context.error_code, context.error_value, context.error_limit) == (1, bad, CASES.LENGTH)
    for value, old in zip(given, before, strict=True):
        assert value.tobytes() == old.tobytes()


# --- the contract ----------------------------------------------------------------------------------------------------


def edited(number: int, **changes: Any) -> KernelSpec:
    """The case with one part changed."""
    spec = CASES.case()
    parts: list[Part] = list(spec.body.parts)
    parts[number] = msgspec.structs.replace(parts[number], **changes)
    return msgspec.structs.replace(spec, body=msgspec.structs.replace(spec.body, parts=tuple(parts)))


def with_operand(number: int, **changes: Any) -> KernelSpec:
    spec = CASES.case()
    operands = list(spec.operands)
    operands[number] = msgspec.structs.replace(operands[number], **changes)
    return msgspec.structs.replace(spec, operands=tuple(operands))


SPEC = CASES.case()
PARTS = SPEC.body.parts
FAULTS = {
    "no operand of that number": (lambda: edited(0, operands=(0, 9)), r"takes the operands \[0, 9\] of 9"),
    "a negative number": (lambda: edited(0, operands=(-4, 5)), r"takes the operands \[-4, 5\]"),
    "two writers": (lambda: edited(3, operands=(3, 5), loop=PARTS[3].loop), "written by 2 parts"),
    "an input that is written": (lambda: edited(0, operands=(0, 3)), "declares 'f' as 'r'"),
    "a row without an index": (lambda: edited(1, index=None), "declares 'x' as 'rw'"),
    "an index that is a float": (lambda: edited(1, index=3), "one plain integer"),
    "two row numbers": (lambda: with_operand(4, shape=(2,)), "one plain integer"),
    "an index for all of b": (lambda: edited(0, index=4), "'b' is"),
    "an operand that nothing uses": (lambda: edited(1, operands=(0, 6)), "used by no part"),
    "x is not read": (lambda: with_operand(6, access="w"), "writes a row has one result"),
    "a reduction": (
        lambda: edited(0, loop=msgspec.structs.replace(PARTS[0].loop, iterators=("parallel", "reduction"))),
        "or it reduces",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_parts_that_do_not_fit_are_refused(fault: str) -> None:
    make, said = FAULTS[fault]
    with pytest.raises(PlanError, match=said):
        check_contract(make())
    with pytest.raises(KernelSelectionError, match=said):
        emit_kernel(make(), "generic")


SIZES = {
    "a row that is not written in full": (
        lambda: edited(1, loop=CASES.loop((3, 39), (40, 1), (CASES.LENGTH * 40, 1), "arith.negf")), "does not write all"
    ),
    "a loop that leaves the row": (
        lambda: edited(1, loop=CASES.loop((3, 40), (40, 1), (CASES.LENGTH * 40 + 1, 1), "arith.negf")), "accesses"
    ),
    "rows that overlap": (lambda: with_operand(6, strides=(CASES.LENGTH * 40, 39, 1)), "may overlap each other"),
    "elements that are written twice": (
        lambda: edited(0, loop=CASES.loop(("n", 24), (24, 1), (24, 0), "arith.addf")), "more than once"
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", SIZES)
def test_sizes_that_are_not_proven_are_refused(fault: str) -> None:
    _check_sizes(SPEC, RANGES)
    make, said = SIZES[fault]
    with pytest.raises(PlanError, match=said):
        _check_sizes(make(), RANGES)
