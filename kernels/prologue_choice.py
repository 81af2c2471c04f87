"""Where a norm, or what makes rows of int8, pays as the prologue of a linear: the limits of the kernels, and an
estimate of the time that it takes.

On a CPU the calling thread makes the rows, as it does for so few rows in a kernel of its own: nothing is computed
twice. On a GPU every block of the linear makes all rows that it multiplies. This saves a launch, and costs
- trips to memory in each wave of blocks: one for up to eight rows, and for more as many as a block's threads take,
  which make a few rows at once;
- the bytes of the norm's weight, bias and residual in each block, counted as if they came from memory. The elements of
  x are read by each block in any case, the second time from the cache of its multiprocessor;
- for rows of int8 what the elements of x are larger than their codes, which each block would read otherwise;
- for more than eight rows, the time to compute them in each block.
No GPU has measured this yet.
"""

from __future__ import annotations

from dataclasses import dataclass

from qcompiler.kernels.cost import ATTAINED_FRACTION, ROUND_TRIPS, DeviceCost, device_cost
from qcompiler.kernels.cuda import linear_int8, linear_norm
from qcompiler.kernels.cuda.linear_fma import FEW_ROWS
from qcompiler.kernels.cuda.rows import WARP, RowWalk
from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel import ITEMSIZE, DType
from qcompiler.plan.kinds.linear import MOST_NORMALISED

PANEL = 16
"""Rows of the weight that a block of a GPU multiplies."""

BLOCKS_PER_MULTIPROCESSOR = 3
"""Blocks that run at once on a multiprocessor (linear_fma.py, `resident`)."""

LANES = 128
"""Threads that fill a multiprocessor (`DeviceCost.threads_to_fill`)."""

NORM, CODE = 24, 40
"""The time of an element of many rows, of its norm and of its code, in units of `DeviceCost.fp32`, where a multiply-add
counts two. A norm is read and computed twice or three times: about twelve instructions. A code takes twenty: a division
(nine), the largest magnitude (three), rounding and two limits (three), its place in a word and its sum (five)."""

STATISTICS = 2
"""Times that the rows are read before a norm: the mean, and the squares of the distances from it."""


@dataclass(frozen=True)
class NormQuery:
    """A norm, or what makes rows of int8, and the linear that reads it: rows and columns of x, rows of the weight, how
    many vectors of weights, biases and rows of a residual the norm reads."""

    m: Dim
    k: int
    n: int
    dtype: DType
    affine: int
    kind: str
    isas: tuple[str, ...]
    constant_weight: bool
    makes_codes: bool = False
    """Whether this is about rows of int8, and no norm."""
    multiplies_codes: bool = False
    """Whether the linear multiplies rows of int8, which it makes."""

    @property
    def many(self) -> bool:
        """Whether several blocks share the rows, or make several at once."""
        return isinstance(self.m, int) and self.m > FEW_ROWS


def obstacle(query: NormQuery) -> str | None:
    """Why the norm keeps a kernel of its own, or None."""
    if not isinstance(query.m, int):
        return f"the number of rows, {query.m}, is known only at run time"
    if query.m * query.k > MOST_NORMALISED:
        return f"{query.m} rows of {query.k} have more than {MOST_NORMALISED} elements, which threads share"
    if not query.m * query.k:
        return "there is nothing to normalise"
    if query.kind == "cpu":
        return None
    what = "make rows of int8" if query.makes_codes else "take a norm"
    most = linear_int8.MOST_MADE if query.multiplies_codes else FEW_ROWS
    if query.m > most:
        return f"there are {query.m} rows, and kernels for up to {most} {what}"
    if not query.constant_weight:
        return f"the weight is computed, and kernels for constant ones {what}"
    for isa in query.isas:
        device = device_cost(isa, query.kind)
        saved, costs = device.launch + ROUND_TRIPS * device.latency, time_in_blocks(query, device, isa)
        if costs > saved:
            return (
                f"estimated for {isa}, {_blocks(query, isa)} blocks take {costs:.1f} us to "
                f"{'make the rows' if query.makes_codes else 'normalise'}, and a launch for it takes {saved:.1f} us"
            )
    return None


def time_in_blocks(query: NormQuery, device: DeviceCost, isa: str) -> float:
    """The estimated time, in microseconds, that making the rows in each block adds to the linear."""
    blocks = _blocks(query, isa)
    at_once = BLOCKS_PER_MULTIPROCESSOR * device.threads_to_fill // LANES
    nbytes = blocks * query.affine * query.k * ITEMSIZE[query.dtype]
    if query.makes_codes:
        assert isinstance(query.m, int)
        nbytes += blocks * query.m * query.k * (ITEMSIZE[query.dtype] - 1)
    waiting = -(-blocks // at_once) * _trips(query, isa) * device.latency
    return waiting + nbytes / (ATTAINED_FRACTION * device.bandwidth) + _computing(query, device, isa)


def _blocks(query: NormQuery, isa: str) -> int:
    """Blocks along the rows of the weight."""
    return -(-query.n // (PANEL * (linear_int8.shape_of_many(isa)[0] if query.many else 1)))


def _trips(query: NormQuery, isa: str) -> int:
    """Trips to memory that a block waits for, one after the other."""
    if not query.many:
        return 1
    assert isinstance(query.m, int)
    rows, warps = min(query.m, linear_int8.ROWS_OF_MANY), linear_int8.shape_of_many(isa)[1]
    if query.makes_codes:
        at_once = warps * WARP // linear_int8.lanes_of(query.k, warps * WARP, rows)
        return -(-rows // at_once)
    shares = rows * (RowWalk.of(query.m, query.k).threads // WARP)
    return STATISTICS * -(-shares // (warps * linear_norm.SIDE_BY_SIDE))


def _computing(query: NormQuery, device: DeviceCost, isa: str) -> float:
    """The time of the arithmetic of many rows, of which each block computes its own. That of few is not counted."""
    if not query.many:
        return 0.0
    assert isinstance(query.m, int)
    rows, threads = min(query.m, linear_int8.ROWS_OF_MANY), linear_int8.shape_of_many(isa)[1] * WARP
    blocks = _blocks(query, isa) * -(-query.m // linear_int8.ROWS_OF_MANY)
    waves = max(1.0, blocks * threads / device.threads_to_fill)
    rate = ATTAINED_FRACTION * device.fp32 * threads / device.threads_to_fill
    return waves * (CODE if query.makes_codes else NORM) * rows * query.k / rate
