"""Checks sizes that GPU kernels count in 32 bits, while the parameter's name is still known."""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.ir import Operation, SSAValue

from qcompiler.errors import KernelSelectionError
from qcompiler.ir.context import QCContext
from qcompiler.ir.module import path_of
from qcompiler.ir.qc import ConstOp
from qcompiler.ir.types import shape_of
from qcompiler.kernels.cuda.geometry import MAX_EXTENT, WAY_OUT


def check_counted(op: Operation, weight: SSAValue, names: Sequence[str], context: QCContext) -> None:
    """KernelSelectionError for a weight with more rows or columns than the kernels of the target count.

    Kernels for the CPU count in 64 bits, and so do all kernels along a dim whose name in `names` is empty.
    """
    if context.target.kind == "cpu":
        return
    for name, size in zip(names, shape_of(weight.type), strict=True):
        if name and isinstance(size, int) and size > MAX_EXTENT:
            raise KernelSelectionError(
                f"{op.name} at '{path_of(op)}': {_named(weight, context)} has {size:,} {name}, and kernels for "
                f"{context.target.kind} count at most {MAX_EXTENT:,} of them. {WAY_OUT}"
            )


def _named(weight: SSAValue, context: QCContext) -> str:
    """The parameter's name in the model, if the weight is a parameter."""
    if not isinstance(weight.owner, ConstOp):
        return "its weight"
    key = weight.owner.key
    parameters = context.weights[key].paths if key in context.weights else ()
    return f"the weight '{', '.join(parameters) or key}'"
