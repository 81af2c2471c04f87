"""Neutral edits: a plan that says the same in another way, so that a verifier has no reason to refuse it.

What is legal is decided by `graph` alone: reachability over the steps, and whole buffers' bytes and users.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence

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
from planmutants.mutations import Mutant
from qcompiler.plan.plan import Arena, Buffer, Event, Plan, Record, Step, Stream, Wait

Maker = Callable[[Plan], Iterator[Mutant]]


def neutral_edits_of(plan: Plan) -> list[Mutant]:
    """Every neutral edit of a plan, class by class."""
    found: list[Mutant] = []
    for maker in MAKERS:
        found += maker(plan)
    return found


def _graphs(plan: Plan) -> Iterator[Graph]:
    for entry in entries_of(plan):
        yield Graph(plan, entry)


def _with_event(plan: Plan, name: str) -> Plan:
    return replace(plan, events=(*plan.events, Event(name=name)))


def _recorded_once(graph: Graph) -> set[str]:
    names = [step.event for step in graph.steps if isinstance(step, Record)]
    return {name for name in names if names.count(name) == 1}


# --- names -----------------------------------------------------------------------------------------------------------


def _renamed(plan: Plan, change: Callable[[Step], Step]) -> Plan:
    for entry in entries_of(plan):
        plan = with_steps(plan, entry.name, [change(step) for step in entry.steps])
    return plan


def _stream_names(plan: Plan, names: Mapping[str, str]) -> Plan:
    streams = tuple(replace(stream, name=names.get(stream.name, stream.name)) for stream in plan.streams)
    return _renamed(replace(plan, streams=streams), lambda step: restreamed(step, names.get(step.stream, step.stream)))


def _event_names(plan: Plan, names: Mapping[str, str]) -> Plan:
    def change(step: Step) -> Step:
        return replace(step, event=names.get(step.event, step.event)) if isinstance(step, Record | Wait) else step

    events = tuple(replace(event, name=names.get(event.name, event.name)) for event in plan.events)
    return _renamed(replace(plan, events=events), change)


def _names(plan: Plan) -> Iterator[Mutant]:
    for stream in plan.streams:
        yield Mutant("stream renamed", stream.name, _stream_names(plan, {stream.name: "another"}))
    order = list(range(len(plan.streams)))
    random.Random(0).shuffle(order)
    yield Mutant("stream renumbered", "all", replace(plan, streams=tuple(plan.streams[k] for k in order)))
    numbers = {stream.name: f"s{k}" for k, stream in enumerate(reversed(plan.streams))}
    yield Mutant("stream renumbered", "all, by new names", _stream_names(plan, numbers))
    for event in plan.events:
        yield Mutant("event renamed", event.name, _event_names(plan, {event.name: "another"}))
    if plan.events:
        turned = [event.name for event in plan.events[1:] + plan.events[:1]]
        names = dict(zip([event.name for event in plan.events], turned, strict=True))
        yield Mutant("event renamed", "all, in a ring", _event_names(plan, names))


def _declarations(plan: Plan) -> Iterator[Mutant]:
    yield Mutant("declared in vain", "an event", _with_event(plan, "unused"))
    for device in plan.devices:
        streams = (Stream(name="unused", device=device.name), *plan.streams)
        yield Mutant("declared in vain", f"a stream of {device.name}", replace(plan, streams=streams))
        arena = Arena(name="unused", device=device.name, kind="activations", nbytes=640, entry=plan.entries[0].name)
        buffer = Buffer(name="unused", arena="unused", offset=128, nbytes=512)
        more = replace(plan, arenas=(*plan.arenas, arena), buffers=(*plan.buffers, buffer))
        yield Mutant("declared in vain", f"an arena of {device.name}", more)
    buffers = list(plan.buffers)
    random.Random(0).shuffle(buffers)
    yield Mutant("declared in vain", "buffers in another order", replace(plan, buffers=tuple(buffers)))


# --- more order than needed ------------------------------------------------------------------------------------------


def _waits(plan: Plan) -> Iterator[Mutant]:
    """More waits, earlier waits, later records: all of them only add order."""
    streams = [stream.name for stream in plan.streams]
    for graph in _graphs(plan):
        once, steps, name = _recorded_once(graph), graph.steps, graph.entry.name
        draw = random.Random(name)
        for number, step in enumerate(steps):
            if isinstance(step, Record) and step.event in once:
                stream, at = draw.choice(streams), draw.randint(number + 1, len(steps))
                more = [*steps[:at], Wait(stream=stream, event=step.event), *steps[at:]]
                yield Mutant("wait added", f"{name}: {step.event} on {stream} at {at}", with_steps(plan, name, more))
                first = next((k for k in range(number, len(steps)) if _waits_for(steps[k], step.event)), None)
                if first is not None:
                    late = [*steps[:number], *steps[number + 1 : first], step, *steps[first:]]
                    yield Mutant("record moved later", f"{name} step {number}", with_steps(plan, name, late))
            if isinstance(step, Wait) and step.event in once:
                record = next(k for k in range(number) if _records(steps[k], step.event))
                early = [*steps[: record + 1], step, *steps[record + 1 : number], *steps[number + 1 :]]
                yield Mutant("wait moved earlier", f"{name} step {number}", with_steps(plan, name, early))
                twice = [*steps[:number], step, *steps[number:]]
                yield Mutant("wait added", f"{name} step {number}: twice", with_steps(plan, name, twice))
            if is_work(step):
                more = [*steps[: number + 1], Record(stream=step.stream, event="unused"), *steps[number + 1 :]]
                edited = with_steps(_with_event(plan, "unused"), name, more)
                yield Mutant("record added", f"{name} behind step {number}", edited)


def _waits_for(step: Step, event: str) -> bool:
    return isinstance(step, Wait) and step.event == event


def _records(step: Step, event: str) -> bool:
    return isinstance(step, Record) and step.event == event


def _merged_streams(plan: Plan) -> Iterator[Mutant]:
    """All steps of two streams of a device on one of them, in the order of the list."""
    for first in plan.streams:
        for second in plan.streams:
            if first.name != second.name and first.device == second.device:

                def change(step: Step, old: str = second.name, new: str = first.name) -> Step:
                    return restreamed(step, new) if step.stream == old else step

                yield Mutant("streams merged", f"{second.name} into {first.name}", _renamed(plan, change))


# --- the same order, said otherwise ----------------------------------------------------------------------------------


def _lists(plan: Plan) -> Iterator[Mutant]:
    """Independent neighbours exchanged; whole lists in another order that streams and events allow."""
    for graph in _graphs(plan):
        steps, name = graph.steps, graph.entry.name
        for number in range(len(steps) - 1):
            if _exchangeable(graph, number):
                swapped = [*steps[:number], steps[number + 1], steps[number], *steps[number + 2 :]]
                yield Mutant("independent exchanged", f"{name} step {number}", with_steps(plan, name, swapped))
        for seed in range(4):
            order = _another_order(graph, random.Random(seed))
            if order != list(range(len(steps))):
                other = with_steps(plan, name, [steps[k] for k in order])
                yield Mutant("list reordered", f"{name} with seed {seed}", other)


def _exchangeable(graph: Graph, number: int) -> bool:
    first, second = graph.steps[number], graph.steps[number + 1]
    if graph.conflict(number, number + 1):
        return False
    if is_work(first) and is_work(second):
        return True
    if first.stream == second.stream:
        return isinstance(first, Record) and isinstance(second, Record) and first.event != second.event
    return getattr(first, "event", "") != getattr(second, "event", " ")


def _another_order(graph: Graph, draw: random.Random) -> list[int]:
    """A random list order in which steps of a stream, and steps with one event, keep theirs."""
    chains: dict[str, list[int]] = {}
    for number, step in enumerate(graph.steps):
        chains.setdefault(f"stream {step.stream}", []).append(number)
        if isinstance(step, Record | Wait):
            chains.setdefault(f"event {step.event}", []).append(number)
    left = set(range(len(graph.steps)))
    heads = dict.fromkeys(chains, 0)
    order: list[int] = []
    while left:
        ready = [
            number for number in sorted(left)
            if all(chain[heads[key]] == number for key, chain in chains.items() if number in chain)
        ]  # fmt: skip
        number = draw.choice(ready)
        left.remove(number)
        order.append(number)
        for key, chain in chains.items():
            if number in chain:
                heads[key] += 1 if heads[key] + 1 < len(chain) else 0
    return order


def _split_streams(plan: Plan) -> Iterator[Mutant]:
    """From some step on, the steps of a stream go on a new one, behind an event."""
    for graph in _graphs(plan):
        for stream in plan.streams:
            own = [number for number, step in enumerate(graph.steps) if step.stream == stream.name]
            for cut in own[1:]:
                tail = [restreamed(s, "more") if s.stream == stream.name else s for s in graph.steps[cut:]]
                bridge = [Record(stream=stream.name, event="bridge"), Wait(stream="more", event="bridge")]
                edited = with_steps(plan, graph.entry.name, [*graph.steps[:cut], *bridge, *tail])
                streams = (*plan.streams, Stream(name="more", device=stream.device))
                edited = replace(_with_event(edited, "bridge"), streams=streams)
                yield Mutant("stream split", f"{graph.entry.name}: {stream.name} at step {cut}", edited)


def _reused_events(plan: Plan) -> Iterator[Mutant]:
    """A later record takes an earlier one's event, all uses of which come before it."""
    for graph in _graphs(plan):
        once, steps = sorted(_recorded_once(graph)), graph.steps
        uses = {
            event: [k for k, step in enumerate(steps) if isinstance(step, Record | Wait) and step.event == event]
            for event in once
        }
        for first in once:
            for second in once:
                if first != second and all(graph.precedes(use, uses[second][0]) for use in uses[first]):
                    taken = [replace(step, event=first) if k in uses[second] else step for k, step in enumerate(steps)]
                    site = f"{graph.entry.name}: {first} for {second}"
                    yield Mutant("event reused", site, with_steps(plan, graph.entry.name, taken))


# --- places ----------------------------------------------------------------------------------------------------------


def _slides(plan: Plan) -> Iterator[Mutant]:
    """Everything in an arena from some offset on lies further on, and the arena is larger by as much."""
    for arena in plan.arenas:
        if arena.kind not in ("activations", "init"):
            continue
        offsets = sorted({buffer.offset for buffer in plan.buffers if buffer.arena == arena.name})
        for start in offsets:
            for by in (ALIGNMENT, 5 * ALIGNMENT):
                buffers = tuple(
                    replace(b, offset=b.offset + by) if b.arena == arena.name and b.offset >= start else b
                    for b in plan.buffers
                )
                larger = with_arena(replace(plan, buffers=buffers), arena.name, nbytes=arena.nbytes + by)
                yield Mutant("arena slid", f"{arena.name} from {start} by {by}", larger)


def _holes(plan: Plan) -> Iterator[Mutant]:
    """A buffer where nothing else is alive meanwhile: inside its arena, or at the end of a larger one."""
    for graph in _graphs(plan):
        for name in graph.activations():
            buffer, arena = graph.buffers[name], graph.arena(name)
            inside = [
                offset for offset in range(0, arena.nbytes - buffer.nbytes + 1, ALIGNMENT)
                if offset != buffer.offset and graph.fits(name, offset)
            ]  # fmt: skip
            for offset in _spread_out(inside, 3):
                yield Mutant("moved into a hole", f"{name} to {offset}", with_buffer(plan, name, offset=offset))
            end = aligned(arena.nbytes)
            larger = with_arena(plan, arena.name, nbytes=end + buffer.nbytes)
            yield Mutant("moved into a hole", f"{name} behind all others", with_buffer(larger, name, offset=end))


def _spread_out(offsets: Sequence[int], count: int) -> list[int]:
    """The first, the last and some between."""
    if len(offsets) <= count:
        return list(offsets)
    return [offsets[k * (len(offsets) - 1) // (count - 1)] for k in range(count)]


MAKERS: tuple[Maker, ...] = (
    _names, _declarations, _waits, _merged_streams, _lists, _split_streams, _reused_events, _slides, _holes,
)  # fmt: skip
