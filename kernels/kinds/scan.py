"""Running folds along the middle dim, in order: sums, products, minima, maxima, log-sum-exp.

f32 and narrower floats accumulate in fp32, with one rounding per element for narrow results. f64 accumulates in f64.
Integers, and booleans with an integer result, accumulate in the result's type and wrap.
"""

from __future__ import annotations

from qcompiler.kernels.items import Axis, Items
from qcompiler.kernels.scalar import FLOATS, fold_text
from qcompiler.kernels.text import VALUE_TYPES, offset
from qcompiler.plan.kernel import DType, KernelSpec
from qcompiler.plan.kinds.scan import ScanKernel


def form(spec: KernelSpec) -> Items:
    """A column is folded in order."""
    body = spec.body
    assert isinstance(body, ScanKernel)
    x, out = spec.operands
    kind, at = VALUE_TYPES[out.dtype], ("o", "i", "n")
    fold = _logaddexp(kind) if body.fold == "logaddexp" else fold_text(body.fold, out.dtype, "sum", "value")
    return Items(
        note=f"running folds ({body.fold}), in order",
        outer=(Axis("o", body.outer),),
        run=Axis("n", body.inner),
        block=64,
        walk=Axis("i", body.length),
        state=((kind, "sum"),),
        step=(
            f"const {kind} value = {converted(f'qc_load(x + {offset(x, at)})', x.dtype, out.dtype)};",
            f"sum = i == 0 ? value : ({kind})({fold});",
            f"qc_store(out + {offset(out, at)}, sum);",
        ),
        cost=2,
    )


def converted(value: str, source: DType, target: DType) -> str:
    """A value in the result's type. C++ leaves open what a float outside an integer type's range becomes, and the
    backends' compilers differ: `qc_ftoi` drops the fraction, takes the nearest end of the range, and 0 for NaN."""
    kind = VALUE_TYPES[target]
    if source in FLOATS and target not in FLOATS and target != "i1":
        return f"qc_ftoi<{kind}>({value})"
    return f"({kind}){value}"


def _logaddexp(kind: str) -> str:
    """log(exp(sum) + exp(value)), relative to the larger one. Two equal infinities give that infinity; NaN wins."""
    exp, log1p = ("qc_exp", "qc_log1p") if kind == "float" else ("exp", "log1p")
    top, low = "qc_maximum(sum, value)", "qc_minimum(sum, value)"
    return f"{top} == {low} && !(fabs({top}) < INFINITY) ? {top} : {top} + {log1p}({exp}({low} - {top}))"
