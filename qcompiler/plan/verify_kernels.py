"""Checks that each kernel touches only the elements of its operands, and writes its results in full.

`verify_plan` proves that every view lies in its buffer, and assumes that a kernel writes all of a "w" operand. This
module checks each kernel against its contract (contracts.py, loop_contract.py, parts_contract.py), at all sizes that an
entry point launches it with. So an untrusted plan cannot make a kernel read or write elsewhere, or leave bytes
unwritten.
"""

from __future__ import annotations

from collections.abc import Iterator

from qcompiler.errors import DimError, PlanError
from qcompiler.plan.contracts import check_alignment, check_sizes, check_spec, contract_of
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.loop import LoopKernel
from qcompiler.plan.kinds.parts import PartsKernel
from qcompiler.plan.loop_contract import check_loop, check_loop_sizes
from qcompiler.plan.parts_contract import check_parts, check_parts_sizes
from qcompiler.plan.plan import EntryPoint, Launch, Plan, Select
from qcompiler.plan.sizes import Ranges


def check_kernels(plan: Plan) -> None:
    """PlanError if a kernel breaks its contract. It names the kernel and the entry point with those sizes."""
    specs = {spec.name: spec for spec in plan.kernels}
    for spec in plan.kernels:
        check_contract(spec)
    aligned = {spec.name: _aligned_places(spec) for spec in plan.kernels}
    entries = (*plan.entries, *((plan.init,) if plan.init is not None else ()))
    arenas = {arena.name: arena for arena in plan.arenas}
    buffers = {buffer.name: buffer for buffer in plan.buffers}
    seen: set[tuple[str, tuple[tuple[str, int, int], ...]]] = set()
    for entry in entries:
        ranges = {symbol.name: (symbol.min, symbol.max) for symbol in entry.symbols}
        for name, step in _launches(entry):
            spec = specs[name]
            key = name, tuple((symbol, *ranges[symbol]) for symbol in spec.symbols)
            try:
                if key not in seen:
                    seen.add(key)
                    _check_sizes(spec, {symbol: ranges[symbol] for symbol in spec.symbols})
                for place in aligned[name]:
                    view = step.operands[place]
                    check_alignment(spec, place, view.offset)
                    if arenas[buffers[view.buffer].arena].kind in ("input", "output"):
                        raise PlanError(
                            f"kernel '{name}' in entry point '{entry.name}': '{spec.operands[place].name}' must begin "
                            "at a multiple of more bytes than the caller's arrays do; give it a buffer of the program's"
                        )
            except DimError as error:
                raise PlanError(f"kernel '{name}' in entry point '{entry.name}': {error}") from error


def check_contract(spec: KernelSpec) -> None:
    """PlanError unless the operands fit the contract of the kernel's kind. This needs no sizes."""
    try:
        if isinstance(spec.body, LoopKernel):
            check_loop(spec)
        elif isinstance(spec.body, PartsKernel):
            check_parts(spec)
        else:
            check_spec(spec)
    except DimError as error:
        raise PlanError(f"kernel '{spec.name}': {error}") from error


def _check_sizes(spec: KernelSpec, ranges: Ranges) -> None:
    if isinstance(spec.body, LoopKernel):
        check_loop_sizes(spec, ranges)
    elif isinstance(spec.body, PartsKernel):
        check_parts_sizes(spec, ranges)
    else:
        check_sizes(spec, ranges)


def _aligned_places(spec: KernelSpec) -> tuple[int, ...]:
    """The positions of the operands whose rows need a larger alignment than that of one element."""
    if isinstance(spec.body, LoopKernel | PartsKernel):
        return ()
    return tuple(place for place, role in enumerate(contract_of(spec).roles) if role.align > 1)


def _launches(entry: EntryPoint) -> Iterator[tuple[str, Launch | Select]]:
    for step in entry.steps:
        match step:
            case Launch():
                yield step.kernel, step
            case Select():
                for case in step.cases:
                    yield case.kernel, step
