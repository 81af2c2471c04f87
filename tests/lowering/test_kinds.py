"""Lowerings of kinds: each kind has one, the tables follow from them, and one that is half declared is an error."""

from __future__ import annotations

from dataclasses import replace

import pytest
from xdsl.dialects.linalg.ops import FillOp, GenericOp

from qcompiler.ir import qc
from qcompiler.passes.lowering import kinds
from qcompiler.passes.lowering.kinds import argmax
from qcompiler.plan.kinds import KINDS
from qcompiler.plan.kinds.order import OrderKernel


def test_every_kind_has_a_lowering_and_the_tables_follow() -> None:
    assert set(kinds.LOWERINGS) == set(KINDS)
    for kind, lowering in kinds.LOWERINGS.items():
        assert lowering.kind is KINDS[kind] and (lowering.ops or kind in ("parts", "linears"))
        for op in lowering.ops:
            assert kinds.BY_OP[op] is lowering
            assert kinds.DRAFTS[op] is lowering.draft and kinds.BODIES[op] is lowering.body
            assert op is GenericOp or kinds.TEMPLATES[op] == kind
    assert sum(len(each.ops) for each in kinds.LOWERINGS.values()) == len(kinds.BY_OP), "two kinds serve one op"
    assert set(kinds.TEMPLATES) == set(kinds.BY_OP) - {GenericOp}
    assert set(kinds.DRAFTS) == {*kinds.BY_OP, FillOp}
    assert FillOp not in kinds.BODIES
    assert {qc.LinearOp, qc.SoftmaxOp} < set(kinds.FLOAT_ONLY) and qc.GatherOp not in kinds.FLOAT_ONLY


def test_a_lowering_to_another_kind_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(argmax, "LOWERING", replace(argmax.LOWERING, kind=OrderKernel))
    with pytest.raises(NotImplementedError, match=r"kinds\.argmax makes OrderKernel, not ArgmaxKernel"):
        kinds._lowerings()


def test_a_kind_without_a_lowering_is_an_error_that_names_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(argmax, "LOWERING")
    with pytest.raises(NotImplementedError, match=r"passes\.lowering\.kinds\.argmax has no LOWERING"):
        kinds._lowerings()
    monkeypatch.setattr("qcompiler.plan.kinds.KINDS", {**KINDS, "novel": OrderKernel})
    with pytest.raises(NotImplementedError, match=r"'novel' has no module qcompiler\.passes\.lowering\.kinds\.novel"):
        monkeypatch.setattr(argmax, "LOWERING", kinds.LOWERINGS["argmax"], raising=False)
        kinds._lowerings()
