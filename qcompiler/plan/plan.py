"""The plan: what a program does, step by step. Every launch, copy and wait names its stream.

A plan is the whole program without the bytes of its weights. It is strict JSON. The `rt` dialect prints it one to one,
and `plan.verify` decides whether it is safe to run. An *arena* is a contiguous range of memory on one device, a
*buffer* is a fixed range of an arena, and an operand is a strided *view* of a buffer.
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
    """A contiguous range of memory on one device. `kind` says what it holds:

    - `constants`: bytes of the weight file, shared and read-only. Either the whole file, or, in a program for several
      devices, the weights that its buffers name.
    - `init`: what `@init` computes once at load, shared and read-only afterwards.
    - `activations`: scratch memory of one session.
    - `state`: one declared state of a session. It begins as its `initial_weight`, or as zeros without one.
    - `input`, `output`: one argument or one result. On the CPU this is the caller's memory, without a copy.

    `nbytes` is the size for the largest sizes of the entry. `entry` names the entry point that an activation, input or
    output arena belongs to.
    """

    name: str
    device: str
    kind: ArenaKind
    nbytes: int
    entry: str | None = None


def initial_weight(state_arena: str) -> str:
    """The name of the weight that holds a state's initial values. The colon keeps it apart from the model's names."""
    return f"initial:{state_arena}"


class Buffer(Strict, frozen=True):
    """A range of an arena, in bytes. `offset` is a multiple of 64; `nbytes` is the size for the bucket's largest sizes.

    In a constants arena, `weight` names the weight that the buffer holds, wherever that lies in the weight file. A
    buffer without a name holds the weight that has the buffer's offset in the file.
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
    """Runs `kernel` on `stream`, with one view for each operand of its spec."""

    kernel: str
    stream: str
    operands: tuple[View, ...]


class SelectCase(Strict, frozen=True):
    """Taken if the select's expression is <= `max` (None: always)."""

    max: int | None
    kernel: str


class Select(Strict, frozen=True, tag="select"):
    """One launch. The value of a shape expression chooses its kernel: that of the first case that fits."""

    on: Dim
    cases: tuple[SelectCase, ...]
    stream: str
    operands: tuple[View, ...]


def taken(cases: Iterable[SelectCase], value: int) -> SelectCase | None:
    """The first case that fits this value of the select's expression."""
    return next((case for case in cases if case.max is None or value <= case.max), None)


class Copy(Strict, frozen=True, tag="copy"):
    """Copies the bytes of a contiguous view. Only this step may cross devices; `stream` belongs to either of them."""

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
    """Runs a region of torch operators on contiguous views. `sizes` are the sizes that the region refers to."""

    stream: str
    region: TorchRegion
    sizes: tuple[Dim, ...]
    inputs: tuple[View, ...]
    outputs: tuple[View, ...]
    serves: str = ""

    @property
    def operands(self) -> tuple[View, ...]:
        """Every view: the inputs, then the outputs."""
        return self.inputs + self.outputs


Step = Launch | Select | Copy | Record | Wait | TorchCall


class TensorSig(Strict, frozen=True):
    """One tensor argument or result: its arena, and what the caller sees."""

    name: str
    arena: str
    dtype: DType
    shape: tuple[Dim, ...]
    torch_dtype: str | None = None


class EntryPoint(Strict, frozen=True):
    """One function of the program, for one bucket of shapes. `symbols` have the bucket's ranges.

    At the start of a call its inputs are ready on every stream. The call ends when the last step of every stream ends.
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
    """Consecutive rows of a weight that combines several of the model: their number, and the module paths of the
    weight that they were."""

    rows: int
    parameters: tuple[str, ...] = ()


class WeightEntry(Strict, frozen=True):
    """One tensor of the weight file: its bytes [offset, offset + nbytes). A constants arena that mirrors the file has
    them at the same offset.

    Without a `format` it holds plain values of `dtype` in row-major order. `parameters` are its module paths, several
    for tied weights. A tensor that stacks several of the model's weights has no `parameters` and lists them as `parts`.
    `sha256` has one digest for each chunk of 16 MiB.
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
        """The tensors of the model that this one holds, in the order of its rows. Without parts it is one."""
        return self.parts or (WeightPart(self.shape[0] if self.shape else 1, self.parameters),)

    @property
    def paths(self) -> tuple[str, ...]:
        """All module paths of the tensor and of its parts."""
        return tuple(path for part in self.named for path in part.parameters)


Rewrite = Literal[
    "fold-batch-norm", "column-order", "rotate-hidden", "rotate-online", "equalise", "smooth-scales", "awq-scales",
    "correct-bias",
]  # fmt: skip
"""What may give a parameter other values, or another order of columns, than it has in the model."""


class MovedParameter(Strict, frozen=True):
    """A stored parameter whose values, decoded, are not the model's: `by` names what changed them, in that order.

    Rounding to a format is no such change, and neither is a layout.
    """

    parameter: str
    by: tuple[Rewrite, ...]


class Plan(Strict, frozen=True):
    """A whole program. The entry point `init` fills the init arenas once, at load.

    `moved` lists the parameters of `weights` whose values are not the model's. None: nobody knows, since the file is
    older than this record. Readers ask it through qcompiler/plan/moved.py.
    """

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
    moved: tuple[MovedParameter, ...] | None = None


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
