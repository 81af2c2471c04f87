"""What each step of an entry point has to do, the least time that a machine takes for it, and the estimate.

The bytes, the operations and the estimate are those of kernels/cost.py.  On a CPU the estimate is that of this machine:
the model with the measured bandwidth and rates in place of published ones.  The least time is the longer of two: the
bytes over the bandwidth, and the operations over the rate of the arithmetic that the kernel uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec

from qcompiler.kernels import cost
from qcompiler.kernels.cpu import attention_bf16, attention_decode
from qcompiler.kernels.cpu.linear import multiplies_bf16
from qcompiler.kernels.cuda.emit import engine_and_geometry
from qcompiler.plan.dims import product
from qcompiler.plan.kernel import ITEMSIZE, KernelSpec
from qcompiler.plan.kinds.attention import AttentionKernel
from qcompiler.plan.kinds.grouped_linear import GroupedLinearKernel
from qcompiler.plan.kinds.linear import LinearKernel
from qcompiler.plan.kinds.linears import LinearsKernel
from qcompiler.plan.lookup import PlanIndex
from qcompiler.plan.plan import Copy, EntryPoint, Launch, Plan, Select, Step
from qcompiler.runtime.executor import chosen_kernel
from qcompiler.runtime.limits import Arithmetic, Limits, Machine


@dataclass(frozen=True)
class StepCost:
    """`limit_us` is the least time that the machine's limits allow, which `limited_by` ("bytes", or the arithmetic)
    sets. All of it is None or empty where it is not known: the work of torch, attention over a cache, and limits that
    were not measured."""

    nbytes: int = 0
    operations: int = 0
    arithmetic: str = ""
    limit_us: float | None = None
    limited_by: str = ""
    estimate_us: float | None = None


UNKNOWN = StepCost()


def step_costs(
    plan: Plan, entry: EntryPoint, symbols: Mapping[str, int], isa: str, machine: Machine | None
) -> dict[int, StepCost]:
    """The cost of each launch and copy at these sizes, by the number of its step."""
    known = PlanIndex.of(plan)
    found: dict[int, StepCost] = {}
    for number, step in enumerate(entry.steps):
        if isinstance(step, Launch | Select | Copy):
            found[number] = _cost(step, known, dict(symbols), isa, machine)
    return found


def _cost(step: Step, known: PlanIndex, symbols: dict[str, int], isa: str, machine: Machine | None) -> StepCost:
    assert isinstance(step, Launch | Select | Copy)
    kind = known.devices[known.streams[step.stream].device].kind
    if isinstance(step, Copy):
        slots = {known.arenas[known.buffers[view.buffer].arena].device for view in (step.source, step.target)}
        nbytes = _nbytes(step, known, symbols)
        figures = _device(isa, kind, machine, "fp32")
        estimate = cost.copy_cost(nbytes, figures, crossing=len(slots) > 1).span
        moved = nbytes if len(slots) > 1 else 2 * nbytes
        limit, by = _limit(machine if len(slots) == 1 else None, "fp32", 0, moved)
        return StepCost(moved, 0, "", limit, by, estimate)
    name = step.kernel if isinstance(step, Launch) else chosen_kernel(step, symbols)
    spec = known.kernels[name]
    used = arithmetic_of(spec, isa, kind, machine.limits if machine is not None else None)
    if isinstance(spec.body, AttentionKernel) and spec.body.last:
        return StepCost(arithmetic=used)  # the positions of the call decide how many keys it reads
    found = cost.launch_cost(spec, symbols, _device(isa, kind, machine, used), isa, kind)
    limit, by = _limit(machine, used, found.operations, found.nbytes)
    return StepCost(found.nbytes, found.operations, used, limit, by, found.span)


def _nbytes(step: Copy, known: PlanIndex, symbols: dict[str, int]) -> int:
    view = step.source
    if view.format is not None:
        return known.buffers[view.buffer].nbytes
    return product(view.shape).evaluate(symbols) * ITEMSIZE[view.dtype]


def _limit(machine: Machine | None, kind: str, operations: int, nbytes: int) -> tuple[float | None, str]:
    """The least microseconds, and what takes them."""
    if machine is None:
        return None, ""
    seconds, by = machine.limits.bound(kind, operations, nbytes)
    return seconds * 1e6, by


def _device(isa: str, kind: str, machine: Machine | None, used: str) -> cost.DeviceCost:
    """The figures that estimates use: a GPU's published ones, this CPU's measured ones."""
    figures = cost.device_cost(isa, kind)
    if kind != "cpu" or machine is None:
        return figures
    limits = machine.limits
    rate = getattr(limits, used) or limits.fp32
    return replace(figures, name=machine.name, bandwidth=limits.bandwidth / 1e6, fp32=rate / 1e6)


_FASTEST_FIRST: tuple[Arithmetic, ...] = ("int8", "bf16", "fp32")


def arithmetic_of(spec: KernelSpec, isa: str, kind: str, limits: Limits | None) -> Arithmetic:
    """The arithmetic in which a kernel does its products: what its rate is compared with.

    Linears and experts multiply codes, pairs of bf16 numbers where the processor does (`limits` tells), or fp32. So
    does attention, without the codes. Sums over a row's experts are of products in fp32. Everything else on a CPU
    computes in fp32. On a GPU "bf16" are the tensor cores, and "int8" those on codes. A launch of several linears
    counts as the fastest of them, which keeps the least time a least one.
    """
    body = spec.body
    if isinstance(body, LinearsKernel):
        each = [msgspec.structs.replace(spec, body=linear, operands=own) for linear, own in body.shares(spec.operands)]
        found = {arithmetic_of(alone, isa, kind, limits) for alone in each}
        return next(used for used in _FASTEST_FIRST if used in found)
    if isinstance(body, LinearKernel | GroupedLinearKernel) and body.codes:
        return "int8"
    if kind != "cpu":
        return "bf16" if engine_and_geometry(spec, isa)[0] == "mma" else "fp32"
    if limits is not None and limits.bf16 is None:
        return "fp32"
    if isinstance(body, AttentionKernel):
        pairs = attends_in_bf16(body, isa)
    else:
        products = isinstance(body, LinearKernel) or (isinstance(body, GroupedLinearKernel) and not body.top)
        pairs = products and multiplies_bf16(spec, isa)
    return "bf16" if pairs else "fp32"


def attends_in_bf16(body: AttentionKernel, isa: str) -> bool:
    """Whether attention multiplies pairs of bf16 numbers. One query of few heads does not: it reads keys in place."""
    decodes_in_place = attention_decode.fits(body) and not attention_decode.Sizes(body, isa).packs
    return attention_bf16.chosen(body, isa) and not decodes_in_place


__all__ = ["UNKNOWN", "StepCost", "arithmetic_of", "step_costs"]
