"""Mutants: a plan with one edit of a wait, a record, a copy, a launch, a stream, a device or a buffer's place.

`mutants_of(plan)` makes one for every site, in a fixed order.  What is *not* made are edits that no verifier of
schedules can know to be wrong, because the result is a sound schedule of another program:

* deleting, or exchanging the order of, steps whose buffers hold an older value that a reader would find instead
  (states, buffers written more than once);
* turning a copy to a source that holds a value at that time, or away from a target that holds one anyway;
* putting a constant onto another one of its very type and size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from planmutants.graph import (
    ALIGNMENT,
    Graph,
    aligned,
    entries_of,
    is_work,
    replace,
    restreamed,
    with_arena,
    with_buffer,
    with_steps,
)
from qcompiler.plan.plan import Buffer, Copy, DeviceSlot, Launch, Plan, Record, Step, View, Wait, WeightEntry

WEIGHT_ALIGNMENT = 256
"""Of weights that a device gathers."""


@dataclass(frozen=True)
class Mutant:
    """`kind` names the class, `site` what was edited."""

    kind: str
    site: str
    plan: Plan


Maker = Callable[[Plan], Iterator[Mutant]]


def mutants_of(plan: Plan) -> list[Mutant]:
    """Every mutant of a plan, class by class."""
    found: list[Mutant] = []
    for maker in MAKERS:
        found += maker(plan)
    return found


def _edited(plan: Plan, graph: Graph, kind: str, number: int, steps: Sequence[Step], what: str) -> Mutant:
    step = graph.steps[number]
    name = getattr(step, "event", None) or getattr(step, "kernel", None) or type(step).__name__.lower()
    site = f"{graph.entry.name} step {number} ({name} on {step.stream}): {what}"
    return Mutant(kind, site, with_steps(plan, graph.entry.name, steps))


def _graphs(plan: Plan) -> Iterator[Graph]:
    for entry in entries_of(plan):
        yield Graph(plan, entry)


def _others_on_device(graph: Graph, stream: str) -> list[str]:
    """The other streams of a stream's device, the next one first."""
    device = graph.device_of_stream[stream]
    same = [name for name, home in graph.device_of_stream.items() if home == device]
    at = same.index(stream)
    return [*same[at + 1 :], *same[:at]]


# --- waits and records -----------------------------------------------------------------------------------------------


def _waits(plan: Plan) -> Iterator[Mutant]:
    for graph in _graphs(plan):
        steps = graph.steps
        for number, step in enumerate(steps):
            if not isinstance(step, Wait):
                continue
            rest = [*steps[:number], *steps[number + 1 :]]
            yield _edited(plan, graph, "wait deleted", number, rest, "deleted")
            user = _next_work(steps, number, step.stream)
            if user is not None:
                later = [*steps[:number], *steps[number + 1 : user + 1], step, *steps[user + 1 :]]
                yield _edited(plan, graph, "wait moved", number, later, "behind its first user")
            record = max(k for k in range(number) if _records(steps[k], step.event))
            early = [*steps[:record], step, *steps[record:number], *steps[number + 1 :]]
            yield _edited(plan, graph, "wait moved", number, early, "in front of its record")
            for event in _neighbours(graph, number, step.event):
                other = [*steps[:number], replace(step, event=event), *steps[number + 1 :]]
                yield _edited(plan, graph, "wait retargeted", number, other, f"for {event}")
            for stream in _others_on_device(graph, step.stream)[:2]:
                other = [*steps[:number], restreamed(step, stream), *steps[number + 1 :]]
                yield _edited(plan, graph, "wait retargeted", number, other, f"on {stream}")


def _neighbours(graph: Graph, number: int, event: str) -> list[str]:
    """The events recorded last before the one waited for, and next after the wait."""
    order = [step.event for step in graph.steps if isinstance(step, Record)]
    at = order.index(event)
    return [*order[max(0, at - 1) : at], *order[at + 1 : at + 2]]


def _records(step: Step, event: str) -> bool:
    return isinstance(step, Record) and step.event == event


def _next_work(steps: Sequence[Step], number: int, stream: str) -> int | None:
    return next((k for k in range(number + 1, len(steps)) if is_work(steps[k]) and steps[k].stream == stream), None)


def _record_edits(plan: Plan) -> Iterator[Mutant]:
    for graph in _graphs(plan):
        steps = graph.steps
        for number, step in enumerate(steps):
            if not isinstance(step, Record):
                continue
            rest = [*steps[:number], *steps[number + 1 :]]
            yield _edited(plan, graph, "record deleted", number, rest, "deleted")
            source = max((k for k in range(number) if is_work(steps[k]) and steps[k].stream == step.stream), default=0)
            early = [*steps[:source], step, *steps[source:number], *steps[number + 1 :]]
            yield _edited(plan, graph, "record moved", number, early, "in front of what it stands for")
            first = next((k for k in range(number, len(steps)) if _waits_for(steps[k], step.event)), len(steps) - 1)
            late = [*steps[:number], *steps[number + 1 : first + 1], step, *steps[first + 1 :]]
            yield _edited(plan, graph, "record moved", number, late, "behind the first wait for it")
            for event in _neighbours(graph, number, step.event)[:1]:
                other = [*steps[:number], replace(step, event=event), *steps[number + 1 :]]
                yield _edited(plan, graph, "record retargeted", number, other, f"of {event}")
            for stream in _others_on_device(graph, step.stream)[:2]:
                other = [*steps[:number], restreamed(step, stream), *steps[number + 1 :]]
                yield _edited(plan, graph, "record retargeted", number, other, f"on {stream}")


def _waits_for(step: Step, event: str) -> bool:
    return isinstance(step, Wait) and step.event == event


# --- copies and launches ---------------------------------------------------------------------------------------------


def _is_only_value(graph: Graph, number: int, buffer: str) -> bool:
    """Whether a buffer has a value from this step alone, so that nothing older could be found there."""
    return graph.arena(buffer).kind in ("activations", "output", "init") and graph.writers(buffer) == [number]


def _written(graph: Graph, number: int) -> list[str]:
    return [buffer for buffer, access in graph.touched[number].items() if "w" in access]


def _deletions(plan: Plan) -> Iterator[Mutant]:
    for graph in _graphs(plan):
        for number, step in enumerate(graph.steps):
            if is_work(step) and all(_is_only_value(graph, number, buffer) for buffer in _written(graph, number)):
                kind = "copy deleted" if isinstance(step, Copy) else "launch deleted"
                rest = [*graph.steps[:number], *graph.steps[number + 1 :]]
                yield _edited(plan, graph, kind, number, rest, "deleted")


def _copies(plan: Plan) -> Iterator[Mutant]:
    for graph in _graphs(plan):
        for number, step in enumerate(graph.steps):
            if not isinstance(step, Copy):
                continue
            for buffer in _valueless(graph, number, step.source)[:3]:
                view = replace(step.source, buffer=buffer)
                steps = [*graph.steps[:number], replace(step, source=view), *graph.steps[number + 1 :]]
                yield _edited(plan, graph, "copy redirected", number, steps, f"from {buffer}")
            if not _is_only_value(graph, number, step.target.buffer):
                continue
            for buffer in _large_enough(graph, step.target)[:3]:
                view = replace(step.target, buffer=buffer)
                steps = [*graph.steps[:number], replace(step, target=view), *graph.steps[number + 1 :]]
                yield _edited(plan, graph, "copy redirected", number, steps, f"to {buffer}")


def _large_enough(graph: Graph, view: View) -> list[str]:
    """Activation buffers of the device that could hold a view's buffer and lie on other bytes."""
    nbytes, device = graph.buffers[view.buffer].nbytes, graph.device(view.buffer)
    there = [name for name in graph.activations() if graph.device(name) == device]
    return [name for name in there if graph.buffers[name].nbytes >= nbytes and not graph.overlap(name, view.buffer)]


def _valueless(graph: Graph, number: int, view: View) -> list[str]:
    """Of those, the ones without a value of their own before step `number`, away from the view's bytes."""
    return [
        name
        for name in _large_enough(graph, view)
        if min(graph.writers(name), default=number) >= number and not graph.overlap(name, view.buffer)
    ]


def _results(plan: Plan) -> Iterator[Mutant]:
    """What writes a result writes it elsewhere."""
    for graph in _graphs(plan):
        outputs = {sig.arena for sig in graph.entry.outputs}
        for number, step in enumerate(graph.steps):
            for buffer in _written(graph, number):
                if graph.buffers[buffer].arena not in outputs or not isinstance(step, Launch):
                    continue
                spec = next(kernel for kernel in plan.kernels if kernel.name == step.kernel)
                at = next(k for k, operand in enumerate(spec.operands) if "w" in operand.access)
                for other in _large_enough(graph, step.operands[at])[:3]:
                    views = list(step.operands)
                    views[at] = replace(views[at], buffer=other)
                    steps = [*graph.steps]
                    steps[number] = replace(step, operands=tuple(views))
                    yield _edited(plan, graph, "result redirected", number, steps, f"to {other}")


def _swaps(plan: Plan) -> Iterator[Mutant]:
    """Two steps that follow each other on a stream, the second of which reads what the first writes, or takes its
    memory, exchanged."""
    for graph in _graphs(plan):
        for first in range(len(graph.steps)):
            second = first + 1
            if second >= len(graph.steps) or not (is_work(graph.steps[first]) and is_work(graph.steps[second])):
                continue
            if graph.steps[first].stream != graph.steps[second].stream or not graph.conflict(first, second):
                continue
            shared = graph.touched[first].keys() & graph.touched[second].keys()
            through = [b for b in shared if "w" in graph.touched[first][b] + graph.touched[second][b]]
            if all(_is_only_value(graph, first, buffer) for buffer in through):
                steps = list(graph.steps)
                steps[first], steps[second] = steps[second], steps[first]
                yield _edited(plan, graph, "steps exchanged", first, steps, f"with step {second}")


# --- streams and devices ---------------------------------------------------------------------------------------------


def _streams(plan: Plan) -> Iterator[Mutant]:
    for graph in _graphs(plan):
        for number, step in enumerate(graph.steps):
            if not is_work(step):
                continue
            device = graph.device_of_stream[step.stream]
            elsewhere = [name for name, home in graph.device_of_stream.items() if home != device][:1]
            if isinstance(step, Copy) and {graph.device(v.buffer) for v in (step.source, step.target)} == {device}:
                elsewhere = []  # a copy engine of any device moves bytes within another, so it is no fault
            for stream in [*_others_on_device(graph, step.stream)[:2], *elsewhere]:
                steps = [*graph.steps[:number], restreamed(step, stream), *graph.steps[number + 1 :]]
                yield _edited(plan, graph, "stream changed", number, steps, f"to {stream}")


def _devices(plan: Plan) -> Iterator[Mutant]:
    names = [device.name for device in plan.devices]
    if len(names) == 1:
        plan = replace(plan, devices=(*plan.devices, DeviceSlot(name="spare", kind=plan.devices[0].kind, index=7)))
        names.append("spare")
    for k, stream in enumerate(plan.streams):
        for device in names:
            if device != stream.device:
                streams = (*plan.streams[:k], replace(stream, device=device), *plan.streams[k + 1 :])
                yield Mutant("device changed", f"stream {stream.name} to {device}", replace(plan, streams=streams))
    for arena in plan.arenas:
        for device in names:
            if device != arena.device:
                moved = with_arena(plan, arena.name, device=device)
                yield Mutant("device changed", f"arena {arena.name} to {device}", moved)


# --- places ----------------------------------------------------------------------------------------------------------


def _offsets(plan: Plan) -> Iterator[Mutant]:
    used = {name for graph in _graphs(plan) for touched in graph.touched for name in touched}
    arenas = {arena.name: arena for arena in plan.arenas}
    for buffer in plan.buffers:
        if buffer.name not in used:
            continue
        arena = arenas[buffer.arena]
        unit = ALIGNMENT if buffer.weight is None else WEIGHT_ALIGNMENT
        places = {
            "one unit up": buffer.offset + unit,
            "one unit down": buffer.offset - unit,
            "past the arena": aligned(arena.nbytes),
        }
        places |= {f"onto {name}": offset for name, offset in _neighbour_places(plan, buffer.name)}
        for what, offset in places.items():
            moved = with_buffer(plan, buffer.name, offset=offset)
            yield Mutant(f"{_KINDS[arena.kind]} moved", f"{buffer.name} {what} ({offset})", moved)


_KINDS = {
    "activations": "activation", "constants": "constant", "init": "init result", "state": "state", "input": "argument",
    "output": "result",
}  # fmt: skip


def _neighbour_places(plan: Plan, name: str) -> list[tuple[str, int]]:
    """Offsets of buffers in the same arena whose times of use meet, or of constants of another type or size; up to
    three of them."""
    buffers = {buffer.name: buffer for buffer in plan.buffers}
    moved = buffers[name]
    found: dict[str, int] = {}
    if any(arena.name == moved.arena and arena.kind == "constants" for arena in plan.arenas):
        own = _weight_of(plan, moved)
        for other in plan.buffers:
            weight = _weight_of(plan, other)
            if other.arena == moved.arena and weight is not None and own is not None and weight.name != own.name:
                alike = (weight.dtype, weight.nbytes) == (own.dtype, own.nbytes)
                if not alike or weight.format != own.format:
                    found[other.name] = other.offset
        return _some(sorted(found.items(), key=lambda item: abs(item[1] - moved.offset)))
    for graph in _graphs(plan):
        if not graph.users(name):
            continue
        for other in dict.fromkeys(itertools.chain.from_iterable(graph.touched)):
            there = graph.buffers[other]
            if there.arena == moved.arena and there.offset != moved.offset and not graph.apart_in_time(name, other):
                found[other] = there.offset
    return _some(list(found.items()))


def _weight_of(plan: Plan, buffer: Buffer) -> WeightEntry | None:
    """The weight that a buffer names, or that stands at its offset in the weight file."""
    for weight in plan.weights:
        if weight.name == buffer.weight if buffer.weight is not None else weight.offset == buffer.offset:
            return weight
    return None


def _some(places: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Three of them at most: the first, the last and one between."""
    return places if len(places) <= 3 else [places[0], places[len(places) // 2], places[-1]]


def _arena_sizes(plan: Plan) -> Iterator[Mutant]:
    """Arenas that end before their last buffer does."""
    for arena in plan.arenas:
        ends = [b.offset + b.nbytes for b in plan.buffers if b.arena == arena.name]
        if ends and max(ends) == arena.nbytes > 0:
            short = with_arena(plan, arena.name, nbytes=max(0, arena.nbytes - ALIGNMENT))
            yield Mutant("arena shortened", f"{arena.name} by one unit", short)


MAKERS: tuple[Maker, ...] = (
    _waits, _record_edits, _deletions, _copies, _results, _swaps, _streams, _devices, _offsets, _arena_sizes,
)  # fmt: skip


def kinds(mutants: Sequence[Mutant]) -> dict[str, int]:
    """How many of each class."""
    ordered = sorted(mutants, key=lambda mutant: mutant.kind)
    return {kind: len(list(group)) for kind, group in itertools.groupby(ordered, key=lambda mutant: mutant.kind)}
