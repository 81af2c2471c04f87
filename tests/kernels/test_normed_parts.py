"""Parts with a norm on the CPU: the bits of the norm's kernel and the loop's, and what the contract refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from by_path import load

from qcompiler.errors import KernelSelectionError, PlanError
from qcompiler.kernels.cpu.emit import emit_kernel
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.loop import AffineAccess, LoopKernel
from qcompiler.plan.verify_kernels import _check_sizes, check_contract

CASES = load("tests/support/normed_parts_cases.py")
RANGES = {"n": (0, 64)}
BOUNDS = {"f32": 2e-6, "bf16": 2e-2, "f16": 2e-3}


def check(build: Callable[..., Any], isa: str, cases: Sequence[Any]) -> None:
    kernels = build([spec for case in cases for spec in (case.fused, case.norm, case.moved)], isa)
    for case in cases:
        for rows in (0, 1, 7, 33):
            given = case.given(rows)
            shape = (CASES.HEADS, rows, case.cols)
            *_, found = kernels.run_both(case.fused.name, lambda: [*given, case.empty(*shape)], [rows])  # noqa: B023
            affine, tables = given[1 : 1 + len(case.affine)], given[1 + len(case.affine) :]
            normed, apart = case.empty(rows, CASES.HEADS, case.cols), case.empty(*shape)
            kernels.run(case.norm.name, [given[0], *affine, normed], [rows])
            kernels.run(case.moved.name, [*(normed,) * case.reads, *tables, apart], [rows])
            assert found.tobytes() == apart.tobytes(), (case.name, rows)
            want = case.expected(given).transpose(1, 0, 2)
            error = np.linalg.norm(found.astype(np.float64) - want) / (np.linalg.norm(want) + 1e-30)
            assert error <= BOUNDS[case.dtype], (case.name, error)


def test_a_part_with_a_norm_has_the_bits_of_both_kernels(build: Callable[..., Any], isa: str) -> None:
    check(build, isa, CASES.SHORT)


@pytest.mark.slow
def test_every_size_of_heads_has_the_bits_of_both_kernels(build: Callable[..., Any], isa: str) -> None:
    check(build, isa, CASES.cases(quick=False))


# --- the contract ----------------------------------------------------------------------------------------------------

SPEC = CASES.SHORT[0].fused
"""Operands x, weight, cos, sin, out; the loop reads the norm of x twice."""


def edited(loop: Callable[[LoopKernel], LoopKernel] = lambda loop: loop, norm: Any = (), **changes: Any) -> KernelSpec:
    """The case with its part, its loop or its norm changed."""
    (part,) = SPEC.body.parts
    changed = msgspec.structs.replace(part.norm, **dict(norm))
    part = msgspec.structs.replace(part, loop=loop(part.loop), norm=changed, **changes)
    return msgspec.structs.replace(SPEC, body=msgspec.structs.replace(SPEC.body, parts=(part,)))


def accessed(number: int, **changes: Any) -> Callable[[LoopKernel], LoopKernel]:
    """A loop with one access changed."""

    def change(loop: LoopKernel) -> LoopKernel:
        accesses = list(loop.accesses)
        accesses[number] = msgspec.structs.replace(accesses[number], **changes)
        return msgspec.structs.replace(loop, accesses=tuple(accesses))

    return change


def body(**changes: Any) -> dict[str, Any]:
    return {"body": msgspec.structs.replace(SPEC.body.parts[0].norm.body, **changes)}


def longer(loop: LoopKernel) -> LoopKernel:
    return msgspec.structs.replace(loop, extents=(*loop.extents[:3], 33))


def of_rows_alone(loop: LoopKernel) -> LoopKernel:
    """Four loops that all go from row to row."""
    steps = tuple(AffineAccess(offset=each.offset, coefficients=(64, 192, 0, 0)) for each in loop.accesses[:2])
    return msgspec.structs.replace(loop, accesses=(*steps, *loop.accesses[2:]))


def twice(spec: KernelSpec) -> KernelSpec:
    """Two equal parts, each with a result of its own."""
    (part,), *_, out = spec.body.parts, *spec.operands
    operands = (*spec.operands, msgspec.structs.replace(out, name="other"))
    other = msgspec.structs.replace(part, operands=(*part.operands[:-1], len(operands) - 1))
    return msgspec.structs.replace(
        spec, operands=operands, body=msgspec.structs.replace(spec.body, parts=(part, other))
    )


FAULTS = {
    "a norm of an output": (lambda: edited(norm={"inputs": (4,)}), r"stands at the inputs \[4\] of 4"),
    "a norm of nothing": (lambda: edited(norm={"inputs": ()}), r"stands at the inputs \[\] of 4"),
    "an input named twice": (lambda: edited(norm={"inputs": (0, 0)}), r"stands at the inputs \[0, 0\]"),
    "an input that is negative": (lambda: edited(norm={"inputs": (-1,)}), r"stands at the inputs \[-1\]"),
    "x itself beside the norm of it": (lambda: edited(norm={"inputs": (0,)}), "reads 'x' and the norm of it"),
    "a norm of two operands": (lambda: edited(norm={"inputs": (0, 1, 2)}), "one norm of one operand"),
    "an affine operand that is none": (lambda: edited(norm={"affine": (9,)}), r"takes the operands"),
    "a weight of another size": (lambda: edited(norm={"affine": (2,)}, operands=(0, 0, 1, 3, 4)), "runs over"),
    "a weight too few": (lambda: edited(norm=body(has_bias=True)), "has 3 operands, not 4"),
    "rows longer than a block keeps": (lambda: edited(norm=body(cols=8193)), "rows of 1 to 8192 columns"),
    "wide rows that are rotated": (lambda: CASES.Case(514, "f32", "pairs", "rms").fused, "reads each column where"),
    "wide rows in reverse": (lambda: CASES.Case(257, "f32", "reversed", "rms").fused, "reads each column where"),
    "wide rows in two parts": (lambda: twice(CASES.Case(257, "f32", "copy", "rms").fused), "the only one of its"),
    "rows of another size than x has": (lambda: edited(norm=body(cols=32)), "runs over"),
    "two rows at once": (
        lambda: edited(accessed(1, offset=32, coefficients=(64, 384, -32, 1))), "reads two rows of its norm"
    ),
    "elements of the row before": (lambda: edited(accessed(1, offset=31)), "reads the elements -1 to"),
    "elements of the next row": (lambda: edited(longer), "reads the elements 0 to 64"),
    "an offset that is a symbol": (lambda: edited(accessed(0, offset="n")), "reads the elements n to"),
    "a step that is a symbol": (
        lambda: edited(accessed(0, coefficients=(64, 192, 32, "n"))), "takes the step n 32 times"
    ),
    "loops over rows alone": (lambda: edited(of_rows_alone), "no loop of a part goes over the columns"),
    "accesses by fewer loops": (lambda: edited(accessed(0, coefficients=(64,))), "another number of loops"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_norms_that_do_not_fit_their_loop_are_refused(fault: str) -> None:
    check_contract(SPEC)
    make, said = FAULTS[fault]
    with pytest.raises(PlanError, match=said):
        check_contract(make())
    with pytest.raises(KernelSelectionError, match=said):
        emit_kernel(make(), "generic")


def test_rows_outside_of_the_norm_are_refused() -> None:
    _check_sizes(SPEC, RANGES)
    with pytest.raises(PlanError, match="accesses elements"):
        _check_sizes(edited(lambda loop: msgspec.structs.replace(loop, extents=(4, *loop.extents[1:]))), RANGES)
