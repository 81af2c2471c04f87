"""Contracts before emission: a template writes text only for a spec that meets the contract of its kind."""

from __future__ import annotations

from collections.abc import Iterable

from qcompiler.errors import KernelSelectionError, PlanError
from qcompiler.plan.contracts import declared_kinds
from qcompiler.plan.kernel import KernelSpec, LoopKernel
from qcompiler.plan.verify_kernels import check_contract


def require_contract(spec: KernelSpec) -> None:
    """`check_contract`, with a KernelSelectionError. What the contract says about sizes is proven where a plan is
    loaded."""
    try:
        check_contract(spec)
    except PlanError as error:
        raise KernelSelectionError(str(error)) from error


def require_declared(templates: Iterable[str]) -> None:
    """AssertionError if a template has no contract. Runs when a table of templates is built."""
    declared = {str(kind.__struct_config__.tag) for kind in (*declared_kinds(), LoopKernel)}  # type: ignore[attr-defined]
    missing = sorted(set(templates) - declared)
    assert not missing, f"the templates {missing} have no contract (qcompiler/plan/contracts.py)"
