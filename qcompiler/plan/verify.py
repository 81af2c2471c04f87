"""The schedule verifier: decides whether a plan is safe to run. It does not trust the compiler that made the plan.

    verify_plan(plan)                          # raises ScheduleError(rule=…) at the first broken rule
    verify_plan(plan, captured=("decode",))    # also applies the rules for CUDA-graph capture to these entries

The order of the rules is that of docs/schedule.md: names, devices, arenas and buffers, weights, kernels, symbols,
views, ordering, memory, outputs, capture. Every symbolic size is checked over the whole range of its symbols. The
executor provides the inputs, states, constants and init results before an entry starts, and joins all streams at its
end.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping

from qcompiler.errors import ScheduleError
from qcompiler.plan.dims import Dim, dim, product
from qcompiler.plan.equations import plan_equations
from qcompiler.plan.kernel import ITEMSIZE, KernelSpec
from qcompiler.plan.lookup import PlanIndex, unique
from qcompiler.plan.moved import check_moved
from qcompiler.plan.plan import Arena, Buffer, EntryPoint, Plan, Symbol, initial_weight
from qcompiler.plan.sizes import LARGEST_SIZE
from qcompiler.plan.verify_steps import EntryVerifier, InitWritten
from qcompiler.plan.view_regions import is_packed

BUFFER_ALIGNMENT = 64
"""In bytes: one cache line, and the widest vector load."""

WEIGHT_ALIGNMENT = 256
"""In bytes: what CUDA's allocators guarantee. So a weight has the same alignment in the file and on a device."""

MOST_STREAMS = 256
"""The most streams of a plan. A program uses a few per device; the clocks' memory and time grow with the square of
their number."""

LARGEST_SYMBOL = 1 << 40
"""The largest maximum of a symbol. A larger one means that there is none: torch writes an unbounded dimension as
2**63 - 2."""


def verify_plan(plan: Plan, captured: Collection[str] = ()) -> None:
    """ScheduleError unless the plan is safe. It has the rule's name, the entry, the step and the way out.

    `captured` names the entries that will be recorded as CUDA graphs.
    """
    program = PlanIndex.of(plan)
    _check_declarations(program)
    _check_weights(program)
    for spec in plan.kernels:
        _check_kernel(spec)
    init_written: InitWritten = {}
    truths: dict[str, bool] = {}
    if plan.init is not None:
        _check_init(plan.init)
        init_written = EntryVerifier(program, plan.init, is_init=True, init_written={}, truths=truths).run()
    for entry in plan.entries:
        _check_symbols(entry)
        EntryVerifier(
            program, entry, is_init=False, init_written=init_written, truths=truths, is_captured=entry.name in captured
        ).run()
    _check_initial_states(program, truths)
    for name in captured:
        if name not in {entry.name for entry in plan.entries}:
            raise ScheduleError(f"the entry '{name}' that is to be captured is not in the plan", rule="unknown-entry")


# --- devices, arenas, buffers ----------------------------------------------------------------------------------------


def _check_declarations(program: PlanIndex) -> None:
    plan = program.plan
    entries = {entry.name for entry in plan.entries} | ({plan.init.name} if plan.init is not None else set())
    slots: dict[tuple[str, int], str] = {}
    for device in plan.devices:
        other = slots.setdefault((device.kind, device.index), device.name)
        if other != device.name:
            raise ScheduleError(
                f"the devices '{other}' and '{device.name}' are both {device.kind}:{device.index}; number them apart",
                rule="duplicate-device",
            )
    for stream in plan.streams:
        if stream.device not in program.devices:
            raise ScheduleError(
                f"stream '{stream.name}' belongs to device '{stream.device}', which the plan does not declare",
                rule="unknown-device",
            )
    for arena in plan.arenas:
        _check_arena(program, arena, entries)
    placed: dict[str, list[Buffer]] = {}
    for buffer in plan.buffers:
        _check_buffer(program, buffer)
        placed.setdefault(buffer.arena, []).append(buffer)
    if len(plan.streams) > MOST_STREAMS:
        raise ScheduleError(
            f"the plan declares {len(plan.streams)} streams; at most {MOST_STREAMS} are taken", rule="too-many-streams"
        )
    for name, buffers in placed.items():
        if program.arenas[name].kind != "activations":
            _check_apart(program.arenas[name], buffers)


def _check_arena(program: PlanIndex, arena: Arena, entries: Collection[str]) -> None:
    if arena.device not in program.devices:
        raise ScheduleError(
            f"arena '{arena.name}' lies on device '{arena.device}', which the plan does not declare",
            rule="unknown-device",
        )
    if not 0 <= arena.nbytes <= LARGEST_SIZE:
        raise ScheduleError(
            f"arena '{arena.name}' has {arena.nbytes} bytes; it may have 0 to {LARGEST_SIZE} (2**53)", rule="arena-size"
        )
    if arena.entry is not None and arena.entry not in entries:
        raise ScheduleError(
            f"arena '{arena.name}' belongs to the entry '{arena.entry}', which the plan does not have",
            rule="unknown-entry",
        )
    if arena.kind in ("input", "output") and arena.entry is None:
        raise ScheduleError(
            f"arena '{arena.name}' is an {arena.kind} of no entry; name the entry it belongs to", rule="unknown-entry"
        )


def _check_buffer(program: PlanIndex, buffer: Buffer) -> None:
    if buffer.arena not in program.arenas:
        raise ScheduleError(
            f"buffer '{buffer.name}' lies in arena '{buffer.arena}', which the plan does not declare",
            rule="unknown-arena",
        )
    arena = program.arenas[buffer.arena]
    if buffer.offset < 0 or buffer.nbytes < 0:
        raise ScheduleError(
            f"buffer '{buffer.name}' has offset {buffer.offset} and {buffer.nbytes} bytes; neither may be negative",
            rule="negative-offset",
        )
    if buffer.offset % BUFFER_ALIGNMENT:
        raise ScheduleError(
            f"buffer '{buffer.name}' has offset {buffer.offset}, which is not a multiple of {BUFFER_ALIGNMENT}",
            rule="misaligned-buffer",
        )
    if buffer.weight is not None:
        _check_named_weight(program, buffer, arena)
    if buffer.offset + buffer.nbytes > arena.nbytes:
        raise ScheduleError(
            f"buffer '{buffer.name}' ends at byte {buffer.offset + buffer.nbytes} of arena '{arena.name}', which has "
            f"{arena.nbytes}; enlarge the arena or move the buffer",
            rule="buffer-outside-arena",
        )


def _check_named_weight(program: PlanIndex, buffer: Buffer, arena: Arena) -> None:
    """ScheduleError unless a buffer that names a weight lies in a constants arena, holds the weight and is aligned."""
    weight = program.weight_of(buffer)
    if arena.kind != "constants" or weight is None or weight.nbytes > buffer.nbytes:
        raise ScheduleError(
            f"buffer '{buffer.name}' of the {arena.kind} arena '{arena.name}' names the weight '{buffer.weight}', "
            "which is not in the directory, has more bytes, or belongs in an arena of constants",
            rule="unknown-weight",
        )
    if buffer.offset % WEIGHT_ALIGNMENT:
        raise ScheduleError(
            f"buffer '{buffer.name}' holds a weight at offset {buffer.offset}, which is not a multiple of "
            f"{WEIGHT_ALIGNMENT}",
            rule="misaligned-weight",
        )


def _check_apart(arena: Arena, buffers: list[Buffer]) -> None:
    """ScheduleError if two buffers overlap. Contents outside activation arenas stay, so these buffers share no
    bytes."""
    ordered = sorted((buffer for buffer in buffers if buffer.nbytes), key=lambda buffer: buffer.offset)
    for first, second in itertools.pairwise(ordered):
        if first.offset + first.nbytes > second.offset:
            raise ScheduleError(
                f"the buffers '{first.name}' and '{second.name}' overlap in arena '{arena.name}' ({arena.kind}), whose "
                "contents stay; place them apart",
                rule="buffer-overlap",
            )


def _check_weights(program: PlanIndex) -> None:
    _check_constants(program)
    check_moved(program.plan)
    gathered = {buffer.weight for buffer in program.plan.buffers}
    constants = [arena for arena in program.plan.arenas if arena.kind == "constants"]
    end, last = 0, None
    for weight in sorted(program.plan.weights, key=lambda w: w.offset):
        if weight.offset < 0 or weight.nbytes < 0 or min(weight.shape, default=0) < 0:
            raise ScheduleError(
                f"weight '{weight.name}' has offset {weight.offset}, {weight.nbytes} bytes and the shape "
                f"{list(weight.shape)}; none may be negative",
                rule="negative-offset",
            )
        if weight.offset % WEIGHT_ALIGNMENT:
            raise ScheduleError(
                f"weight '{weight.name}' has offset {weight.offset}, which is not a multiple of {WEIGHT_ALIGNMENT}",
                rule="misaligned-weight",
            )
        if weight.offset < end and last is not None:
            raise ScheduleError(
                f"the weights '{last.name}' and '{weight.name}' overlap at byte {weight.offset}", rule="weight-overlap"
            )
        end, last = weight.offset + weight.nbytes, weight
        if weight.name not in gathered and not any(end <= arena.nbytes for arena in constants):
            raise ScheduleError(
                f"weight '{weight.name}' ends at byte {end}, outside every constants arena", rule="weight-outside-arena"
            )
        rows = [part.rows for part in weight.parts]
        if rows and (min(rows) < 1 or weight.parameters or not weight.shape or sum(rows) != weight.shape[0]):
            raise ScheduleError(
                f"weight '{weight.name}' has the shape {list(weight.shape)} and parts of {rows} rows; parts are "
                "its rows from the first to the last, and they alone name what those were in the model",
                rule="weight-size",
            )
        if weight.format is None and weight.layout == "canonical":
            wanted = _count(weight.shape) * ITEMSIZE[weight.dtype]
            if weight.nbytes != wanted:
                raise ScheduleError(
                    f"weight '{weight.name}' has {weight.nbytes} bytes, its shape {weight.shape} of {weight.dtype} "
                    f"needs {wanted}",
                    rule="weight-size",
                )


def _check_constants(program: PlanIndex) -> None:
    """ScheduleError unless a constants arena has a weight named by each of its buffers, or mirrors the weight file."""
    naming = {buffer.arena for buffer in program.plan.buffers if buffer.weight is not None}
    for buffer in program.plan.buffers:
        if buffer.arena in naming and buffer.weight is None:
            raise ScheduleError(
                f"buffer '{buffer.name}' names no weight, and others of its arena '{buffer.arena}' do: what stands "
                "there is not what stands in the file",
                rule="unknown-weight",
            )
    end = max((weight.offset + weight.nbytes for weight in program.plan.weights), default=0)
    for arena in program.plan.arenas:
        if naming and arena.kind == "constants" and arena.name not in naming and arena.nbytes > end:
            raise ScheduleError(
                f"arena '{arena.name}' is the weight file's first {arena.nbytes} bytes, which has {end}",
                rule="weight-outside-arena",
            )


def _count(shape: tuple[int, ...]) -> int:
    return product(shape).value


# --- kernels and symbols ---------------------------------------------------------------------------------------------


def _check_kernel(spec: KernelSpec) -> None:
    """ScheduleError unless the operands are well formed and use only the kernel's symbols."""
    unique(f"symbol of kernel '{spec.name}'", spec.symbols)
    known = set(spec.symbols)
    for operand in spec.operands:
        if is_packed(operand) and operand.strides:
            raise ScheduleError(
                f"the packed operand '{operand.name}' of kernel '{spec.name}' has strides; its layout decides where "
                "values lie",
                rule="view-rank",
            )
        if not is_packed(operand) and len(operand.shape) != len(operand.strides):
            raise ScheduleError(
                f"operand '{operand.name}' of kernel '{spec.name}' has rank {len(operand.shape)} but "
                f"{len(operand.strides)} strides",
                rule="view-rank",
            )
        unknown = _symbols((*operand.shape, *operand.strides)) - known
        if unknown:
            raise ScheduleError(
                f"operand '{operand.name}' of kernel '{spec.name}' uses the symbol '{min(unknown)}', which the kernel "
                "does not take",
                rule="unbound-symbol",
            )


def _symbols(dims: tuple[Dim, ...]) -> set[str]:
    found: set[str] = set()
    for each in dims:
        if not isinstance(each, int):
            found |= dim(each).symbols()
    return found


def _check_init(init: EntryPoint) -> None:
    """ScheduleError if init has a signature: it runs once, at load, without arguments and results."""
    if init.inputs or init.outputs or init.symbols:
        raise ScheduleError(
            f"the init entry '{init.name}' has {len(init.inputs)} inputs, {len(init.outputs)} outputs and "
            f"{len(init.symbols)} symbols; it may have none: its results are init arenas",
            rule="init-signature",
        )


def _check_initial_states(program: PlanIndex, truths: Mapping[str, bool]) -> None:
    """ScheduleError unless a state of truth values has truth values as its initial weight, and no other state has."""
    for buffer in program.plan.buffers:
        weight = program.named_weights.get(initial_weight(buffer.arena))
        if program.arenas[buffer.arena].kind != "state" or weight is None or buffer.name not in truths:
            continue
        if (weight.dtype == "i1") != truths[buffer.name]:
            raise ScheduleError(
                f"the state '{buffer.arena}' begins as values of {weight.dtype}, and views of its buffer "
                f"'{buffer.name}' are {'i1' if truths[buffer.name] else 'of other types than i1'}",
                rule="truth-values",
            )


def _check_symbols(entry: EntryPoint) -> None:
    """ScheduleError unless every symbol has a valid range and the inputs' shapes determine it."""
    unique(f"symbol of entry '{entry.name}'", (symbol.name for symbol in entry.symbols))
    _, determined = plan_equations([sig.shape for sig in entry.inputs])
    for symbol in entry.symbols:
        _check_range(entry, symbol)
        if symbol.name not in determined:
            raise ScheduleError(
                f"entry '{entry.name}': no input has a dimension that would give the symbol '{symbol.name}' its value",
                rule="unbound-symbol",
            )


def _check_range(entry: EntryPoint, symbol: Symbol) -> None:
    if symbol.min > symbol.max or symbol.min < 0:
        raise ScheduleError(
            f"entry '{entry.name}': the range of '{symbol.name}' is {symbol.min} to {symbol.max}", rule="inverted-range"
        )
    if symbol.max > LARGEST_SYMBOL:
        raise ScheduleError(
            f"entry '{entry.name}': '{symbol.name}' has no real maximum ({symbol.max}); give the dimension a maximum",
            rule="unbounded-symbol",
        )
