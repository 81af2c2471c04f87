"""The schema of `make gpu-check`'s gpu-check.json, as dataclasses. The check, and the script that makes tables of it,
read only this file.

    from gpu_schema import Report, read, write

Needs only the standard library: `tests/gpu/check.py` runs before anything is installed. `SCHEMA` grows by one when a
field changes its meaning or is removed; `read` refuses other numbers. New fields have defaults, so older files with the
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
"""Version 1 was the file with the keys `gpu`, `steps` and `matmul`, which had no number."""

MODES = ("eager", "captured", "replayed")
"""How a kernel ran when it failed: launched on a stream, launched into a capture, as the replay of a graph."""


@dataclass
class Step:
    """One process of the check. `counts` are tests by outcome; `failures` name them with their first line.

    `ok` includes steps that were `left_out` for lack of time, and `resumed` ones (they passed in an earlier run on the
    same tree, and have that run's numbers); a `stopped` step did not end within its own time limit and is not `ok`.
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

    `error` is ‖out − ref‖ / ‖ref‖ over all outputs, with the simulated GPU's result as the reference; None without a
    result (`reason` is then the driver's or the compiler's). A replay must give the bits of an eager run:
    `mismatches` of `elements` differ. `tolerance` is the limit of `error`.
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
    """One kernel of the matrix that was right in all modes, with its error (`error` as in `Failure`; None if there was
    no reference, and only the modes were compared with each other)."""

    template: str
    format: str
    shape: str
    kernel: str
    error: float | None
    bits: bool = False
    """Whether every bit equals the reference's."""


@dataclass
class Learned:
    """This driver's behaviour where CUDA documents none. Neither a failure nor a success."""

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
    """The machine as found; the check changes nothing of it."""

    name: str = ""
    capability: str = ""
    memory_gib: int = 0
    driver_cuda: str = ""
    attributes: dict[str, int] = field(default_factory=dict)
    """multiprocessors, l2_bytes, shared_per_block_optin, clock_khz, memory_clock_khz, bus_bits"""
    clocks: dict[str, dict[str, str]] = field(default_factory=dict)
    """moment ("start", "after bench", …) -> the answer of `nvidia-smi --query-gpu`, by its names"""
    python: str = ""
    packages: dict[str, str | None] = field(default_factory=dict)
    """distribution -> version; None if it is absent"""
    tools: dict[str, str | None] = field(default_factory=dict)
    """nvcc, ncu, compute-sanitizer, nvidia-smi -> path; None if it is absent"""
    nvrtc: str = ""
    """version and file of the compiling library"""
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
    """Modules of the matrix that the cache held (`hits`), those that were compiled here (`misses`) and the time for
    these on one core; the numbers of references that were brought along and that were simulated here."""

    brought: int = 0
    """cubins that came with the wheels"""
    hits: int = 0
    misses: int = 0
    seconds: float = 0.0
    references: dict[str, int] = field(default_factory=dict)
    """`brought` and `simulated` -> kernels"""
    brought_by: str = ""
    """the compiler of the brought cubins, as recorded in them; if every module misses, NVRTC differs"""
    compiled_by: str = ""


@dataclass
class Report:
    """gpu-check.json. `kind` is the kind of device: "gpu", "stub" (tests), "sim", or "none".

    `bench` is the document of `gpu_first.py --json`, as far as it came; the check reads its `failures` (a list) and
    `peers_missing` (an object) and leaves the rest to other readers. Here `peers_missing` is peer -> reason,
    including the bench's own.
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
    """Writes atomically: a reader, or a kill in the middle, finds the old or the new file."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(dataclasses.asdict(report), indent=1))
    beside.replace(path)


def read(path: Path) -> Report:
    """ValueError that names the file and the field if it is not a report of this schema."""
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
    """`value`, from JSON, as an object of `kind`."""
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
