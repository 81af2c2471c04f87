"""Where a norm of many rows pays in the linear that reads it, by statistics of the rows that another linear writes.

The kernel of the norm is saved: a launch, its trips to memory, and the rows, which it reads and writes. What it costs:

- in the linear that writes the rows, a trip to read them back, and the statistics;
- in the linear that reads them, a trip for the statistics before the first rows are normalised. Every block of it reads
  the statistics of its own rows, and normalises all their elements: blocks that compute other columns do so again. So
  the cost grows with rows x columns x blocks, and many rows of a wide linear do not pay.

A trip counts as the latency of memory, and bytes as if they came from memory. No GPU has measured this yet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from qcompiler.kernels.cost import ATTAINED_FRACTION, ROUND_TRIPS, DeviceCost, device_cost
from qcompiler.kernels.cuda import linear_mma, linear_statistics
from qcompiler.kernels.cuda.geometry import SHARED_LIMIT
from qcompiler.kernels.cuda.linear_fma import FEW_ROWS, TILED_THREADS
from qcompiler.kernels.cuda.signature import arch_number
from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel import ITEMSIZE, DType
from qcompiler.plan.row_statistics import Kind, width

BLOCK_COLUMNS: dict[str, int] = {"9-64": 32, "large": 64}
"""Columns of the result that a block computes, by the class of rows: those of the narrowest tiles that both engines
choose (linear_mma.py, `SMALL_M_TILES` and `LARGE_SPLIT`; linear_fma.py, `emit_tiled`)."""

OPERATIONS = 12
"""The time of an element in units of `DeviceCost.fp32`, where a multiply-add counts two: about six instructions. Eleven
for two elements (unpack 2, subtract 2, scale 2, weight 2, bias 2, round and pack 1), and the loads and stores."""


@dataclass(frozen=True)
class StatisticsQuery:
    """A norm and the linear that reads it: rows and columns of x, rows of the weight, the types of the norm's weight
    and bias."""

    m: Dim
    k: int
    n: int
    dtype: DType
    kind: Kind
    vectors: tuple[DType, ...]

    @property
    def m_class(self) -> Literal["9-64", "large"]:
        """The class of rows."""
        assert isinstance(self.m, int)
        return "9-64" if self.m <= 64 else "large"


@dataclass(frozen=True)
class Verdict:
    """Whether the norm pays in the linear on every architecture, and the estimates or the limit that say so."""

    pays: bool
    why: str


def verdict(query: StatisticsQuery, kind: str, isas: tuple[str, ...]) -> Verdict:
    """For a target of this kind."""
    limit = _limit(query, kind)
    if limit is not None:
        return Verdict(False, limit)
    estimates = list[str]()
    for isa in isas:
        taken = linear_statistics.reserved(query.k, query.vectors)
        room = SHARED_LIMIT[arch_number(isa)] - linear_mma.least_shared(query.m_class, windows=False)
        if query.dtype != "f32" and taken > room:
            return Verdict(
                False, f"a norm of {query.k} columns takes {taken} bytes of shared memory, and {isa} has "
                f"{max(room, 0)} beside the tiles of x"
            )  # fmt: skip
        device = device_cost(isa, kind)
        saved, costs = time_of_norm(query, device), time_in_linears(query, device)
        text = f"estimated for {isa}: {costs:.1f} us in the linears, {saved:.1f} us in a kernel of its own"
        if costs > saved:
            return Verdict(False, text)
        estimates.append(text)
    return Verdict(True, "; ".join(estimates))


def time_of_norm(query: StatisticsQuery, device: DeviceCost) -> float:
    """The estimated time, in microseconds, of the norm's own kernel."""
    nbytes = 2 * _rows(query) * query.k * ITEMSIZE[query.dtype]
    return device.launch + ROUND_TRIPS * device.latency + nbytes / (ATTAINED_FRACTION * device.bandwidth)


def time_in_linears(query: StatisticsQuery, device: DeviceCost) -> float:
    """The estimated time, in microseconds, that statistics and norm add to the two linears."""
    m, blocks = _rows(query), -(-query.n // BLOCK_COLUMNS[query.m_class])
    nbytes = 4 * m * width(query.kind, query.k) * (1 + blocks)
    nbytes += sum(ITEMSIZE[dtype] for dtype in query.vectors) * query.k * blocks
    busy = min(1.0, blocks * -(-m // 64) * TILED_THREADS / device.threads_to_fill)
    computing = OPERATIONS * m * query.k * blocks / (ATTAINED_FRACTION * device.fp32 * busy)
    return 2 * device.latency + nbytes / (ATTAINED_FRACTION * device.bandwidth) + computing


def _rows(query: StatisticsQuery) -> int:
    assert isinstance(query.m, int)
    return query.m


def _limit(query: StatisticsQuery, kind: str) -> str | None:
    """What no kernel does."""
    checks: tuple[tuple[Callable[[], bool], str], ...] = (
        (lambda: kind == "cpu", "threads of a CPU share the kernel of the norm"),
        (lambda: not isinstance(query.m, int), f"the number of rows, {query.m}, is known only at run time"),
        (lambda: _rows(query) <= FEW_ROWS, f"a linear of up to {FEW_ROWS} rows computes the statistics itself"),
        (lambda: not query.k or not query.n, "there is nothing to normalise"),
    )
    return next((why for failed, why in checks if failed()), None)
