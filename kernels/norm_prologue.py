"""The norms that a linear begins with, as the specs of norm kernels: targets print them with the code of those kernels.

    stages_of(spec)         for each norm: the kernel that it stands for, and its operands among the linear's
    note_of(spec)           their equations, for a comment
    kept_of(spec)           the place of the operand that takes the rows of the first norm for other readers; None if
                            nobody else reads them
    kept_codes_of(spec)     the same of the rows of int8

A first norm with a residual makes the rows that a second one reads. Both targets go by the same equations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from qcompiler.kernels.kinds import norm
from qcompiler.kernels.rows import Rows
from qcompiler.plan.kernel import KernelSpec, Operand
from qcompiler.plan.kinds.linear import STATISTICS, LinearKernel, RowNorm
from qcompiler.plan.kinds.norm import NormKernel


@dataclass(frozen=True)
class Stage:
    """One norm of a prologue.

    `spec` is a norm kernel. Its x is the linear's, or the rows of the stage before, and its result has the type of x.
    `places` has the place of its weight, bias, residual and given statistics among the linear's operands; the spec has
    no operand for the latter. `kept` is the place of the operand that takes its rows.
    """

    spec: KernelSpec
    places: Mapping[str, int]
    kept: int | None

    @property
    def form(self) -> Rows:
        """The equations of the norm."""
        return norm.form(self.spec)

    @property
    def width(self) -> int | str:
        """Elements from one row of the result to the next."""
        return self.spec.operands[-1].strides[0]


def stages_of(spec: KernelSpec) -> list[Stage]:
    """The norms in order. Rows that are not kept have no gaps between them."""
    body = _linear(spec)
    x, first, stages = spec.operands[0], body.extras(len(spec.operands)).stop, list[Stage]()
    for record in body.norms:
        kept = kept_of(spec) if not stages else None
        strides = (body.k, 1) if kept is None else (spec.operands[kept].strides[0], 1)
        out = Operand(name="rows", dtype=x.dtype, access="w", shape=(body.m, body.k), strides=strides)
        places = {name: first + i for i, name in enumerate(_roles(record))}
        first += len(places)
        given = [spec.operands[place] for name, place in places.items() if name != STATISTICS]
        kernel = NormKernel(
            kind=record.kind, rows=body.m, cols=body.k, eps=record.eps, has_weight=record.has_weight,
            has_bias=record.has_bias, has_residual=record.has_residual,
        )  # fmt: skip
        made = msgspec.structs.replace(spec, operands=(x, *given, out), body=kernel)
        stages.append(Stage(made, places, kept))
        x = msgspec.structs.replace(out, access="r")
    return stages


def note_of(spec: KernelSpec) -> str:
    """The equations of the norms, for a comment."""
    return ", then ".join(stage.form.note for stage in stages_of(spec))


def kept_of(spec: KernelSpec) -> int | None:
    """The place of the operand that takes the first norm's rows, in front of the result."""
    return len(spec.operands) - 2 if _linear(spec).keeps else None


def kept_codes_of(spec: KernelSpec) -> int | None:
    """The place of the operand that takes the rows of int8, in front of the result."""
    return len(spec.operands) - 2 if _linear(spec).keeps_codes else None


def _roles(record: RowNorm) -> list[str]:
    """The roles in a norm's kernel of what it reads beside x."""
    return [name.rpartition("_")[2] for name in record.names]


def _linear(spec: KernelSpec) -> LinearKernel:
    assert isinstance(spec.body, LinearKernel)
    return spec.body
