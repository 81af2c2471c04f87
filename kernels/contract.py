"""Contracts before emission: a template writes text only for a spec that meets the contract of its kind."""

from __future__ import annotations

from qcompiler.errors import KernelSelectionError, PlanError
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.verify_kernels import check_contract


def require_contract(spec: KernelSpec) -> None:
    """`check_contract`, with a KernelSelectionError. What the contract says about sizes is proven where a plan is
    loaded."""
    try:
        check_contract(spec)
    except PlanError as error:
        raise KernelSelectionError(str(error)) from error
