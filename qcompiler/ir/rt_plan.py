"""Converts an `rt` module to a plan and back.

The caller gives `plan_from_rt` the kernels' specs (`emit-kernels` makes them). Before that pass, `skeleton_kernels`
provides specs with the true operands and an empty body, which is all that the schedule verifier reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation

from qcompiler.errors import ScheduleError
from qcompiler.ir.rt import ArenaOp, BufferOp, DeviceOp, EntryOp, EventOp, KernelOp, StreamOp
from qcompiler.ir.rt_schedule import Schedule
from qcompiler.plan.kernel import KernelSpec, ScalarProgram
from qcompiler.plan.kinds.loop import LoopKernel
from qcompiler.plan.moved import Moved, record
from qcompiler.plan.plan import Buffer, Plan, WeightEntry
from qcompiler.plan.weights import StoredTensor, file_offsets

_EMPTY_BODY = LoopKernel(extents=(), iterators=(), accesses=(), body=ScalarProgram(inputs=(), ops=(), yields=()))


def skeleton_kernels(module: ModuleOp) -> dict[str, KernelSpec]:
    """A spec for every `rt.kernel`: its name, symbols, operands and `serves`, with an empty body."""
    return {
        op.sym: KernelSpec(
            name=op.sym,
            symbols=op.symbol_names,
            operands=op.operand_records,
            body=_EMPTY_BODY,
            serves=op.serves_text,
        )
        for op in module.body.block.ops
        if isinstance(op, KernelOp)
    }


def plan_from_rt(
    module: ModuleOp,
    kernels: Mapping[str, KernelSpec],
    weights: Iterable[StoredTensor] = (),
    moved: Moved | None = None,
) -> Plan:
    """The plan of an rt module: kernels in the module's order, the weight directory in the store's.

    `moved` is the store's record of moved parameters, of which the plan keeps those that it stores.

    A step without a stream keeps an empty one, which the verifier refuses. ScheduleError for a buffer without an
    offset, a kernel without a spec, two init entries, or a buffer whose weight is not in `weights` (unless `weights` is
    empty: then the plan has no directory).
    """
    schedule = Schedule(module)
    missing = [name for name in schedule.kernels if name not in kernels]
    if missing:
        raise ScheduleError(f"kernel '{missing[0]}' has no KernelSpec; run emit-kernels", rule="unknown-kernel")
    entries = [op for op in schedule.entries.values() if not op.is_init]
    inits = [op for op in schedule.entries.values() if op.is_init]
    if len(inits) > 1:
        names = ", ".join(op.sym for op in inits)
        raise ScheduleError(f"a plan has one init entry, the module has {len(inits)}: {names}", rule="duplicate-name")
    directory = weight_entries(schedule, weights)
    return Plan(
        devices=tuple(op.record for op in schedule.devices.values()),
        streams=tuple(op.record for op in schedule.streams.values()),
        events=tuple(op.record for op in schedule.events.values()),
        arenas=tuple(op.record for op in schedule.arenas.values()),
        buffers=buffers(schedule),
        kernels=tuple(kernels[name] for name in schedule.kernels),
        entries=tuple(op.record for op in entries),
        init=inits[0].record if inits else None,
        weights=directory,
        moved=record(moved, {path for entry in directory for path in entry.paths}),
    )


def buffers(schedule: Schedule) -> tuple[Buffer, ...]:
    """All buffers; those of gathered arenas with the weight they hold."""
    return tuple(
        msgspec.structs.replace(op.record, weight=op.weight.data)
        if op.weight is not None and schedule.arenas[op.arena_name].gathered is not None
        else op.record
        for op in schedule.buffers.values()
    )


def weight_entries(schedule: Schedule, weights: Iterable[StoredTensor]) -> tuple[WeightEntry, ...]:
    """The weight directory: every stored tensor that some buffer holds, at that buffer's offset, without digests.

    If arenas gather their weights, the file's order is that of the store.
    """
    tensors = {tensor.key: tensor for tensor in weights}
    offsets: dict[str, int] = {}
    used: set[str] = set()
    for buffer in schedule.buffers.values():
        key = buffer.weight.data if buffer.weight is not None else None
        if key is None or not tensors:
            continue
        if key not in tensors:
            raise ScheduleError(
                f"buffer '{buffer.sym}' holds the weight '{key}', which the weight store does not have",
                rule="unknown-weight",
            )
        offset = buffer.record.offset
        used.add(key)
        if schedule.arenas[buffer.arena_name].gathered is not None:
            continue
        if offsets.setdefault(key, offset) != offset:
            raise ScheduleError(
                f"the weight '{key}' has the offset {offsets[key]} in one arena and {offset} in another "
                f"(buffer '{buffer.sym}'); constants arenas mirror one file",
                rule="weight-offset",
            )
    if used != offsets.keys():
        offsets = file_offsets(tensors.values(), used)
    return tuple(
        WeightEntry(
            name=tensor.key,
            dtype=tensor.dtype,
            shape=tensor.shape,
            offset=offsets[tensor.key],
            nbytes=tensor.nbytes,
            format=tensor.format,
            layout=tensor.layout,
            parameters=tensor.parameters,
            parts=tensor.parts,
        )
        for tensor in tensors.values()
        if tensor.key in offsets
    )


def rt_from_plan(plan: Plan) -> ModuleOp:
    """The rt module of a plan: everything but the kernels' regions."""
    constants = {arena.name for arena in plan.arenas if arena.kind == "constants"}
    gathered = {buffer.arena for buffer in plan.buffers if buffer.weight is not None}
    at = {weight.offset: weight.name for weight in plan.weights}
    ops: list[Operation] = [DeviceOp.of(device) for device in plan.devices]
    ops += [StreamOp.of(stream) for stream in plan.streams]
    ops += [EventOp.of(event) for event in plan.events]
    ops += [ArenaOp.of(arena, gathered=arena.name in gathered) for arena in plan.arenas]
    ops += [BufferOp.of(b, b.weight or (at.get(b.offset) if b.arena in constants else None)) for b in plan.buffers]
    ops += [KernelOp(k.name, k.symbols, k.operands, serves=k.serves) for k in plan.kernels]
    if plan.init is not None:
        ops.append(EntryOp.of(plan.init, is_init=True))
    ops += [EntryOp.of(entry) for entry in plan.entries]
    return ModuleOp(ops)
