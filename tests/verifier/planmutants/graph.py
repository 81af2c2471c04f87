"""Who touches what, and what comes before what: by reachability in a graph of steps, and by whole buffers.

This is what makes mutants and neutral edits; it shares no code with the verifier.  Steps are numbered as in the list.
A step precedes another if a path leads there along streams and from records to the waits for them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from qcompiler.plan.plan import (
    Arena,
    Buffer,
    Copy,
    EntryPoint,
    Event,
    Launch,
    Plan,
    Record,
    Select,
    Step,
    Stream,
    View,
    Wait,
)

replace = msgspec.structs.replace
ALIGNMENT = 64


def entries_of(plan: Plan) -> tuple[EntryPoint, ...]:
    """All entry points, `init` last."""
    return (*plan.entries, *(() if plan.init is None else (plan.init,)))


def with_steps(plan: Plan, name: str, steps: Iterable[Step]) -> Plan:
    """The plan with other steps in the entry of that name."""
    steps = tuple(steps)
    if plan.init is not None and plan.init.name == name:
        return replace(plan, init=replace(plan.init, steps=steps))
    return replace(
        plan, entries=tuple(replace(entry, steps=steps) if entry.name == name else entry for entry in plan.entries)
    )


def with_buffer(plan: Plan, name: str, **changes: object) -> Plan:
    """The plan with one buffer changed."""
    return replace(plan, buffers=tuple(replace(b, **changes) if b.name == name else b for b in plan.buffers))


def with_arena(plan: Plan, name: str, **changes: object) -> Plan:
    """The plan with one arena changed."""
    return replace(plan, arenas=tuple(replace(a, **changes) if a.name == name else a for a in plan.arenas))


def is_work(step: Step) -> bool:
    """Launches, selects and copies: what does something."""
    return not isinstance(step, Record | Wait)


def restreamed(step: Step, stream: str) -> Step:
    return replace(step, stream=stream)


class Graph:
    """One entry point of a plan: its accesses, and the transitive closure of its order."""

    def __init__(self, plan: Plan, entry: EntryPoint) -> None:
        self.plan = plan
        self.entry = entry
        self.steps = entry.steps
        self.buffers: dict[str, Buffer] = {buffer.name: buffer for buffer in plan.buffers}
        self.arenas: dict[str, Arena] = {arena.name: arena for arena in plan.arenas}
        self.device_of_stream = {stream.name: stream.device for stream in plan.streams}
        self.touched = [dict(touches(plan, step)) for step in self.steps]
        self.after = _closure(self.steps)

    def precedes(self, first: int, second: int) -> bool:
        return bool(self.after[first] >> second & 1)

    def ordered(self, first: int, second: int) -> bool:
        return self.precedes(first, second) or self.precedes(second, first)

    def users(self, buffer: str) -> list[int]:
        """Steps that touch a buffer."""
        return [number for number, touched in enumerate(self.touched) if buffer in touched]

    def writers(self, buffer: str) -> list[int]:
        return [number for number, touched in enumerate(self.touched) if "w" in touched.get(buffer, "")]

    def arena(self, buffer: str) -> Arena:
        return self.arenas[self.buffers[buffer].arena]

    def device(self, buffer: str) -> str:
        return self.arena(buffer).device

    def conflict(self, first: int, second: int) -> bool:
        """Whether two steps touch the same bytes, one of them at least by a write."""
        return any(
            ("w" in a or "w" in b) and self.overlap(x, y)
            for (x, a), (y, b) in itertools.product(self.touched[first].items(), self.touched[second].items())
        )

    def overlap(self, x: str, y: str) -> bool:
        """Whether two buffers have a byte in common."""
        a, b = self.buffers[x], self.buffers[y]
        return a.arena == b.arena and overlaps(a.offset, a.nbytes, b.offset, b.nbytes)

    def activations(self) -> list[str]:
        """Buffers of the entry's activation arenas that it uses, in the order of their first use."""
        names = dict.fromkeys(itertools.chain.from_iterable(self.touched))
        return [name for name in names if self.arena(name).kind == "activations"]

    def fits(self, buffer: str, offset: int, others: Iterable[str] | None = None) -> bool:
        """Whether a buffer may lie at an offset: every buffer that it then overlaps is either over before it begins, or
        begins after it is over, at every use of the two."""
        moved = self.buffers[buffer]
        for name in self.activations() if others is None else others:
            other = self.buffers[name]
            if name == buffer or other.arena != moved.arena:
                continue
            if overlaps(offset, moved.nbytes, other.offset, other.nbytes) and not self.apart_in_time(buffer, name):
                return False
        return True

    def apart_in_time(self, x: str, y: str) -> bool:
        """Whether all uses of one buffer precede all uses of another one."""
        pairs = list(itertools.product(self.users(x), self.users(y)))
        return all(self.precedes(i, j) for i, j in pairs) or all(self.precedes(j, i) for i, j in pairs)


def overlaps(a: int, a_bytes: int, b: int, b_bytes: int) -> bool:
    return a < b + b_bytes and b < a + a_bytes and a_bytes > 0 and b_bytes > 0


def _closure(steps: Sequence[Step]) -> list[int]:
    """For each step the set of steps behind it, as the bits of a number."""
    edges: list[list[int]] = [[] for _ in steps]
    last: dict[str, int] = {}
    recorded: dict[str, int] = {}
    for number, step in enumerate(steps):
        if step.stream in last:
            edges[last[step.stream]].append(number)
        last[step.stream] = number
        if isinstance(step, Record):
            recorded[step.event] = number
        if isinstance(step, Wait) and step.event in recorded:
            edges[recorded[step.event]].append(number)
    after = [0] * len(steps)
    for number in reversed(range(len(steps))):
        for behind in edges[number]:
            after[number] |= after[behind] | 1 << behind
    return after


def touches(plan: Plan, step: Step) -> Iterator[tuple[str, str]]:
    """Buffers of a step with "r", "w" or "rw"; a buffer comes once."""
    found: dict[str, set[str]] = {}
    for view, access in accesses(plan, step):
        found.setdefault(view.buffer, set()).update(access)
    for buffer, letters in found.items():
        yield buffer, "".join(sorted(letters))


def accesses(plan: Plan, step: Step) -> list[tuple[View, str]]:
    """The views of a step with their accesses."""
    if isinstance(step, Copy):
        return [(step.source, "r"), (step.target, "w")]
    kernels = {kernel.name: kernel for kernel in plan.kernels}
    if isinstance(step, Launch):
        return [(v, str(o.access)) for v, o in zip(step.operands, kernels[step.kernel].operands, strict=True)]
    if isinstance(step, Select):
        specs = [kernels[case.kernel] for case in step.cases]
        columns = zip(*(spec.operands for spec in specs), strict=True)
        return [
            (view, "".join(sorted({letter for operand in operands for letter in operand.access})))
            for view, operands in zip(step.operands, columns, strict=True)
        ]
    return []


# --- denser schedules ------------------------------------------------------------------------------------------------


def spread_with_new_memory(plan: Plan) -> Plan:
    """`spread` of the plan with every activation on bytes of its own, which then are shared as that order permits."""
    plan = spread(_apart(plan))
    for entry in entries_of(plan):
        plan = _packed(plan, entry)
    return plan


def spread(plan: Plan, streams: int = 3) -> Plan:
    """The same work on `streams` streams of each device, in turns, with an event for each dependence that no path
    expresses yet: of a read on a write, and of a write on earlier users of the same memory."""
    names: dict[str, list[str]] = {}
    for device in plan.devices:
        names[device.name] = [f"{device.name}.lane{k}" for k in range(streams)]
    plan = replace(
        plan, streams=tuple(Stream(name=name, device=device) for device, each in names.items() for name in each)
    )
    events = 0
    for entry in entries_of(plan):
        turn = dict.fromkeys(names, 0)
        lanes: list[Step] = []
        for step in filter(is_work, entry.steps):
            device = _device_of(plan, step)
            lanes.append(restreamed(step, names[device][turn[device] % streams]))
            turn[device] += 1
        steps = _ordered(plan, replace(entry, steps=tuple(lanes)))
        plan = with_steps(plan, entry.name, steps)
        events = max(events, sum(isinstance(step, Record) for step in steps))
    return replace(plan, events=tuple(Event(name=f"x{number}") for number in range(events)))


def _device_of(plan: Plan, step: Step) -> str:
    """A launch's device; a copy's is its target's."""
    arenas = {arena.name: arena.device for arena in plan.arenas}
    places = {buffer.name: arenas[buffer.arena] for buffer in plan.buffers}
    return places[accesses(plan, step)[-1][0].buffer]


def _apart(plan: Plan) -> Plan:
    """Every activation buffer on bytes of its own."""
    ends: dict[str, int] = {}
    kinds = {arena.name: arena.kind for arena in plan.arenas}
    buffers = []
    for buffer in plan.buffers:
        if kinds[buffer.arena] == "activations":
            start = ends.get(buffer.arena, 0)
            ends[buffer.arena] = aligned(start + buffer.nbytes)
            buffers.append(replace(buffer, offset=start))
        else:
            buffers.append(buffer)
    arenas = tuple(replace(arena, nbytes=ends.get(arena.name, arena.nbytes)) for arena in plan.arenas)
    return replace(plan, buffers=tuple(buffers), arenas=arenas)


def _ordered(plan: Plan, entry: EntryPoint) -> list[Step]:
    """Records and waits for all dependences between streams, but for those that earlier ones already express."""
    graph = Graph(plan, entry)
    known: list[int] = []  # what precedes each step, as bits
    on_stream: dict[str, int] = {}
    waits: dict[int, list[int]] = {}
    for number, step in enumerate(entry.steps):
        before = 0
        if step.stream in on_stream:
            earlier = on_stream[step.stream]
            before = known[earlier] | 1 << earlier
        for earlier in reversed(range(number)):
            if not before >> earlier & 1 and graph.conflict(earlier, number):
                waits.setdefault(number, []).append(earlier)
                before |= known[earlier] | 1 << earlier
        known.append(before)
        on_stream[step.stream] = number
    recorded = sorted({earlier for each in waits.values() for earlier in each})
    event = {earlier: f"x{k}" for k, earlier in enumerate(recorded)}
    steps: list[Step] = []
    for number, step in enumerate(entry.steps):
        steps += [Wait(stream=step.stream, event=event[earlier]) for earlier in waits.get(number, ())]
        steps.append(step)
        if number in event:
            steps.append(Record(stream=step.stream, event=event[number]))
    return steps


def _packed(plan: Plan, entry: EntryPoint) -> Plan:
    """Activation buffers share bytes where one is over before the other begins: each at the first offset that fits."""
    graph = Graph(plan, entry)
    placed: list[str] = []
    for name in graph.activations():
        buffer = graph.buffers[name]
        ends = [0, *(aligned(graph.buffers[n].offset + graph.buffers[n].nbytes)
                     for n in placed if graph.buffers[n].arena == buffer.arena)]  # fmt: skip
        offset = next(end for end in sorted(set(ends)) if graph.fits(name, end, placed))
        graph.buffers[name] = replace(buffer, offset=offset)
        placed.append(name)
    plan = replace(plan, buffers=tuple(graph.buffers[buffer.name] for buffer in plan.buffers))
    for arena in {graph.buffers[name].arena for name in placed}:
        end = max(graph.buffers[name].offset + graph.buffers[name].nbytes for name in placed
                  if graph.buffers[name].arena == arena)  # fmt: skip
        plan = with_arena(plan, arena, nbytes=end)
    return plan


def aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
