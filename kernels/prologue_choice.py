"""Where a norm, or what makes rows of int8, pays as the prologue of a linear: the limits of the kernels, and an
estimate of the time that it takes.

On a CPU the calling thread makes the rows, as it does for so few rows in a kernel of its own: nothing is computed
twice. On a GPU every block of the linear makes all rows. This saves a launch, and costs
- a trip to memory in each wave of blocks, for the statistics;
- the bytes of the norm's weight, bias and residual in each block, counted as if they came from memory. The elements of
  x are read by each block in any case, the second time from the cache of its multiprocessor;
- for rows of int8 what the elements of x are larger than their codes, which each block would read otherwise.
No GPU has measured this yet.
"""

from __future__ import annotations

from dataclasses import dataclass

from qcompiler.kernels.cost import ATTAINED_FRACTION, ROUND_TRIPS, DeviceCost, device_cost
from qcompiler.kernels.cuda.linear_fma import FEW_ROWS
from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel import ITEMSIZE, DType
from qcompiler.plan.kinds.linear import MOST_NORMALISED

PANEL = 16
"""Rows of the weight that a block of a GPU multiplies."""

BLOCKS_PER_MULTIPROCESSOR = 3
"""Blocks that run at once on a multiprocessor (linear_fma.py, `resident`)."""

LANES = 128
"""Threads that fill a multiprocessor (`DeviceCost.threads_to_fill`)."""


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
    """Whether the linear makes rows of int8."""


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
    if query.m > FEW_ROWS:
        return f"there are {query.m} rows, and kernels for up to {FEW_ROWS} {what}"
    if not query.constant_weight:
        return f"the weight is computed, and kernels for constant ones {what}"
    for isa in query.isas:
        device = device_cost(isa, query.kind)
        saved, costs = device.launch + ROUND_TRIPS * device.latency, time_in_blocks(query, device)
        if costs > saved:
            return (
                f"estimated for {isa}, {-(-query.n // PANEL)} blocks take {costs:.1f} us to "
                f"{'make the rows' if query.makes_codes else 'normalise'}, and a launch for it takes {saved:.1f} us"
            )
    return None


def time_in_blocks(query: NormQuery, device: DeviceCost) -> float:
    """The estimated time, in microseconds, that making the rows in each block adds to the linear."""
    blocks = -(-query.n // PANEL)
    at_once = BLOCKS_PER_MULTIPROCESSOR * device.threads_to_fill // LANES
    nbytes = blocks * query.affine * query.k * ITEMSIZE[query.dtype]
    if query.makes_codes:
        assert isinstance(query.m, int)
        nbytes += blocks * query.m * query.k * (ITEMSIZE[query.dtype] - 1)
    return -(-blocks // at_once) * device.latency + nbytes / (ATTAINED_FRACTION * device.bandwidth)
