"""States that hold rows of a cache, which the numerics check compares as the numbers that they mean."""

from __future__ import annotations

from xdsl.dialects import tensor
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.linalg.ops import TransposeOp
from xdsl.ir import Operation, SSAValue

from qcompiler.formats import cache_rows
from qcompiler.ir import qc
from qcompiler.ir.types import shape_of

_VIEWS = (tensor.ExpandShapeOp, tensor.CollapseShapeOp, tensor.ExtractSliceOp, TransposeOp)


def cache_columns(module: ModuleOp) -> dict[str, tuple[int, cache_rows.Kind]]:
    """The states that rows of `qc.quantize_cache` are written to, each with the columns of a row and its kind.

    They are found in a module as it was imported: by the updates of a state, back through views to what made the rows.
    """
    found: dict[str, tuple[int, cache_rows.Kind]] = {}
    for op in module.walk():
        if isinstance(op, qc.StateUpdateOp) and (columns := _columns(op.value)) is not None:
            found[op.key] = columns
    return found


def _columns(value: SSAValue) -> tuple[int, cache_rows.Kind] | None:
    while isinstance(op := value.owner, Operation):
        if isinstance(op, qc.QuantizeCacheOp):
            return int(shape_of(op.x.type)[-1]), op.kind.data  # type: ignore[return-value]
        if isinstance(op, qc.IndexUpdateOp):
            value = op.src
        elif isinstance(op, _VIEWS):
            value = op.operands[0]
        else:
            return None
    return None
