"""The document of `gpu_first.py --json`, and its writing: it is complete after every cell.

    {"bench_schema": 1, "kind": "gpu", "timed": true, "environment": {…}, "probes": {…}, "cells": [{…}, …], …}

Needs only the standard library.  `SCHEMA` grows by one when a field changes its meaning or is removed; new fields have
defaults.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 1
ROOT = Path(__file__).resolve().parents[2]

STATUSES = ("ok", "wrong", "failed", "not run", "left out")
"""ok: right and, on a GPU, timed.  wrong: the error exceeds its tolerance.  failed: an exception, a crash or a hang.
not run: a peer that cannot run here.  left out: no time was left."""


@dataclass
class Row:
    """One cell. Times are microseconds per call, one for each round; `errors` is mode -> ||out - ref|| / ||ref||.

    `nbytes` is the least that a call must move (weights, inputs, outputs once); `operations` count a multiply-add
    twice.  `kernel` has name, engine, grid, block, registers, shared, spills, blocks_per_sm, waves; `predicted` is
    model.py's.
    """

    id: str
    kind: str
    engine: str
    n: int = 0
    k: int = 0
    m: int = 0
    rows: str = "static"
    status: str = "left out"
    reason: str = ""
    errors: dict[str, float | None] = field(default_factory=dict)
    tolerance: float | None = None
    samples: list[float] = field(default_factory=list)
    calls: int = 0
    copies: int = 0
    nbytes: int = 0
    operations: int = 0
    path: str = ""
    kernel: dict[str, Any] = field(default_factory=dict)
    nodes: dict[str, int] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    predicted: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def median(self) -> float | None:
        """Microseconds, or None if nothing was timed."""
        return statistics.median(self.samples) if self.samples else None

    @property
    def spread(self) -> float | None:
        """The slowest minus the fastest round, as a share of the median."""
        middle = self.median
        return (max(self.samples) - min(self.samples)) / middle if middle else None


@dataclass
class Probe:
    """One probe at one `moment` of the run; `values` by name, raw samples in lists."""

    name: str
    moment: str
    values: dict[str, Any] = field(default_factory=dict)
    reason: str = ""


@dataclass
class Document:
    """A run. `kind` is "gpu", "stub" or "sim"; `timed` is false if times have no meaning. `scale` is "full" or "small":
    a small run has the same cells at other sizes."""

    kind: str = "none"
    device: str = ""
    timed: bool = False
    scale: str = "full"
    bench_schema: int = SCHEMA
    commit: str = ""
    began: str = ""
    budget: float = 0.0
    seconds: float = 0.0
    restarts: list[str] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    probes: list[Probe] = field(default_factory=list)
    cells: list[Row] = field(default_factory=list)
    failures: list[dict[str, Any]] = field(default_factory=list)
    """Cells that are wrong or failed: id, status, reason, errors. Written from `cells`."""
    peers_missing: dict[str, str] = field(default_factory=dict)
    """Peer -> why it did not run."""
    predictions: str = ""
    reason: str = ""


def write(document: Document, path: Path) -> None:
    """Writes atomically: a reader, or a kill in between, finds the old or the new file."""
    bad = [row for row in document.cells if row.status in ("wrong", "failed")]
    document.failures = [{"id": r.id, "status": r.status, "reason": r.reason, "errors": r.errors} for r in bad]
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(_finite(dataclasses.asdict(document)), indent=1, allow_nan=False), encoding="utf-8")
    beside.replace(path)


def _finite(value: Any) -> Any:
    """Replaces NaN and infinity, which JSON lacks, by null; the row's reason says which it was."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def made(data: Any, where: str) -> Document:
    """The document of parsed JSON. ValueError that names the field if it is not of this schema."""
    number = data.get("bench_schema") if isinstance(data, dict) else None
    if number != SCHEMA:
        raise ValueError(
            f"{where} has bench_schema {number}, and this script reads {SCHEMA}: use the scripts of the commit that "
            f"wrote it ({(data.get('commit') if isinstance(data, dict) else None) or 'unknown'})"
        )
    document = _of(Document, data, where)
    document.cells = [_of(Row, each, f"{where}: cells[{i}]") for i, each in enumerate(document.cells)]
    document.probes = [_of(Probe, each, f"{where}: probes[{i}]") for i, each in enumerate(document.probes)]
    for row in document.cells:
        if row.status not in STATUSES:
            raise ValueError(f"{where}: cell {row.id!r} has status {row.status!r}; there are {', '.join(STATUSES)}")
    return document


def _of(kind: Any, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise ValueError(f"{where}: {kind.__name__} is an object, not {type(data).__name__}")
    fields = {each.name for each in dataclasses.fields(kind)}
    if unknown := sorted(data.keys() - fields):
        raise ValueError(f"{where}: {kind.__name__} has no {', '.join(unknown)}")
    required = {
        each.name
        for each in dataclasses.fields(kind)
        if each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
    }
    if missing := sorted(required - data.keys()):
        raise ValueError(f"{where}: {kind.__name__} lacks {', '.join(missing)}")
    return kind(**data)


def counted(rows: Sequence[Row]) -> str:
    """ "410 ok, 2 wrong, 14 not run": the number of cells by status."""
    counts = {status: sum(row.status == status for row in rows) for status in STATUSES}
    return ", ".join(f"{count} {status}" for status, count in counts.items() if count) or "none"


def commit() -> str:
    """The tree's commit, with "+" if it has changes; "" without a repository."""
    try:
        asked = [
            subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True, timeout=20).stdout
            for words in (["rev-parse", "--short=7", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        ]
    except (OSError, subprocess.SubprocessError):
        return ""
    return asked[0].strip() + ("+" if asked[1].strip() else "")
