"""Calibration statistics of a linear's inputs, in little memory for any number of inputs.

The mean square of each column is the importance by which k-quants weight their errors (llama.cpp's importance matrix).
The range of all values is a histogram of magnitudes.  When a larger value comes, the bins double in width: two bins
become one, so no counted value changes its bin.  Three observers derive a clipping magnitude from it:

    minmax              the largest magnitude
    percentile[:99.9]   the magnitude that this percentage of the values does not exceed (default 99.99)
    mse                 that of 128 candidates whose int8 codes have the least squared error
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from qcompiler.errors import CalibrationError

BINS = 2048
LARGEST_CODE = 127
CANDIDATES = 128
PERCENT = 99.99

Float64 = npt.NDArray[np.float64]


@dataclass
class Magnitudes:
    """A histogram of |x|: `counts` of `BINS` bins that divide [0, limit), limit a power of two; 0 for none yet."""

    counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(BINS, np.int64))
    limit: float = 0.0
    largest: float = 0.0

    def add(self, values: npt.NDArray[np.float32]) -> None:
        """Counts more values."""
        magnitudes = np.abs(values.reshape(-1))
        largest = float(magnitudes.max(initial=0))
        self.largest = max(self.largest, largest)
        if largest >= self.limit:
            self._grow(largest)
        places = (magnitudes * np.float64(BINS / self.limit)).astype(np.int64)
        self.counts += np.bincount(places, minlength=BINS)

    def _grow(self, largest: float) -> None:
        limit = 2.0 ** (np.floor(np.log2(max(largest, 1e-30))) + 1)  # strictly above `largest`
        if self.limit:
            merged = round(limit / self.limit)
            bins = np.zeros(BINS, np.int64)
            if merged < BINS:
                sums = self.counts.reshape(-1, merged).sum(1)
                bins[: sums.size] = sums
            else:
                bins[0] = self.counts.sum()
            self.counts = bins
        self.limit = float(limit)

    def clip(self, observer: str) -> float:
        """The magnitude that becomes the largest code."""
        name, _, value = observer.partition(":")
        if name == "minmax" or not self.largest:
            return self.largest
        if name == "percentile":
            total = np.cumsum(self.counts)
            place = int(np.searchsorted(total, total[-1] * (float(value) if value else PERCENT) / 100))
            return min((place + 1) * self.limit / BINS, self.largest)
        centres: Float64 = (np.arange(BINS, dtype=np.float64) + 0.5) * (self.limit / BINS)
        candidates = self.largest * np.arange(1, CANDIDATES + 1) / CANDIDATES
        errors = [self._error(centres, float(clip) / LARGEST_CODE) for clip in candidates]
        return float(candidates[int(np.argmin(errors))])

    def _error(self, centres: Float64, step: float) -> float:
        decoded = np.minimum(np.rint(centres / step), LARGEST_CODE) * step
        return float((self.counts * np.square(centres - decoded)).sum())


@dataclass
class InputStatistics:
    """Statistics of the inputs of one linear: `squares` (K,) summed over `rows` rows, and magnitudes if requested."""

    squares: Float64
    rows: int = 0
    magnitudes: Magnitudes | None = None

    @staticmethod
    def of(cols: int, *, magnitudes: bool) -> InputStatistics:
        """Empty statistics."""
        return InputStatistics(np.zeros(cols), 0, Magnitudes() if magnitudes else None)

    def add(self, path: str, x: npt.NDArray[np.float32]) -> None:
        """Adds rows (n, K). CalibrationError naming the module if a value is not finite."""
        squares = np.einsum("ij,ij->j", x, x, dtype=np.float64)
        if not np.isfinite(squares).all():
            raise CalibrationError(
                f"an input of '{path}' holds NaN or infinity (column {int(np.flatnonzero(~np.isfinite(squares))[0])}); "
                "leave that input out of `calibrate`, or repair the model"
            )
        self.squares += squares
        self.rows += len(x)
        if self.magnitudes is not None:
            self.magnitudes.add(x)

    @property
    def importance(self) -> npt.NDArray[np.float32] | None:
        """The mean square of each column, fp32 (K,). None if all inputs were zero, as for an expert that no input
        reaches: a search for scales needs an error to weight."""
        found = (self.squares / max(self.rows, 1)).astype(np.float32)
        return found if found.any() else None
