"""The timeline of an entry point, derived from the plan: what runs on which stream, when, and what waits for what.

    shown = timeline(plan, "sm_90a", "prefill", {"s": 100})
    print(shown)                     a row for each stream
    shown.save("prefill.json")       for ui.perfetto.dev, or chrome://tracing

Times are the estimates of kernels/cost.py for a published device, as in a replayed graph, except for times in
`measured`.  Needs neither torch nor xdsl, nor any device.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qcompiler.errors import ArgumentError
from qcompiler.kernels.cost import NO_COST, Cost, DeviceCost, Occupancy, copy_cost, device_cost, launch_cost
from qcompiler.plan.dims import dim, product
from qcompiler.plan.kernel import ITEMSIZE, KernelSpec
from qcompiler.plan.lookup import PlanIndex
from qcompiler.plan.paths import joined_paths
from qcompiler.plan.plan import Copy, EntryPoint, Launch, Plan, Record, Select, Step, TorchCall, View, Wait
from qcompiler.runtime.executor import chosen_kernel, launched
from qcompiler.runtime.files import replacing

Symbols = Mapping[str, int]

_WORDS: dict[type[Step], str] = {Copy: "copy", TorchCall: "torch"}
"""Labels of steps that launch no kernel."""


@dataclass(frozen=True)
class Slice:
    """A launch or a copy: `begin` and `end` in microseconds since the entry point began.

    `alone` is the time it would take with the device to itself.
    """

    step: int
    stream: str
    begin: float
    end: float
    alone: float
    label: str
    template: str
    kernel: str
    place: str
    operands: tuple[str, ...]
    nbytes: int
    operations: int
    measured: bool = False


@dataclass(frozen=True)
class Edge:
    """A wait of one stream for another: from the slice (by number) before the record to the one after the wait."""

    event: str
    source: int
    target: int


@dataclass(frozen=True)
class Timeline:
    """An entry point at one size. `str()` is a chart, `perfetto()` a trace, `as_dict()` the figures.

    `span` is the time at which the last stream is joined; `serial` is the sum of all slices, each alone, in
    microseconds.  `critical` are the numbers of the slices on the critical path, which determine `span`.
    """

    entry: str
    symbols: dict[str, int]
    device: str
    streams: dict[str, str]
    """Stream -> device slot, in the plan's order; those that the entry point uses."""
    slices: tuple[Slice, ...]
    edges: tuple[Edge, ...]
    waits: int
    span: float
    critical: tuple[int, ...]

    @property
    def serial(self) -> float:
        return sum(each.alone for each in self.slices)

    @property
    def measured(self) -> bool:
        """Whether every slice's time was given rather than estimated."""
        return bool(self.slices) and all(each.measured for each in self.slices)

    def text(self, width: int = 120, begin: float = 0.0, end: float | None = None) -> str:
        """The chart between two times in microseconds, at most `width` columns wide (80 at least)."""
        from qcompiler.runtime.timeline_text import chart

        return chart(self, width, begin, self.span if end is None else end)

    def __str__(self) -> str:
        return self.text()

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON values; times in microseconds."""
        critical = set(self.critical)
        return {
            "entry": self.entry,
            "symbols": self.symbols,
            "estimated_for": self.device,
            "span_us": round(self.span, 3),
            "serial_us": round(self.serial, 3),
            "waits": self.waits,
            "streams": self.streams,
            "steps": [
                {**_arguments(each), "stream": each.stream, "begin_us": round(each.begin, 3),
                 "end_us": round(each.end, 3), "critical": number in critical}
                for number, each in enumerate(self.slices)
            ],
        }  # fmt: skip

    def perfetto(self) -> dict[str, Any]:
        """A trace of Chrome's trace-event format: a process for each device, a thread for each stream, an arrow for
        each wait."""
        processes = {slot: number for number, slot in enumerate(dict.fromkeys(self.streams.values()), 1)}
        threads = {stream: number for number, stream in enumerate(self.streams, 1)}

        def at(stream: str) -> dict[str, int]:
            return {"pid": processes[self.streams[stream]], "tid": threads[stream]}

        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": slot}}
            for slot, number in processes.items()
        ]
        events += [
            {"ph": "M", "name": "thread_name", **at(stream), "args": {"name": stream}} for stream in self.streams
        ]
        critical = set(self.critical)
        for number, each in enumerate(self.slices):
            events.append({
                "ph": "X", "name": each.label, "cat": each.template, **at(each.stream),
                "ts": round(each.begin, 3), "dur": round(each.end - each.begin, 3),
                "args": {**_arguments(each), "critical_path": number in critical},
            })  # fmt: skip
        for number, edge in enumerate(self.edges):
            source, target = self.slices[edge.source], self.slices[edge.target]
            common = {"name": edge.event, "cat": "wait", "id": number}
            inside = max(source.begin, source.end - 0.001)  # an arrow must begin inside its slice
            events.append({"ph": "s", **common, **at(source.stream), "ts": round(inside, 3)})
            events.append({"ph": "f", "bp": "e", **common, **at(target.stream), "ts": round(target.begin, 3)})
        what = {"entry": self.entry, "symbols": self.symbols, "times": _times(self)}
        return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": what}

    def save(self, path: str | Path) -> None:
        """Writes the trace as JSON."""
        with replacing(path) as file:
            file.write(json.dumps(self.perfetto()).encode() + b"\n")


def _times(shown: Timeline) -> str:
    return "measured" if shown.measured else f"estimated for {shown.device}, nothing measured"


def _arguments(each: Slice) -> dict[str, Any]:
    return {
        "step": each.step, "kernel": each.kernel, "template": each.template, "place": each.place,
        "operands": list(each.operands), "bytes": each.nbytes, "operations": each.operations,
        "alone_us": round(each.alone, 3), "time": "measured" if each.measured else "estimated",
    }  # fmt: skip


# --- from a plan -----------------------------------------------------------------------------------------------------


def timeline(
    plan: Plan,
    isa: str,
    entry: str | None = None,
    symbols: Symbols | None = None,
    *,
    measured: Mapping[int, float] | None = None,
) -> Timeline:
    """The timeline of an entry point ("init" too), by default of the first that takes the given sizes.

    Sizes that are not given have their largest value.  `measured` maps numbers of steps to measured microseconds; the
    other steps are estimated, for the architecture or instruction set `isa`.
    ArgumentError for an unknown entry point or symbol, or a size out of its range.
    """
    found = _entry(plan, entry, symbols or {})
    sizes = {symbol.name: symbol.max for symbol in found.symbols} | dict(symbols or {})
    return _Walk(plan, isa, found, sizes, measured or {}).run()


def _entry(plan: Plan, name: str | None, symbols: Symbols) -> EntryPoint:
    known = [*plan.entries, *([plan.init] if plan.init is not None else [])]
    if name is None:
        chosen = next((each for each in plan.entries if not _misfit(each, symbols)), plan.entries[0])
    else:
        chosen = next((each for each in known if each.name == name), known[0])
        if chosen.name != name:
            names = ", ".join(each.name for each in known)
            raise ArgumentError(f"there is no entry point '{name}'; the program has {names}")
    if misfit := _misfit(chosen, symbols):
        raise ArgumentError(f"entry point '{chosen.name}' {misfit}")
    return chosen


def _misfit(entry: EntryPoint, symbols: Symbols) -> str:
    ranges = {symbol.name: (symbol.min, symbol.max) for symbol in entry.symbols}
    for name, value in symbols.items():
        if name not in ranges:
            return f"has no dimension '{name}'; it has {', '.join(ranges) or 'none'}"
        low, high = ranges[name]
        if not low <= value <= high:
            return f"takes {name} from {low} to {high}, not {value}"
    return ""


@dataclass
class _Clock:
    """The state of a stream: when it is free, and the slice that determines this (-1: none)."""

    time: float
    cause: int


@dataclass
class _Walk:
    """Walks the steps in the plan's order, as the runtime issues them."""

    plan: Plan
    isa: str
    entry: EntryPoint
    symbols: dict[str, int]
    measured: Mapping[int, float]
    slices: list[Slice] = field(default_factory=list)
    causes: list[int] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.known = PlanIndex.of(self.plan)
        self.slot_of = {stream.name: stream.device for stream in self.plan.streams}
        self.homes: dict[str, str] = {}
        for stream in self.plan.streams:
            self.homes.setdefault(stream.device, stream.name)
        self.clocks: dict[str, _Clock] = {}
        self.events: dict[str, _Clock] = {}
        self.arriving: dict[str, list[tuple[str, int]]] = {}
        self.occupied = {slot.name: Occupancy() for slot in self.plan.devices}
        counts = Counter(kernel for each in self.plan.entries for step in each.steps for kernel in launched([step]))
        self.once = {kernel for kernel, count in counts.items() if count == 1}

    def run(self) -> Timeline:
        waits = 0
        for number, step in enumerate(self.entry.steps):
            clock = self._clock(step.stream)
            match step:
                case Record():
                    self.events[step.event] = _Clock(clock.time, clock.cause)
                case Wait():
                    waits += 1
                    self._wait(step, clock)
                case _:
                    self._work(number, step, clock)
        ends = {
            stream: clock.time + (0.0 if stream == self.homes[self.slot_of[stream]] else self._figures(stream).event)
            for stream, clock in self.clocks.items()
        }
        last = max(ends, key=lambda stream: ends[stream], default=None)
        used = {stream.name: stream.device for stream in self.plan.streams if stream.name in self.clocks}
        return Timeline(
            entry=self.entry.name,
            symbols=self.symbols,
            device=" and ".join(dict.fromkeys(self._figures(stream).name for stream in used)),
            streams=used,
            slices=tuple(self.slices),
            edges=tuple(self.edges),
            waits=waits,
            span=ends[last] if last is not None else 0.0,
            critical=self._path(self.clocks[last].cause) if last is not None else (),
        )

    def _figures(self, stream: str) -> DeviceCost:
        return device_cost(self.isa, self.known.devices[self.slot_of[stream]].kind)

    def _clock(self, stream: str) -> _Clock:
        """The clock of a stream. A new stream waits for its device's first one, where calls begin."""
        if stream not in self.clocks:
            forked = stream != self.homes[self.slot_of[stream]]
            self.clocks[stream] = _Clock(self._figures(stream).event if forked else 0.0, -1)
        return self.clocks[stream]

    def _wait(self, step: Wait, clock: _Clock) -> None:
        event = self.events[step.event]
        if event.cause >= 0:
            self.arriving.setdefault(step.stream, []).append((step.event, event.cause))
        if (time := event.time + self._figures(step.stream).event) > clock.time:
            clock.time, clock.cause = time, event.cause

    def _work(self, number: int, step: Step, clock: _Clock) -> None:
        slot = self.slot_of[step.stream]
        kernel, cost = self._cost(step)
        if cost == NO_COST:
            return  # an empty grid is not launched
        if number in self.measured:
            alone = self.measured[number]
            end = clock.time + alone
        else:
            alone = cost.span
            end = self.occupied[slot].place(clock.time, cost)
        views = (step.source, step.target) if isinstance(step, Copy) else step.operands  # type: ignore[union-attr]
        place = self._place(kernel, views)
        template = kernel.template if kernel is not None else _WORDS[type(step)]
        if isinstance(step, TorchCall):
            place = place or step.serves
        self.slices.append(Slice(
            number, step.stream, clock.time, end, alone, place.rpartition(".")[2] or template, template,
            kernel.name if kernel is not None else "", place, tuple(self._text(view) for view in views),
            cost.nbytes, cost.operations, number in self.measured,
        ))  # fmt: skip
        self.causes.append(clock.cause)
        for event, source in self.arriving.pop(step.stream, []):
            self.edges.append(Edge(event, source, len(self.slices) - 1))
        clock.time, clock.cause = end, len(self.slices) - 1

    def _cost(self, step: Step) -> tuple[KernelSpec | None, Cost]:
        figures = self._figures(step.stream)
        match step:
            case Copy():
                slots = {
                    self.known.arenas[self.known.buffers[v.buffer].arena].device for v in (step.source, step.target)
                }
                return None, copy_cost(self._nbytes(step.source), figures, crossing=len(slots) > 1)
            case Launch() | Select():
                name = step.kernel if isinstance(step, Launch) else chosen_kernel(step, self.symbols)
                spec = self.known.kernels[name]
                kind = self.known.devices[self.slot_of[step.stream]].kind
                return spec, launch_cost(spec, self.symbols, figures, self.isa, kind)
            case _:  # torch's operators have no estimate
                return None, Cost(figures.launch, 0.0)

    def _nbytes(self, view: View) -> int:
        if view.format is not None:
            return self.known.buffers[view.buffer].nbytes
        return product(view.shape).evaluate(self.symbols) * ITEMSIZE[view.dtype]

    def _place(self, kernel: KernelSpec | None, views: tuple[View, ...]) -> str:
        """The module path of the first weight that a step reads; else of the op of its kernel, if no other step
        launches that kernel."""
        for view in views:
            buffer = self.known.buffers[view.buffer]
            weight = self.known.weight_of(buffer)
            if self.known.arenas[buffer.arena].kind == "constants" and weight is not None and weight.paths:
                firsts = [part.parameters[0] for part in weight.named if part.parameters]
                return joined_paths([path.removesuffix(".weight").removesuffix(".bias") for path in firsts])
        return kernel.serves if kernel is not None and kernel.name in self.once else ""

    def _text(self, view: View) -> str:
        shape = ", ".join(str(dim(size).evaluate(self.symbols)) for size in view.shape)
        return f"{view.format.name if view.format is not None else view.dtype}[{shape}]"

    def _path(self, last: int) -> tuple[int, ...]:
        path = []
        while last >= 0:
            path.append(last)
            last = self.causes[last]
        return tuple(reversed(path))
