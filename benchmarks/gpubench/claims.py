"""Claims about an H200 from before any kernel had run on one; each is compared with a number of a run.

A claim names a measure (`MEASURES`), which computes it from a document, and the predicted range.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from gpubench.document import Document, Row

PEAK = 989e12
"""Dense bf16 of the data sheet, operations per second."""


@dataclass(frozen=True)
class Claim:
    """The prediction of `measure` is `low` to `high`; `aim` is the project's goal, if it has one."""

    name: str
    measure: str
    low: float
    high: float
    unit: str
    source: str
    aim: float | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


READING = "a reading of the SASS, before the mends of November 2026"
COUNT = "instructions per weight counted in the SASS, after these mends"

CLAIMS = (
    Claim("nf4, one row, 4096 x 4096: share of copy bandwidth", "nf4_gemv_of_copy", 0.34, 0.50, "share", READING, 0.75),
    Claim("nf4, 64 rows, 4096 x 4096: speed over cuBLAS bf16", "nf4_m64_of_bf16", 0.7, 1.1, "x", READING, 3.0),
    Claim("nf4, 4096 rows, 4096 x 4096: share of the data sheet's bf16 rate", "nf4_m4096_of_peak", 0.40, 0.48, "share",
          READING, 0.70),
    Claim("nf4, one row, 4096 x 4096: share of copy bandwidth (mended)", "nf4_gemv_of_copy", 0.45, 0.60, "share",
          COUNT, 0.75),
    Claim("nf4, one row, 14336 x 4096: share of copy bandwidth (mended)", "nf4_wide_of_copy", 0.60, 0.75, "share",
          COUNT, 0.75),
    Claim("int4 g128, one row, 4096 x 4096: share of copy bandwidth (mended)", "int4_gemv_of_copy", 0.50, 0.65,
          "share", COUNT, 0.75),
    Claim("nf4, 16 rows over one row, 4096 x 4096: time", "nf4_m16_of_m1", 1.15, 1.40, "x", COUNT),
    Claim("nf4, 64 rows, 4096 x 4096: speed over cuBLAS bf16 (mended)", "nf4_m64_of_bf16", 0.9, 1.3, "x", COUNT,
          3.0),
    Claim("attention of one query over 8,192 keys", "decode_8k_us", 150.0, 200.0, "us", READING, 10.0),
    Claim("launches of a decoder layer", "layer_launches", 19, 19, "", "counted in the plan", 8),
    Claim("cells of ours that are wrong or fail", "wrong_cells", 0, 0, "", "the simulated GPU runs the same text", 0),
)  # fmt: skip


def markdown() -> str:
    """The claims as a table, as in docs/gpu.md."""
    lines = ["| | predicted | aim |", "|---|---|---|"]
    for each in CLAIMS:
        aim = "–" if each.aim is None else shown(each.aim, each.unit)
        lines.append(f"| {each.name} | {between(each.low, each.high, each.unit)} | {aim} |")
    return "\n".join(lines)


def between(low: float, high: float, unit: str) -> str:
    """A range, or its one value."""
    first, last = shown(low, unit), shown(high, unit)
    return first if first == last else f"{first} to {last}"


def shown(value: float, unit: str) -> str:
    """A value with its unit: "share", "us", "x", or a plain count."""
    words = {"share": f"{value:.0%}", "us": f"{value:.0f} µs", "x": f"{value:.2f}×"}
    return words.get(unit, f"{value:g}")


def _row(document: Document, name: str) -> Row | None:
    return next((row for row in document.cells if row.id == name and row.median is not None), None)


def copy_rate(document: Document) -> float | None:
    """Bytes per microsecond of the run's copies: the median over all moments."""
    samples = [
        each
        for probe in document.probes
        if probe.name == "copy"
        for each in probe.values.get("terabytes_per_second", ())
    ]
    return 1e6 * statistics.median(samples) if samples else None


def _share_of_copy(name: str) -> Callable[[Document], float | None]:
    def measure(document: Document) -> float | None:
        row, rate = _row(document, name), copy_rate(document)
        return None if row is None or not row.median or rate is None else row.nbytes / row.median / rate

    return measure


def _m16(document: Document) -> float | None:
    sixteen, one = _row(document, "linear/nf4/4096x4096/m16"), _row(document, "linear/nf4/4096x4096/m1")
    return None if sixteen is None or one is None or not one.median else (sixteen.median or 0.0) / one.median


def _m64(document: Document) -> float | None:
    row, peer = _row(document, "linear/nf4/4096x4096/m64"), _row(document, "linear/torch/4096x4096/m64")
    if row is None or peer is None or not row.median or not peer.median:
        return None
    return peer.median / row.median


def _m4096(document: Document) -> float | None:
    row = _row(document, "linear/nf4/4096x4096/m4096")
    return None if row is None or not row.median else row.operations / (row.median / 1e6) / PEAK


def _decode(document: Document) -> float | None:
    row = _row(document, "attention_decode/ours/8192")
    return None if row is None else row.median


def _launches(document: Document) -> float | None:
    row = next((row for row in document.cells if row.kind == "layer"), None)
    return None if row is None else row.extra.get("launches")


def _wrong(document: Document) -> float | None:
    ours = [row for row in document.cells if row.engine not in ("torch", "tinygemm", "bitsandbytes")]
    ran = [row for row in ours if row.status in ("ok", "wrong", "failed")]
    return float(sum(row.status != "ok" for row in ran)) if ran else None


MEASURES: dict[str, Callable[[Document], float | None]] = {
    "nf4_gemv_of_copy": _share_of_copy("linear/nf4/4096x4096/m1"),
    "nf4_wide_of_copy": _share_of_copy("linear/nf4/14336x4096/m1"),
    "int4_gemv_of_copy": _share_of_copy("linear/int4/4096x4096/m1"), "nf4_m16_of_m1": _m16,
    "nf4_m64_of_bf16": _m64, "nf4_m4096_of_peak": _m4096, "decode_8k_us": _decode,
    "layer_launches": _launches, "wrong_cells": _wrong,
}  # fmt: skip
