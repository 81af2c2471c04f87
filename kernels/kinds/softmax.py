"""Softmax over the last dim: maximum, exponentials and their sum, division; fp32 inside, rounded once.

A row of -inf gives NaN, as in torch. The maximum ignores NaN, and the sum then spreads it over the row.
"""

from __future__ import annotations

from qcompiler.kernels.rows import Fold, Keep, Rows, Value
from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.softmax import SoftmaxKernel


def form(spec: KernelSpec) -> Rows:
    body = spec.body
    assert isinstance(body, SoftmaxKernel)
    return softmax_of(body.rows, body.cols)


def softmax_of(rows: Dim, cols: Dim) -> Rows:
    """The exponentials are needed twice: for their sum and for the result."""
    return Rows(
        note="maximum, exponentials and their sum, division",
        rows=rows,
        cols=cols,
        steps=(
            Fold("top", "max", "x"),
            Keep("power", "exp(x - top)"),
            Fold("sum", "sum", "power"),
            Value("scale", "1 / sum"),
        ),
        result="power * scale",
        cost=16,
    )
