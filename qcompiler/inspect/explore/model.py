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

MODEL_VERSION = 2
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


class Kernel(Record, frozen=True):
    """A kernel, its source as a text, and its launch in words. `number` is its place in the plan: ``qk_<number>``."""

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


class Model(Record, frozen=True):
    """Everything but the long texts. `absent` are sentences for the reader: what the page does not hold, and why."""

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


@dataclass(frozen=True)
class Collected:
    """A model and its texts."""

    model: Model
    texts: tuple[str, ...]
