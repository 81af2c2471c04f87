"""The lowering of ops to kernels: one module for each kind, and tables made from these modules.

A module has the name of the kind (`qcompiler/plan/kinds`) and a `LOWERING`. A kind without a module is an error.
"""

from __future__ import annotations

from collections.abc import Mapping

from xdsl.ir import Block, Operation

from qcompiler.errors import KernelSelectionError
from qcompiler.ir.module import path_of
from qcompiler.passes.lowering.drafts import Draft, ValueMemory
from qcompiler.passes.lowering.rule import Body, Lowering, Operands, Rule
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds import KINDS, modules_of


def _lowerings() -> Mapping[str, Lowering]:
    found: dict[str, Lowering] = {}
    for kind, module in modules_of(__name__, ("LOWERING",)).items():
        lowering = module.LOWERING
        if lowering.kind is not KINDS[kind]:
            raise NotImplementedError(f"{module.__name__} makes {lowering.kind.__name__}, not {KINDS[kind].__name__}")
        found[kind] = lowering
    return found


LOWERINGS = _lowerings()
"""The lowering of each kind."""

BY_OP: dict[type[Operation], Lowering] = {op: each for each in LOWERINGS.values() for op in each.ops}

DRAFTS: dict[type[Operation], Rule] = {
    **{op: each.draft for op, each in BY_OP.items()},
    **{op: rule for each in LOWERINGS.values() for op, rule in each.written_as.items()},
}
BODIES: dict[type[Operation], Body] = {op: each.body for op, each in BY_OP.items()}

TEMPLATES: dict[type[Operation], str] = {
    op: kind for kind, each in LOWERINGS.items() for op in each.ops if op.name.startswith("qc.")
}
"""The kind that serves each `qc` op. Views and sizes need no kernel."""

FLOAT_ONLY = tuple(op for op, each in BY_OP.items() if each.only_floats)
"""Ops whose kernels accumulate in fp32."""


def draft(op: Operation, memory: ValueMemory) -> Draft:
    """The kernel draft of one compute op; KernelSelectionError names an op without a rule."""
    rule = DRAFTS.get(type(op))
    if rule is None:
        raise KernelSelectionError(f"lower-to-rt has no rule for {op.name} at '{path_of(op)}'")
    return rule(op, memory)


def spec_of(name: str, symbols: tuple[str, ...], operands: Operands, block: Block, serves: str) -> KernelSpec:
    """The spec of a kernel with the region `block`; several ops that have a template are its parts.

    KernelSelectionError names an op without a template.
    """
    compute = [op for op in block.ops if type(op) in BODIES]
    if not compute:
        names = ", ".join(op.name for op in block.ops)
        raise KernelSelectionError(f"kernel '{name}' must hold an op that has a template, it holds: {names}")
    if len(compute) > 1:
        kind = "linears" if all(BY_OP[type(op)] is LOWERINGS["linear"] for op in compute) else "parts"
        body = LOWERINGS[kind].body(block, operands, serves)
    else:
        body = BODIES[type(compute[0])](compute[0], operands, serves)
    return KernelSpec(name=name, symbols=symbols, operands=tuple(operands), body=body, serves=serves)
