"""The plan: what a program does, step by step, with every launch, copy and wait naming its device and its stream.

A plan is the whole program apart from the bytes of its weights.  It is strict JSON, it is printed one to one as the
`rt` dialect, and `plan.verify` decides whether it is safe to run.  Memory is a set of *arenas* (contiguous ranges on
one device); a *buffer* is a fixed range of an arena; an operand is a strided *view* of a buffer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from qcompiler.errors import PlanError
from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel import DType, FormatRef, KernelSpec, Strict
from qcompiler.plan.torch_regions import TorchRegion

PLAN_VERSION = 1


class Symbol(Strict, frozen=True):
    """A named dimension with its inclusive range."""

    name: str
    min: int
    max: int


class DeviceSlot(Strict, frozen=True):
    """A device the plan was made for. The loader maps slots to real devices; `kind` must match, `index` may differ."""

    name: str
    kind: Literal["cpu", "cuda", "sim"]
    index: int = 0


class Stream(Strict, frozen=True):
    name: str
    device: str


class Event(Strict, frozen=True):
    name: str


ArenaKind = Literal["constants", "init", "activations", "state", "input", "output"]


class Arena(Strict, frozen=True):
    """A contiguous range of memory on one device.

    `constants` hold bytes of the weight file (shared, read-only): all of it, or, in a program for several devices,
    the weights that its buffers name; `init` what `@init` computes once at load (shared,
    read-only afterwards); `activations` scratch of one session; `state` one declared state of a session, which begins
    as its `initial_weight`, or as zeros if there is no weight of that name; `input` and
    `output` one argument or result each (the caller's memory on the CPU, without a copy).  `nbytes` is the size at the
    entry's maximum.  `entry` names the entry point that an activation, input or output arena belongs to.
    """

    name: str
    device: str
    kind: ArenaKind
    nbytes: int
    entry: str | None = None


def initial_weight(state_arena: str) -> str:
    """The name of the weight that holds what a state arena begins as. No parameter of a model has a colon."""
    return f"initial:{state_arena}"


class Buffer(Strict, frozen=True):
    """A range of an arena. `offset` and `nbytes` (at the bucket's maximum) are in bytes, `offset` a multiple of 64.

    `weight`, in a constants arena, names the weight that it holds, wherever that stands in the weight file; a buffer
    that names none holds the weight that has its offset there.
    """

    name: str
    arena: str
    offset: int
    nbytes: int
    weight: str | None = None


class View(Strict, frozen=True):
    """A strided tensor in a buffer. `offset` counts elements from the buffer's start. A packed weight has
    `format`/`layout`, the logical (rows, cols) as shape, and no strides."""

    buffer: str
    dtype: DType
    shape: tuple[Dim, ...]
    strides: tuple[Dim, ...] = ()
    offset: Dim = 0
    format: FormatRef | None = None
    layout: str | None = None


class Launch(Strict, frozen=True, tag="launch"):
    """Run `kernel` on `stream` with one view per operand of its spec."""

    kernel: str
    stream: str
    operands: tuple[View, ...]


class SelectCase(Strict, frozen=True):
    """Taken when the select's expression is <= `max` (None: always)."""

    max: int | None
    kernel: str


class Select(Strict, frozen=True, tag="select"):
    """One launch whose kernel is chosen by the value of a shape expression: the first case that fits."""

    on: Dim
    cases: tuple[SelectCase, ...]
    stream: str
    operands: tuple[View, ...]


def taken(cases: Iterable[SelectCase], value: int) -> SelectCase | None:
    """The first case that takes this value of the select's expression."""
    return next((case for case in cases if case.max is None or value <= case.max), None)


class Copy(Strict, frozen=True, tag="copy"):
    """Byte copy of a contiguous view; the only step that may cross devices. `stream` belongs to either device."""

    stream: str
    source: View
    target: View


class Record(Strict, frozen=True, tag="record"):
    stream: str
    event: str


class Wait(Strict, frozen=True, tag="wait"):
    stream: str
    event: str


class TorchCall(Strict, frozen=True, tag="torch_call"):
    """Run a region of torch operators: contiguous views in, contiguous views out. `sizes` are those it refers to."""

    stream: str
    region: TorchRegion
    sizes: tuple[Dim, ...]
    inputs: tuple[View, ...]
    outputs: tuple[View, ...]
    serves: str = ""

    @property
    def operands(self) -> tuple[View, ...]:
        """Every view, those that are written last."""
        return self.inputs + self.outputs


Step = Launch | Select | Copy | Record | Wait | TorchCall


class TensorSig(Strict, frozen=True):
    """One tensor argument or result: where its bytes are, and what the caller sees."""

    name: str
    arena: str
    dtype: DType
    shape: tuple[Dim, ...]
    torch_dtype: str | None = None


class EntryPoint(Strict, frozen=True):
    """One function of the program for one bucket of shapes (`symbols` hold the bucket's ranges).

    Streams begin after whatever preceded the call (inputs are ready) and the call ends after all streams' last step.
    """

    name: str
    symbols: tuple[Symbol, ...]
    inputs: tuple[TensorSig, ...]
    outputs: tuple[TensorSig, ...]
    steps: tuple[Step, ...]


def calls_torch(entry: EntryPoint) -> bool:
    """Whether a part of the entry point runs in torch."""
    return any(isinstance(step, TorchCall) for step in entry.steps)


class WeightPart(Strict, frozen=True):
    """Rows of a weight that was several in the model: how many, and the module paths of what they were."""

    rows: int
    parameters: tuple[str, ...] = ()


class WeightEntry(Strict, frozen=True):
    """One tensor of the weight file: bytes [offset, offset + nbytes), there and in a constants arena that mirrors it.

    `format` None means plain values of `dtype` in row-major order.  `parameters` are the module paths it serves
    (several for tied weights).  A tensor that holds several of the model's, one below the other, has none, and lists
    them as `parts`. `sha256` is per 16 MiB chunk.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    format: FormatRef | None = None
    layout: str = "canonical"
    parameters: tuple[str, ...] = ()
    sha256: tuple[str, ...] = ()
    parts: tuple[WeightPart, ...] = ()

    @property
    def named(self) -> tuple[WeightPart, ...]:
        """The tensors of the model that this one holds, from its first row down: itself where it has no parts."""
        return self.parts or (WeightPart(self.shape[0] if self.shape else 1, self.parameters),)

    @property
    def paths(self) -> tuple[str, ...]:
        """The module paths of all that it holds."""
        return tuple(path for part in self.named for path in part.parameters)


class Plan(Strict, frozen=True):
    """A whole program. `init` is the entry point that fills the init arenas, once per device, at load."""

    devices: tuple[DeviceSlot, ...]
    streams: tuple[Stream, ...]
    events: tuple[Event, ...]
    arenas: tuple[Arena, ...]
    buffers: tuple[Buffer, ...]
    kernels: tuple[KernelSpec, ...]
    entries: tuple[EntryPoint, ...]
    init: EntryPoint | None = None
    weights: tuple[WeightEntry, ...] = ()
    version: int = PLAN_VERSION


class Signature(Strict, frozen=True):
    """The caller's view: a JSON tree of tuple/list/dict nodes over argument numbers, in and out.

    A node is {"kind": "tuple"|"list"|"dict"|"leaf"|"none"|"constant"|"namedtuple"|"modeloutput", …}: runtime/tree.py.
    """

    inputs: Any
    outputs: Any


def to_json(plan: Plan) -> bytes:
    """Deterministic JSON."""
    return msgspec.json.encode(plan, order="deterministic")


def from_json(data: bytes | str) -> Plan:
    """Strict: unknown fields, wrong types and unknown step kinds raise PlanError with the JSON path."""
    try:
        return msgspec.json.decode(data, type=Plan, strict=True)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise PlanError(f"the plan is malformed: {error}") from error
