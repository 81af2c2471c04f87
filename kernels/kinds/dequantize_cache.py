"""The values of rows of a cache, for readers that take no rows."""

from __future__ import annotations

from qcompiler.formats import cache_rows
from qcompiler.kernels.items import Axis, Items
from qcompiler.kernels.text import offset
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.dequantize_cache import DequantizeCacheKernel


def form(spec: KernelSpec) -> Items:
    """A code times the scale of its row."""
    body = spec.body
    assert isinstance(body, DequantizeCacheKernel)
    rows, out = spec.operands
    at = ("o", "m", "i", "c")
    code = f"rows[{offset(rows, at)}]"
    value = f"(float){code}" if body.kind == "int8" else f"qc_of_e4m3({code})"
    scale = offset(rows, ("o", "m", "i", str(cache_rows.scale_at(body.cols))))
    return Items(
        note=f"the values of rows of {body.kind}",
        outer=(Axis("o", body.outer), Axis("m", body.middle), Axis("i", body.inner)),
        run=Axis("c", body.cols),
        block=256,
        step=(
            f"const float scale = *(const float*)(rows + {scale});",
            f"qc_store(out + {offset(out, at)}, {value} * scale);",
        ),
        cost=1,
    )
