"""Linears that share a launch, on the CPU: each has the bits of a launch of its own. What a launch does not take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from by_path import load

from qcompiler.errors import PlanError
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.verify_kernels import check_contract

support = load("tests/support/linears_cases.py")
LAYOUT, PAIRS = "cpu_p16_v2", "cpu_p16_pairs_v2"
Build = Callable[[Sequence[KernelSpec], str], Any]


@pytest.mark.parametrize(("dtype", "ms"), [("f32", (1, 7)), pytest.param("bf16", (1, 2, 8), marks=pytest.mark.slow)])
def test_each_linear_has_the_bits_of_a_launch_of_its_own(
    build: Build, isa: str, dtype: str, ms: tuple[int, ...]
) -> None:
    made = support.cases(LAYOUT, dtype, ms, PAIRS)
    kernels = build([spec for case in made for spec in (case.spec, *case.alone)], isa)
    for case in made:
        found = case.results(kernels.run_both(case.spec.name, case.fresh))
        apart = [
            array
            for spec, own, written in zip(case.alone, case.operands, case.written, strict=True)
            for array in kernels.run_both(spec.name, lambda own=own, n=written: support.fresh(own, n))[-written:]
        ]
        assert [each.tobytes() for each in found] == [each.tobytes() for each in apart], case.spec.name


def _two(**changes: Any) -> KernelSpec:
    """A launch of two linears, with fields of the second one changed."""
    case = support.cases(LAYOUT, "f32", (3,), PAIRS)[0]
    first, second = case.alone
    body = msgspec.structs.replace(second.body, **changes)
    return support.beside("two", [first, msgspec.structs.replace(second, body=body)])


def test_a_contract_takes_two_linears_that_read_rows_of_one_size() -> None:
    check_contract(_two())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"m": 2}, "linears of 3 x 1024 and 2 x 1024 elements of x"),
        ({"k": 512}, "linears of 3 x 1024 and 3 x 512 elements of x"),
        ({"m_class": "9-64"}, "one to 8 rows of x.*class 9-64"),
        ({"m_class": "1"}, "one to 8 rows of x.*class 1"),
        ({"has_bias": True}, "has 8 operands, and they take 9"),
    ],
)
def test_other_linears_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_contract(_two(**changes))


def test_a_weight_in_rows_and_a_launch_of_one_linear_are_refused() -> None:
    spec = _two()
    operands = [msgspec.structs.replace(op, layout="canonical") if op.name == "w_1" else op for op in spec.operands]
    with pytest.raises(PlanError, match="weights in panels; 'w' is in rows"):
        check_contract(msgspec.structs.replace(spec, operands=tuple(operands)))
    alone = support.cases(LAYOUT, "f32", (3,), PAIRS)[0].alone
    with pytest.raises(PlanError, match="a launch has 1 linears; it has 2 to 8"):
        check_contract(support.beside("one", alone[:1]))
    with pytest.raises(PlanError, match="a launch has 9 linears"):
        check_contract(support.beside("nine", [alone[0]] * 9))
