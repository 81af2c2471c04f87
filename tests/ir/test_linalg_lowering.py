"""What qc ops are lowered to means the same: the interpreter runs both. tests/mlir has upstream MLIR run it."""

from __future__ import annotations

import re
from collections.abc import Sequence

import linalg_cases
import pytest
from by_path import ROOT
from xdsl.builder import Builder
from xdsl.ir import SSAValue

from qcompiler.errors import QCompilerError
from qcompiler.ir import qc
from qcompiler.ir.context import QCContext
from qcompiler.ir.interpreter import run
from qcompiler.ir.linalg_lowering import BY_THE_PASS, RULES, WITHOUT
from qcompiler.ir.mlir_oracle import arguments_of
from qcompiler.ir.qc import QC
from qcompiler.ir.types import QTensorType
from qcompiler.passes.lower_qc_to_linalg import LowerQcToLinalgPass
from qcompiler.plan.kernel import FormatRef


def test_every_op_of_the_dialect_has_a_lowering_or_a_reason() -> None:
    known = {op.name for op in (*RULES, *BY_THE_PASS)} | set(WITHOUT)
    assert {op.name for op in QC.operations} == known
    page = (ROOT / "docs" / "mlir.md").read_text()
    assert set(re.findall(r"^\| `(qc\.\w+)` \|", page, re.MULTILINE)) == set(WITHOUT)


def test_every_lowering_has_a_case() -> None:
    """Linears, norms, softmax, embeddings and products of batches have theirs in tests/mlir/test_oracle.py."""
    seen: set[str] = set()
    for name in (*linalg_cases.NAMES, *linalg_cases.LOOPS):
        seen |= {op.name for op in linalg_cases.case(name).module.walk()}
    elsewhere = {"qc.softmax", "qc.embedding", "qc.batch_matmul", "qc.dequantize", "qc.dim", "qc.yield"}
    assert {op.name for op in (*RULES, *BY_THE_PASS)} - seen <= elsewhere


@pytest.mark.parametrize("name", linalg_cases.NAMES)
def test_lowered_ops_mean_the_same(name: str) -> None:
    case = linalg_cases.case(name)
    before, after = dict(case.states), dict(case.states)
    wanted = run(case.module, case.weights, case.inputs, states=before)
    lowered = case.module.clone()
    LowerQcToLinalgPass().apply(QCContext.default(), lowered)
    lowered.verify()
    assert not any(op.name.startswith("qc.") for op in lowered.walk())
    got = run(lowered, case.weights, arguments_of(lowered, case.weights, case.inputs, states=after))
    for a, b in zip(got, [*wanted, *before.values()], strict=True):
        linalg_cases.same(a, b, case.tolerance)


def test_an_op_without_a_lowering_is_an_error_with_the_reason() -> None:
    """tests/api/test_to_mlir.py has one for what torch runs."""
    type_ = QTensorType.of((2, 4), "f32", FormatRef(name="int8", params={}))

    def body(b: Builder, a: Sequence[SSAValue]) -> Sequence[SSAValue]:
        made = b.insert(qc.QuantizeOp(a[0], type_)).result
        return b.insert(qc.DequantizeOp(made, a[0].type)).results

    module = linalg_cases.module_of([((2, 4), "f32")], body)
    with pytest.raises(QCompilerError, match=r"qc.quantize at '\?' cannot be lowered to linalg: it encodes a matrix"):
        LowerQcToLinalgPass().apply(QCContext.default(), module)


def test_a_state_without_a_value_is_an_error() -> None:
    case = linalg_cases.case("updates")
    LowerQcToLinalgPass().apply(QCContext.default(), case.module)
    with pytest.raises(QCompilerError, match="the state 'cache' has no value"):
        arguments_of(case.module, case.weights, case.inputs)
