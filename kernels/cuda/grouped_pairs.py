"""What every kernel of grouped linears shares: where an expert lies in tiles, and which pairs chose it."""

from __future__ import annotations

from qcompiler.kernels.text import c_dim, identifier
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.grouped_linear import GroupedLinearKernel


def grouped_body(spec: KernelSpec) -> GroupedLinearKernel:
    """The spec's body, which is a grouped linear."""
    assert isinstance(spec.body, GroupedLinearKernel)
    return spec.body


def most_tiles(body: GroupedLinearKernel, columns: int) -> int:
    """Tiles of `columns` columns, from a multiple of 16 on, that hold an expert wherever it begins."""
    inside = 15 if body.n % 16 and body.experts > 1 else 0
    return -(-(inside + body.n) // columns)


def expert_of(spec: KernelSpec, pair: str) -> str:
    """The expression of the expert that `index` names for a pair."""
    index = spec.operands[2]
    return f"(int64_t){identifier(index.name)}[(int64_t)({pair}) * {c_dim(index.strides[0])}]"


def chosen(spec: KernelSpec) -> list[str]:
    """The statements that declare ``chosen(pair)``: whether a pair has this `expert`; the last one is none."""
    body = grouped_body(spec)
    return [
        "const auto chosen = [&](int64_t pair) QC_INLINED {",
        f"    const int64_t its = {expert_of(spec, 'pair')};",
        f"    return (its < 0 || its >= {body.experts} ? {body.experts} : its) == expert;",
        "};",
    ]
