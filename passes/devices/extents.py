"""What a GPU's kernels count in 32 bits: refused while the parameter's name is known."""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.ir import Operation, SSAValue

from qcompiler.errors import KernelSelectionError
from qcompiler.ir.context import QCContext
from qcompiler.ir.module import path_of
from qcompiler.ir.qc import ConstOp, EmbeddingOp, LinearOp
from qcompiler.ir.types import shape_of
from qcompiler.kernels.cuda.geometry import MAX_EXTENT, WAY_OUT


def check_extents(op: Operation, context: QCContext) -> None:
    """KernelSelectionError for a weight with more rows or columns than the kernels of the target count.

    Kernels for the CPU count in 64 bits; rows of an embedding's table are counted in 64 bits everywhere.
    """
    if context.target.kind == "cpu":
        return
    if isinstance(op, LinearOp):
        _check(op, op.w, ("rows", "columns"), context)
    elif isinstance(op, EmbeddingOp):
        _check(op, op.table, ("", "columns"), context)


def _check(op: Operation, weight: SSAValue, names: Sequence[str], context: QCContext) -> None:
    for name, size in zip(names, shape_of(weight.type), strict=True):
        if name and isinstance(size, int) and size > MAX_EXTENT:
            raise KernelSelectionError(
                f"{op.name} at '{path_of(op)}': {_named(weight, context)} has {size:,} {name}, and kernels for "
                f"{context.target.kind} count at most {MAX_EXTENT:,} of them. {WAY_OUT}"
            )


def _named(weight: SSAValue, context: QCContext) -> str:
    """The parameter's name in the model, where the weight is one."""
    if not isinstance(weight.owner, ConstOp):
        return "its weight"
    key = weight.owner.key
    parameters = context.weights[key].paths if key in context.weights else ()
    return f"the weight '{', '.join(parameters) or key}'"
