"""The values of rows of a cache, for readers that take no rows."""

from __future__ import annotations

from qcompiler.formats import cache_rows
from qcompiler.kernels.items import Axis, Items
from qcompiler.kernels.text import offset
from qcompiler.plan.kernel import KernelSpec, Operand
from qcompiler.plan.kinds.dequantize_cache import DequantizeCacheKernel


def form(spec: KernelSpec) -> Items:
    """A thread or a SIMD lane for each value."""
    body = spec.body
    assert isinstance(body, DequantizeCacheKernel)
    rows, out = spec.operands
    at = ("o", "m", "i", "c")
    step = _of_groups(rows, body) if body.kind == "int4" else _of_bytes(rows, body)
    return Items(
        note=f"the values of rows of {body.kind}",
        outer=(Axis("o", body.outer), Axis("m", body.middle), Axis("i", body.inner)),
        run=Axis("c", body.cols),
        block=256,
        step=(*step, f"qc_store(out + {offset(out, at)}, value);"),
        cost=1,
    )


def _of_bytes(rows: Operand, body: DequantizeCacheKernel) -> tuple[str, ...]:
    """A code times the scale of its row."""
    code = f"rows[{offset(rows, ('o', 'm', 'i', 'c'))}]"
    number = f"(float){code}" if body.kind == "int8" else f"qc_of_e4m3({code})"
    scale = offset(rows, ("o", "m", "i", str(cache_rows.scale_at(body.cols, body.kind))))
    return (f"const float scale = *(const float*)(rows + {scale});", f"const float value = {number} * scale;")


def _of_groups(rows: Operand, body: DequantizeCacheKernel) -> tuple[str, ...]:
    """A code times the step of its group, and the group's least number."""
    row = offset(rows, ("o", "m", "i", "0"))
    return (f"const float value = qc_of_int4(rows + {row}, {body.cols}, c);",)
