"""Layer and RMS norm: two passes over a row for the statistics, a third to write it; fp32 throughout."""

from __future__ import annotations

from qcompiler.kernels.items import by_role
from qcompiler.kernels.rows import Fold, Rows, Value
from qcompiler.plan.dims import product
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.norm import NormKernel


def form(spec: KernelSpec) -> Rows:
    """The square of the distance from the mean is summed, not the difference of two large sums."""
    body = spec.body
    assert isinstance(body, NormKernel)
    what, centred, mean = "x / sqrt(mean(x^2) + eps)", "x", list[Fold | Value]()
    if body.kind == "layer":
        what, centred = "(x - mean) / sqrt(var + eps)", "(x - center)"
        mean = [Fold("sum", "sum", "x"), Value("center", "sum / count")]
    weight = " * weight" if body.has_weight else ""
    bias = " + bias" if body.has_bias else ""
    result = f"{centred} * scale{weight}{bias}"
    if body.has_residual:
        dtype = by_role(spec)["residual"].dtype
        result = f"residual + ({result})" if dtype == "f32" else f"residual + round_{dtype}({result})"
        what += ", added to the residual"
    return Rows(
        note=f"{what}, eps = {body.eps:g}",
        rows=body.rows if body.inner is None else product((body.rows, body.inner)).to_dim(),
        cols=body.cols,
        steps=(*mean, Fold("square", "squares", centred), Value("scale", "1 / sqrt(square / count + eps)")),
        result=result,
        cost=4 + body.has_residual,
        numbers={"count": float(body.cols), "eps": body.eps},
        inner=body.inner,
    )
