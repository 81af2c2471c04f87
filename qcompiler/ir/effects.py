"""Which ops may be removed or shared. xDSL declares no effects for `linalg`, so its CSE and DCE skip those ops."""

from __future__ import annotations

from xdsl.ir import Operation
from xdsl.traits import NoMemoryEffect, Pure

from qcompiler.ir import qc

_PURE: dict[type[Operation], bool] = {}


def is_pure(op: Operation) -> bool:
    """Whether the results depend only on operands and attributes, and there are no side effects."""
    kind = type(op)
    known = _PURE.get(kind)
    if known is None:
        known = op.has_trait(Pure) or op.has_trait(NoMemoryEffect) or kind.name == "linalg.index"
        _PURE[kind] = known
    # a structured op on tensors computes fresh values; one on memrefs (no results) writes its operands
    return known or (kind.name.startswith("linalg.") and bool(op.results))


def is_removable(op: Operation) -> bool:
    """Whether the op may be removed once nothing reads its results."""
    return is_pure(op) or isinstance(op, qc.StateOp)
