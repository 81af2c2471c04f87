"""The position of the first maximum along the middle dim; the first NaN counts as the maximum."""

from __future__ import annotations

from qcompiler.kernels.items import Axis, Items
from qcompiler.kernels.scalar import comes_first
from qcompiler.kernels.text import VALUE_TYPES, offset
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.argmax import ArgmaxKernel


def form(spec: KernelSpec) -> Items:
    """A column is walked in order, so that an equal value further on is not the first."""
    body = spec.body
    assert isinstance(body, ArgmaxKernel)
    x, out = spec.operands
    kind = VALUE_TYPES[x.dtype]
    return Items(
        note="argmax, in order",
        outer=(Axis("o", body.outer),),
        run=Axis("n", body.inner),
        block=64,
        walk=Axis("i", body.length),
        state=((kind, "best"), ("int64_t", "at")),
        step=(
            f"const {kind} value = qc_load(x + {offset(x, ('o', 'i', 'n'))});",
            f"if (i == 0 || {comes_first('greater', x.dtype, 'value', 'best')}) {{",
            "    best = value;",
            "    at = i;",
            "}",
        ),
        result=(f"out[{offset(out, ('o', 'n'))}] = at;",),
        cost=2,
    )
