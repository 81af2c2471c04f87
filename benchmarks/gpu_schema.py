"""What `make gpu-check` writes: gpu-check.json, as dataclasses. The check, and the script that makes tables of it, read
this file and no other.

    from gpu_schema import Report, read, write

Needs only the standard library: `tests/gpu/check.py` runs before anything is installed. `SCHEMA` grows by one when a
field changes its meaning or goes; `read` refuses another number. New fields have defaults, so that older files of the
same number stay readable.
"""

from __future__ import annotations

import dataclasses
import json
import os
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 2
"""1 was the file with the keys `gpu`, `steps` and `matmul`, which had no number."""

MODES = ("eager", "captured", "replayed")
"""How a kernel ran when it failed: launched on a stream, launched into a capture, as the replay of a graph."""


@dataclass
class Step:
    """One process of the check. `counts` are tests by outcome; `failures` name them with their first line.

    A step that was `left_out` for lack of time, and one that was `resumed` (it passed in an earlier run on the same
    tree, and its numbers are that run's), has `ok`; `stopped` did not end in its own time limit and does not.
    """

    part: str
    name: str
    ok: bool
    seconds: float
    counts: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    output: str = ""
    left_out: bool = False
    resumed: bool = False


@dataclass
class Failure:
    """One wrong kernel of the matrix, in one mode.

    `error` is ‖out − ref‖ / ‖ref‖ over all outputs, with the simulated GPU's result as the reference; None where there
    is no result (`reason` is then the driver's or the compiler's). A replay must give the bits of an eager run:
    `mismatches` of `elements` differ. `tolerance` is what `error` was held to.
    """

    template: str
    format: str
    shape: str
    mode: str
    kernel: str
    error: float | None = None
    tolerance: float | None = None
    mismatches: int | None = None
    elements: int | None = None
    reason: str = ""


@dataclass
class Kernel:
    """One kernel of the matrix that was right in all modes: how near it came (`error` as in `Failure`; None where there
    was no reference, and only the modes were compared with each other)."""

    template: str
    format: str
    shape: str
    kernel: str
    error: float | None
    bits: bool = False
    """Whether every bit is the reference's."""


@dataclass
class Learned:
    """Something CUDA does not document, as this driver does it. Neither a failure nor a success."""

    case: str
    expected: str
    seen: str

    @property
    def agrees(self) -> bool:
        return self.expected == self.seen


@dataclass
class Profile:
    """One kernel under one tool (ncu, memcheck, racecheck). `metrics` are ncu's, by its own names; `findings` the
    sanitizer's error lines. `reason` says why there is nothing (the tool is absent, or the driver forbids counters)."""

    kernel: str
    tool: str
    ok: bool
    seconds: float = 0.0
    metrics: dict[str, Any] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    reason: str = ""


@dataclass
class Environment:
    """The machine as it was found; nothing of it is ever set."""

    name: str = ""
    capability: str = ""
    memory_gib: int = 0
    driver_cuda: str = ""
    attributes: dict[str, int] = field(default_factory=dict)
    """multiprocessors, l2_bytes, shared_per_block_optin, clock_khz, memory_clock_khz, bus_bits"""
    clocks: dict[str, dict[str, str]] = field(default_factory=dict)
    """moment ("start", "after bench", …) -> what `nvidia-smi --query-gpu` answered, by its names"""
    python: str = ""
    packages: dict[str, str | None] = field(default_factory=dict)
    """distribution -> version; None where it is absent"""
    tools: dict[str, str | None] = field(default_factory=dict)
    """nvcc, ncu, compute-sanitizer, nvidia-smi -> path; None where it is absent"""
    nvrtc: str = ""
    """version and file of the library that compiled"""
    cores: int = 0
    tree: str = ""
    """digest of the source tree"""
    commit: str = ""


@dataclass
class Copy:
    """Device-to-device copies: bytes read plus bytes written per second, each a raw sample."""

    nbytes: int = 0
    terabytes_per_second: list[float] = field(default_factory=list)
    reason: str = ""

    @property
    def median(self) -> float | None:
        found = sorted(self.terabytes_per_second)
        return found[len(found) // 2] if found else None


@dataclass
class Cache:
    """Modules of the matrix that the cache held (`hits`), those that were compiled here (`misses`) and how long that
    took on one core; how many references were brought along, and how many were simulated here."""

    brought: int = 0
    """cubins that came with the wheels"""
    hits: int = 0
    misses: int = 0
    seconds: float = 0.0
    references: dict[str, int] = field(default_factory=dict)
    """`brought` and `simulated` -> kernels"""
    brought_by: str = ""
    """the compiler of the brought cubins, as they record it; a miss of every one says that NVRTC differs"""
    compiled_by: str = ""


@dataclass
class Report:
    """gpu-check.json. `kind` says what stood in the GPU's place: "gpu", "stub" (tests), "sim", or "none".

    `bench` is what `gpu_first.py --json` wrote, as far as it came; the check reads its `failures` (a list) and
    `peers_missing` (an object) and leaves the rest to its reader. Here `peers_missing` is peer -> reason,
    the bench's own included.
    """

    kind: str = "none"
    device: str = "cuda:0"
    reason: str = ""
    schema: int = SCHEMA
    parts: list[str] = field(default_factory=list)
    seconds: float = 0.0
    environment: Environment = field(default_factory=Environment)
    copy: Copy = field(default_factory=Copy)
    cache: Cache = field(default_factory=Cache)
    steps: list[Step] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    learned: list[Learned] = field(default_factory=list)
    bench: dict[str, Any] | None = None
    profile: list[Profile] = field(default_factory=list)
    peers_missing: dict[str, str] = field(default_factory=dict)


def write(report: Report, path: Path) -> None:
    """So that a reader, or a kill in the middle, meets the file before or the file after."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(dataclasses.asdict(report), indent=1))
    beside.replace(path)


def read(path: Path) -> Report:
    """ValueError that names the file and the field where it is no report of this schema."""
    try:
        data = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    number = data.get("schema") if isinstance(data, dict) else None
    if number != SCHEMA:
        raise ValueError(f"{path} has schema {number}; this script reads {SCHEMA}: use the scripts of its commit")
    report: Report = _made(Report, data, str(path))
    return report


def _made(kind: Any, value: Any, where: str) -> Any:
    """`value`, as JSON gave it, as an object of `kind`."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, dict):
            raise ValueError(f"{where}: {kind.__name__} is an object, not {type(value).__name__}")
        hints = typing.get_type_hints(kind)
        if unknown := value.keys() - hints.keys():
            raise ValueError(f"{where}: {kind.__name__} has no {', '.join(sorted(unknown))}")
        try:
            return kind(**{name: _made(hints[name], each, f"{where}: {name}") for name, each in value.items()})
        except TypeError as error:
            raise ValueError(f"{where}: {error}") from None
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is list and isinstance(value, list):
        return [_made(arguments[0], each, f"{where}[{number}]") for number, each in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {name: _made(arguments[1], each, f"{where}: {name}") for name, each in value.items()}
    if kind is Any or (origin in (types.UnionType, typing.Union) and any(_fits(each, value) for each in arguments)):
        return value
    if not _fits(kind, value):
        raise ValueError(f"{where}: {value!r} is no {getattr(kind, '__name__', kind)}")
    return value


def _fits(kind: Any, value: Any) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    plain = typing.get_origin(kind) or kind
    return isinstance(value, plain) and not (plain is int and isinstance(value, bool))
