"""The linears of one launch, as kernels of their own."""

from __future__ import annotations

import itertools

from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.linears import LinearsKernel


def linear_specs(spec: KernelSpec) -> tuple[KernelSpec, ...]:
    """The spec of each linear of a launch that has passed its contract; their names are that of the launch and a
    number."""
    assert isinstance(spec.body, LinearsKernel)
    return tuple(
        KernelSpec(f"{spec.name}_linear{number}", spec.symbols, operands, body, spec.serves)
        for number, (body, operands) in enumerate(spec.body.shares(spec.operands))
    )


def places(specs: tuple[KernelSpec, ...]) -> list[range]:
    """The places of each linear's operands among those of the launch."""
    ends = [0]
    for spec in specs:
        ends.append(ends[-1] + len(spec.operands))
    return [range(begin, end) for begin, end in itertools.pairwise(ends)]
