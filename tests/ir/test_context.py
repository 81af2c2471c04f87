"""The shared context, and what a plain xdsl-opt sees."""

from __future__ import annotations

import pytest
from xdsl.context import Context
from xdsl.transforms import get_all_passes
from xdsl.universe import Universe

from qcompiler.errors import QCompilerError
from qcompiler.ir.context import QCContext, qc_context
from qcompiler.ir.universe import UNIVERSE


def test_a_pass_that_needs_weights_refuses_a_plain_context() -> None:
    with pytest.raises(QCompilerError, match=r"QCContext\.default"):
        qc_context(Context())
    ctx = QCContext.default()
    assert qc_context(ctx) is ctx


def test_a_clone_has_its_own_store_and_the_same_report() -> None:
    ctx = QCContext.default()
    copy = ctx.clone()
    assert isinstance(copy, QCContext)
    assert copy.weights is not ctx.weights
    copy.report.add("cse", "encoder", "shared", "equal")
    assert ctx.report.of("cse")[0].path == "encoder"
    assert copy.get_op("qc.linear") is ctx.get_op("qc.linear")


def test_no_name_of_ours_clashes_with_xdsls_own() -> None:
    assert not set(UNIVERSE.all_passes) & set(get_all_passes())
    assert {"qc", "rt"} <= set(Universe.get_multiverse().all_dialects)
    for name, factory in UNIVERSE.all_passes.items():
        assert factory().name == name
