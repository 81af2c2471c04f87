"""The norm that a linear begins with, as the spec of a norm kernel: targets print it with the code of that kernel.

    norm_of(spec)           the norm kernel whose result the linear would read
    affine_of(spec)         its weight and bias among the linear's operands: (role, place)
    kept_of(spec)           the place of the operand that takes its rows for other readers; None if nobody else reads

Both targets go by the same equations, `form_of(spec)`.
"""

from __future__ import annotations

import msgspec

from qcompiler.kernels.kinds import norm
from qcompiler.kernels.rows import Rows
from qcompiler.plan.kernel import KernelSpec, Operand
from qcompiler.plan.kinds.linear import LinearKernel, RowNorm
from qcompiler.plan.kinds.norm import NormKernel


def norm_of(spec: KernelSpec) -> KernelSpec:
    """A norm kernel over x. Its result has the type of x, and the rows' strides where they are kept, else none between
    them."""
    body, prologue = _prologue(spec)
    x = spec.operands[0]
    affine = [spec.operands[place] for _, place in affine_of(spec)]
    kept = kept_of(spec)
    width = body.k if kept is None else spec.operands[kept].strides[0]
    out = Operand(name="rows", dtype=x.dtype, access="w", shape=x.shape, strides=(width, 1))
    record = NormKernel(
        kind=prologue.kind, rows=body.m, cols=body.k, eps=prologue.eps, has_weight=prologue.has_weight,
        has_bias=prologue.has_bias,
    )  # fmt: skip
    return msgspec.structs.replace(spec, operands=(x, *affine, out), body=record)


def form_of(spec: KernelSpec) -> Rows:
    """The equations of the norm."""
    return norm.form(norm_of(spec))


def affine_of(spec: KernelSpec) -> list[tuple[str, int]]:
    """("weight" or "bias", place among the linear's operands) of what the norm multiplies and adds."""
    body, prologue = _prologue(spec)
    first = body.extras(len(spec.operands)).stop
    return [(name.removeprefix("norm_"), first + i) for i, name in enumerate(prologue.names)]


def kept_of(spec: KernelSpec) -> int | None:
    """The place of the operand that takes the normalised rows, in front of the result."""
    assert isinstance(spec.body, LinearKernel)
    return len(spec.operands) - 2 if spec.body.keeps else None


def _prologue(spec: KernelSpec) -> tuple[LinearKernel, RowNorm]:
    assert isinstance(spec.body, LinearKernel) and spec.body.norm is not None
    return spec.body, spec.body.norm
