"""What the explorer's page shows, as plain data: `web/src/model.ts` declares the same records for the browser.

A long text (a stage, a kernel's source) is not in the model. It is a number: the position of the text in `Collected`,
which the page stores compressed and unpacks when it is shown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

Origin = Literal["compile", "file"]
Sort = Literal["idiom", "missed", "kernel", "other"]

MODEL_VERSION = 3
"""The page's code refuses a model of another version."""


class Record(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Base class of the records."""


class Facts(Record, frozen=True):
    """`origin` says where the data came from: a compile in this process, or a file."""

    title: str
    qcompiler: str
    kind: str
    isa: str
    origin: Origin
    source: str
    devices: tuple[str, ...]


class Stage(Record, frozen=True):
    """One stage. `delta` counts the ops that it added and removed, by name; `seconds` is None if they were not kept."""

    index: int
    name: str
    kind: Literal["torch", "mlir", "source"]
    seconds: float | None
    changed: bool
    lines: int
    ops: dict[str, int]
    delta: dict[str, int]
    text: int


class SourceLine(Record, frozen=True):
    """A line of the model, `model.py:84 in forward: y = self.up(x)`, and the torch operators that it became."""

    text: str
    ops: tuple[str, ...]


class Kernel(Record, frozen=True):
    """A kernel, its source as a text, and its launch in words. `number` is its place in the plan: ``qk_<number>``.

    `sass` is its machine code as a text, -1 where it was not built; `resources` are its registers and its local memory,
    and the compiler that says so.
    """

    number: int
    name: str
    template: str
    serves: str
    operands: tuple[str, ...]
    symbols: tuple[str, ...]
    digest: str
    engine: str
    launch: str
    notes: tuple[str, ...]
    source: int
    sass: int
    resources: str


class Step(Record, frozen=True):
    """One step of an entry point, by its number in the plan.

    `place` is a module path. `inferred`: it is that of the steps around it, since the step reads no weight.
    `kernels` has several names for a select. `begin`, `end` and `alone` are microseconds of the timeline, None for a
    step that takes no time there; `kernel` is the one that a select chooses at the timeline's sizes.
    """

    number: int
    kind: str
    stream: str
    place: str
    inferred: bool
    kernels: tuple[str, ...]
    kernel: str
    template: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    views: tuple[str, ...]
    formats: tuple[str, ...]
    event: str
    begin: float | None
    end: float | None
    alone: float | None
    nbytes: int
    operations: int
    measured: bool
    critical: bool


class Entry(Record, frozen=True):
    """An entry point with its timeline at `symbols`.

    `device` is the one of the estimates, and `measured_on` the one of measured times, "" without any.
    """

    name: str
    ranges: dict[str, tuple[int, int]]
    symbols: dict[str, int]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    device: str
    measured_on: str
    streams: dict[str, str]
    span: float
    serial: float
    steps: tuple[Step, ...]
    edges: tuple[tuple[str, int, int], ...]


class Buffer(Record, frozen=True):
    """A range of an arena; `first` and `last` are the steps of the arena's entry point that touch it, -1 for none."""

    name: str
    offset: int
    nbytes: int
    first: int
    last: int
    weight: str


class Arena(Record, frozen=True):
    name: str
    device: str
    kind: str
    nbytes: int
    entry: str
    buffers: tuple[Buffer, ...]


class LedgerLine(Record, frozen=True):
    """A row of the ledger (qcompiler.ledger.LedgerRow)."""

    parameters: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    format: str
    reason: str
    bits: float
    bytes_before: int
    bytes_after: int
    padding: int


class Decision(Record, frozen=True):
    """A decision of a stage. `sort`: an idiom that was recognised or missed, the choice of a kernel, or another."""

    stage: str
    path: str
    what: str
    why: str
    sort: Sort


Db = float | Literal["exact", "not finite"] | None
"""A signal-to-noise ratio in decibels: 10 log10 of sum(reference^2) / sum((value - reference)^2), in float64.

"exact": no difference. "not finite": one side has an infinity or a NaN where the other has not. None: there is nothing
to compare with, or the reference is zero everywhere.
"""


class ResultSnr(Record, frozen=True):
    """A result of the program, against the oracle's and against the float model's."""

    name: str
    oracle: Db
    model: Db


class LayerSnr(Record, frozen=True):
    """A value of the model's graph: an operator `op` at a module path.

    `quantised` is the oracle's value against the float model's: what quantisation costs up to here.  `oracle` is the
    program's value against the oracle's: what the compiler and the kernels cost up to here.  `model` is the program's
    value against the float model's: both.  `entry` and `step` name the step that wrote the value, "" and -1 if no step
    wrote it to memory: it was fused into another.
    """

    path: str
    op: str
    value: str
    quantised: Db
    oracle: Db
    model: Db
    entry: str
    step: int


class StageSnr(Record, frozen=True):
    """A stage: the worst result after it against the same before it, and against those of the imported module.

    `oracle` and `model` compare it with the oracle and the float model, as `ResultSnr`.
    """

    stage: str
    before: Db
    start: Db
    oracle: Db
    model: Db


class Errors(Record, frozen=True):
    """What quantisation and compilation cost on one input. `notes` are sentences: what could not be measured, and why.

    `entry` ran; `inputs` are names with types and sizes.
    """

    inputs: tuple[str, ...]
    entry: str
    results: tuple[ResultSnr, ...]
    layers: tuple[LayerSnr, ...]
    stages: tuple[StageSnr, ...]
    notes: tuple[str, ...]


class Model(Record, frozen=True):
    """Everything but the long texts. `absent` are sentences for the reader: what the page does not hold, and why.

    `lines` are the model's source lines by module path. `errors` is None if none were measured.
    """

    version: int
    facts: Facts
    absent: tuple[str, ...]
    stages: tuple[Stage, ...]
    kernels: tuple[Kernel, ...]
    entries: tuple[Entry, ...]
    arenas: tuple[Arena, ...]
    ledger: tuple[LedgerLine, ...]
    totals: dict[str, Any]
    decisions: tuple[Decision, ...]
    lines: dict[str, tuple[SourceLine, ...]]
    errors: Errors | None


@dataclass(frozen=True)
class Collected:
    """A model and its texts."""

    model: Model
    texts: tuple[str, ...]
