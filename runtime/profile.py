"""The measured times of an entry point at one size: what each launch took, and what it could take.

    found = program.profile(x)          or: qc bench model.qca --profile
    print(found)                        the tables
    found.by_module(), found.by_kernel(), found.steps
    found.to_json(), found.to_perfetto(), found.svg()

`profile_cpu.py` and `profile_device.py` measure.  docs/profile.md explains each figure, and is the schema of the JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from qcompiler.errors import ArgumentError
from qcompiler.plan.paths import joined_parts, joined_paths
from qcompiler.runtime.files import replacing
from qcompiler.runtime.profile_svg import DEEPEST, flame
from qcompiler.runtime.profile_text import tables
from qcompiler.runtime.step_seconds import Setting, StepSeconds

if TYPE_CHECKING:
    from qcompiler.runtime.limits import Machine  # loads the emitter of the CPU's kernels

SCHEMA = 1
"""Grows when a field of `to_json` changes its meaning or goes away."""

PRODUCTS = ("linear", "linears", "grouped_linear", "batch_matmul")
"""Kinds of kernel that are matrix products; convolutions are linears. An epilogue is part of the product's time."""
WITH_PRODUCTS = ("attention", "join_attention", "linear_attention", "recurrent")
"""Kinds with products inside, whose time is for other things as well, and what joins them. They are counted apart."""
OTHER_KINDS = (
    "argmax", "dequantize_cache", "embedding", "gather", "hadamard", "index_update", "loop", "norm", "order", "parts",
    "quantize_cache", "quantize_rows", "route", "sample", "scan", "scatter", "softmax", "top_p",
)  # fmt: skip
"""All other kinds. A convolution of one channel in a group is a loop, and so is a product that no kernel of products
takes."""

By = Literal["module", "kernel"]


@dataclass(frozen=True)
class StepProfile:
    """One launch, copy or torch call; times are medians over the rounds, in microseconds.

    `step` is its number in the entry point, and `id` names it in the program.  `regions` counts the parallel regions
    that a step opens on the CPU, `tasks` their tasks; a step without a region runs on the calling thread alone.
    `task_us` is the time of all tasks on all threads.  `late` (on a GPU): the host submitted the launch too late in
    every round, so that `us` has waiting for the host in it.
    """

    step: int
    kind: str
    kernel: str
    us: float
    regions: int = 0
    tasks: int = 0
    task_us: float = 0.0
    id: str = ""
    stream: str = ""
    begin_us: float = 0.0
    paths: tuple[str, ...] = ()
    path_from: str = ""
    nbytes: int = 0
    operations: int = 0
    arithmetic: str = ""
    limit_us: float | None = None
    limited_by: str = ""
    estimate_us: float | None = None
    late: bool = False

    @property
    def place(self) -> str:
        """The module paths as one."""
        return joined_paths(self.paths) if self.paths else ""

    @property
    def frames(self) -> tuple[str, ...]:
        """The parts of the module path that all paths share, then what differs as one."""
        return joined_parts(self.paths) if self.paths else ()

    @property
    def of_limit(self) -> float | None:
        """The share of the machine's limit: 1 is as fast as bytes or operations allow. Above 1 if the bytes came from
        caches, which are faster than the memory that was measured."""
        return None if self.limit_us is None or not self.us else self.limit_us / self.us

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "paths": list(self.paths), "of_limit": self.of_limit}


@dataclass(frozen=True)
class KindProfile:
    """All steps of one kind of kernel."""

    kind: str
    launches: int
    regions: int
    tasks: int
    us: float
    share: float
    """The share of the whole call's time."""


@dataclass(frozen=True)
class GroupProfile:
    """Steps that belong together: those of a module, or of a kernel.

    `limit_us` and `estimate_us` add up the steps that have one, and `known_us` those steps' time. `eager_us` is torch's
    own time in these modules; None without a measurement of torch, or if it has none of these modules.
    """

    name: str
    launches: int
    us: float
    share: float
    """The share of the time in steps."""
    nbytes: int
    operations: int
    limit_us: float | None
    estimate_us: float | None
    known_us: float
    eager_us: float | None = None

    @property
    def of_limit(self) -> float | None:
        return None if self.limit_us is None or not self.known_us else self.limit_us / self.known_us

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "of_limit": self.of_limit}


@dataclass(frozen=True)
class EagerTimes:
    """Eager torch on the same input: `us` for the whole call, and each module's own microseconds (without those of the
    modules inside of it) by path. `note` says how it was measured."""

    us: float
    modules: Mapping[str, float]
    note: str


@dataclass(frozen=True)
class Profile:
    """An entry point at one size. Medians of whole runs: `call_us` is a call from Python, `entry_us` the steps as every
    call runs them, `round_us` the steps timed one by one."""

    entry: str
    symbols: dict[str, int]
    threads: int
    rounds: int
    call_us: float
    entry_us: float
    round_us: float
    steps: tuple[StepProfile, ...]
    device: str = "cpu"
    isa: str = ""
    machine: Machine | None = None
    machine_missing: str = ""
    """Why there are no limits of the machine."""
    notes: tuple[str, ...] = ()
    """What a reader of the times has to know."""
    eager: EagerTimes | None = None
    eager_missing: str = "give the float model: profile(…, eager=model), or qc bench --model package.module:function"
    streams: Mapping[str, str] = field(default_factory=dict)
    """Stream -> device."""

    @property
    def steps_us(self) -> float:
        """The sum of the steps' medians. Well below `round_us` if other work interrupts whole runs, since most single
        steps still run undisturbed."""
        return sum(step.us for step in self.steps)

    @property
    def outside_us(self) -> float:
        """The part of a call that no step accounts for: binding arguments, allocating results, calling from Python."""
        return self.call_us - self.steps_us

    @property
    def timing_us(self) -> float:
        """The steps one by one less the untimed run of the same steps: what timing costs, less what overlaps. Negative
        if more time lies between the steps than timing adds."""
        return self.round_us - self.entry_us

    @property
    def not_product(self) -> float:
        """The share of the time in steps that is not matrix products; attention and recurrences are in it."""
        return 1 - self._share_of(PRODUCTS) if self.steps_us else 0.0

    @property
    def with_products(self) -> float:
        """The share of the time in steps of kinds that have products inside: attention and recurrences."""
        return self._share_of(WITH_PRODUCTS)

    def _share_of(self, kinds: Sequence[str]) -> float:
        us = sum(step.us for step in self.steps if step.kind in kinds)
        return us / self.steps_us if self.steps_us else 0.0

    def beside(self, eager: EagerTimes) -> Profile:
        """The same with a measurement of eager torch (qcompiler/inspect/eager.py)."""
        return replace(self, eager=eager)

    # --- groups ---

    def kinds(self) -> list[KindProfile]:
        """The kinds of kernel, by falling time."""
        found = []
        for kind in dict.fromkeys(step.kind for step in self.steps):
            own = [step for step in self.steps if step.kind == kind]
            us = sum(step.us for step in own)
            regions, tasks = (sum(getattr(step, name) for step in own) for name in ("regions", "tasks"))
            found.append(KindProfile(kind, len(own), regions, tasks, us, us / self.call_us))
        return sorted(found, key=lambda each: -each.us)

    def by_kernel(self) -> list[GroupProfile]:
        """The kernels, by falling time. Copies and torch calls are a group each."""
        return self._groups(lambda step: step.kernel or step.kind, with_eager=False)

    def by_module(self, *, layers: bool = True) -> list[GroupProfile]:
        """The modules, by falling time; "" has the steps whose module is not known. Launches that serve the same
        several modules are one row. Without `layers`, equal modules of all layers are one row: `layers.*.mlp.up`."""
        if layers:
            return self._groups(lambda step: step.place, with_eager=True)
        folded = folding(path for step in self.steps for path in step.paths)

        def name_of(step: StepProfile) -> str:
            paths = list(dict.fromkeys(folded[path] for path in step.paths))
            return joined_paths(paths) if paths else ""

        return self._groups(name_of, with_eager=True)

    def _groups(self, name_of: Callable[[StepProfile], str], *, with_eager: bool) -> list[GroupProfile]:
        members: dict[str, list[StepProfile]] = {}
        for step in self.steps:
            members.setdefault(name_of(step), []).append(step)
        total = self.steps_us or 1.0
        found = []
        for name, own in members.items():
            us, known = sum(step.us for step in own), [step for step in own if step.limit_us is not None]
            found.append(GroupProfile(
                name, len(own), us, us / total, sum(step.nbytes for step in own),
                sum(step.operations for step in own), _sum(step.limit_us for step in own),
                _sum(step.estimate_us for step in own), sum(step.us for step in known),
                self._eager_of(own) if with_eager else None,
            ))  # fmt: skip
        return sorted(found, key=lambda each: -each.us)

    def _eager_of(self, steps: Sequence[StepProfile]) -> float | None:
        """torch's own time in the modules of these steps, each module once."""
        paths = dict.fromkeys(path for step in steps for path in step.paths)
        if self.eager is None or not paths or not paths.keys() <= self.eager.modules.keys():
            return None
        return sum(self.eager.modules[path] for path in paths)

    # --- as text and files ---

    def table(self, *, by: By | Literal["step"] = "module", most: int | None = None) -> str:
        """A table by module, kernel or step, the slowest first (steps in their order), at most `most` rows long."""
        return tables(self, by, most)

    def __str__(self) -> str:
        return tables(self)

    def svg(self, *, by: By = "module") -> str:
        """A flame-like chart: width is time, and each row divides the one above, by module or by kernel."""
        if by not in ("module", "kernel"):
            raise ArgumentError(f"by={by!r}: a chart is by 'module' or by 'kernel'")
        return flame(self, by)

    @property
    def measured_on(self) -> str:
        """The device in words: it is also read elsewhere, where "this CPU" means nothing."""
        if self.device == "cpu":
            return f"a CPU ({self.isa}), {self.threads} thread{'s' * (self.threads != 1)}"
        return f"{self.device} (simulated)" if self.device.startswith("sim:") else f"{self.device} ({self.isa})"

    def seconds(self) -> StepSeconds:
        """Each step's time in seconds, by its id; `.settings` has the device and the sizes."""
        on = f"{self.measured_on}, medians of {self.rounds} rounds"
        return StepSeconds({step.id: step.us / 1e6 for step in self.steps}, {self.entry: Setting(on, self.symbols)})

    def measured(self) -> dict[int, float]:
        """Microseconds by the number of the step, as `timeline(measured=)` takes them."""
        return {step.step: step.us for step in self.steps}

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON values; times in microseconds. docs/profile.md has the schema."""
        return {
            "profile_schema": SCHEMA, "entry": self.entry, "symbols": self.symbols, "device": self.device,
            "isa": self.isa, "threads": self.threads, "rounds": self.rounds, "call_us": self.call_us,
            "entry_us": self.entry_us, "round_us": self.round_us, "steps_us": self.steps_us,
            "outside_us": self.outside_us, "timing_us": self.timing_us, "not_product": self.not_product,
            "with_products": self.with_products,
            "machine": None if self.machine is None else asdict(self.machine),
            "machine_missing": self.machine_missing, "notes": list(self.notes),
            "eager": None if self.eager is None else {**asdict(self.eager), "modules": dict(self.eager.modules)},
            "eager_missing": "" if self.eager is not None else self.eager_missing,
            "kinds": [asdict(each) for each in self.kinds()],
            "modules": [each.as_dict() for each in self.by_module()],
            "kernels": [each.as_dict() for each in self.by_kernel()],
            "steps": [each.as_dict() for each in self.steps],
        }  # fmt: skip

    def to_json(self) -> str:
        """`as_dict` as text."""
        return json.dumps(self.as_dict(), indent=1)

    def to_perfetto(self) -> dict[str, Any]:
        """A trace of Chrome's trace-event format: a process for each device, a thread for each stream, and a slice for
        each step at its measured time, with all of its figures."""
        streams = dict(self.streams) or {"cpu": self.device}
        processes = {device: number for number, device in enumerate(dict.fromkeys(streams.values()), 1)}
        threads = {stream: number for number, stream in enumerate(streams, 1)}
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": device}}
            for device, number in processes.items()
        ]
        at = {stream: {"pid": processes[device], "tid": threads[stream]} for stream, device in streams.items()}
        events += [{"ph": "M", "name": "thread_name", **at[each], "args": {"name": each}} for each in streams]
        for step in self.steps:
            name = step.frames[-1] if step.frames else step.kind
            events.append({
                "ph": "X", "name": name, "cat": step.kind, **at[step.stream or next(iter(streams))],
                "ts": round(step.begin_us, 3), "dur": round(step.us, 3), "args": step.as_dict(),
            })  # fmt: skip
        what = {"entry": self.entry, "symbols": self.symbols, "device": self.device, "times": "measured"}
        return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": what}

    def save(self, path: str | Path) -> None:
        """Writes a chart by module (.svg) or a trace for Perfetto (.json)."""
        path = Path(path)
        if path.suffix not in (".svg", ".json"):
            raise ArgumentError(f"{path}: name a .svg file for the chart, or a .json file for a trace")
        text = self.svg() if path.suffix == ".svg" else json.dumps(self.to_perfetto()) + "\n"
        with replacing(path) as file:
            file.write(text.encode())


def folding(places: Iterable[str]) -> dict[str, str]:
    """Paths with `*` in the place of the number of a layer: `model.layers.3.mlp` -> `model.layers.*.mlp`.

    A number counts the layers if something follows it, in this path or in another one. The 0 of `head.0`, a part of a
    Sequential, stays, and so do numbers behind the first DEEPEST parts.
    """
    all_parts = {place: place.split(".", DEEPEST) for place in places}
    layered = {tuple(p[:n]) for p in all_parts.values() for n in range(len(p) - 1) if p[n].isdigit()}
    return {
        place: ".".join("*" if part.isdigit() and tuple(p[:n]) in layered else part for n, part in enumerate(p))
        for place, p in all_parts.items()
    }


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


__all__ = [
    "OTHER_KINDS", "PRODUCTS", "WITH_PRODUCTS", "EagerTimes", "GroupProfile", "KindProfile", "Profile", "StepProfile",
    "folding",
]  # fmt: skip
