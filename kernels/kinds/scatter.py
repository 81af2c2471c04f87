"""Scatter along one dim: entries replace the element at their index, or fold into it, in the order of the index."""

from __future__ import annotations

from qcompiler.kernels.items import Axis, Index, Items
from qcompiler.kernels.scalar import fold_text
from qcompiler.kernels.text import VALUE_TYPES, offset
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.scatter import ScatterKernel


def form(spec: KernelSpec) -> Items:
    """The entries of a column are applied in order, so that equal indices give one result on any number of threads."""
    body = spec.body
    assert isinstance(body, ScatterKernel)
    _, src, out = spec.operands
    kind = VALUE_TYPES[out.dtype]
    folded = fold_text(body.fold, out.dtype, f"({kind})qc_load(place)", "value")
    return Items(
        note=f"scatter ({body.fold}), entries in order",
        outer=(Axis("o", body.outer),),
        run=Axis("n", body.inner),
        block=64,
        walk=Axis("i", body.count),
        index=Index(("o", "i", "n"), body.length),
        step=(
            f"const {kind} value = qc_load(src + {offset(src, ('o', 'i', 'n'))});",
            f"const auto place = out + {offset(out, ('o', 'at', 'n'))};",
            f"qc_store(place, ({kind})({folded}));",
        ),
        cost=4,
    )
