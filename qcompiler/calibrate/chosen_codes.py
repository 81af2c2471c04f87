"""The codes of one linear by the moments of its inputs, for every frontend: what is refused, noted and reported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from qcompiler.calibrate import clipping, gptq
from qcompiler.calibrate.gptq import Solved
from qcompiler.calibrate.levels import Float64
from qcompiler.errors import CalibrationError
from qcompiler.formats import Format, PackedTensor
from qcompiler.runtime.encoder import encode
from qcompiler.runtime.progress import note
from qcompiler.units import counted

Float32 = npt.NDArray[np.float32]

ROWS = 1 << 12
"""Rows that are measured at a time: their moments are summed up in fp32, in one product."""
FEW = 4
"""With fewer rows than this many for each column, the note says so: the codes would fit the inputs, not the model."""

NO_INPUTS = "`calibrate` gave no inputs; it is an iterable of inputs of the model"


def _in_fp32(rows: npt.NDArray[Any]) -> Float32:
    return rows.astype(np.float32)


@dataclass
class Moments:
    """X^T X of the inputs of a linear. Linears that read the same arrays (q, k and v) share it.

    `wide` gives rows in fp32, in memory that NumPy reads: of NumPy's arrays, or of another library's.
    """

    wide: Callable[[Any], Any] = _in_fp32
    x: list[Any] = field(default_factory=list)
    known: tuple[Float64, int] | None = None

    def of(self, path: str, x: list[Any]) -> tuple[Float64, int]:
        """The sums (K, K) in fp64, of products in fp32 by the library of `x`, and the number of rows.

        CalibrationError for values that are not finite.
        """
        if self.known is not None and len(x) == len(self.x) and all(a is b for a, b in zip(x, self.x, strict=True)):
            return self.known
        self.known = None  # before the next one is made: a matrix of moments may be large
        cols = x[0].shape[-1]
        total, rows = np.zeros((cols, cols)), 0
        for each in x:
            flat = each.reshape(-1, cols)
            rows += len(flat)
            for first in range(0, len(flat), ROWS):
                wide = self.wide(flat[first : first + ROWS])
                total += np.asarray(wide.T @ wide)
        if not np.isfinite(total).all():
            raise CalibrationError(f"the inputs of '{path}' are not finite, or too large for fp32, while calibrating")
        self.x, self.known = x, (total, rows)
        return self.known


def choose_codes(
    path: str, fmt: Format, values: Float32, moments: tuple[Float64, int], *, uses: int, algorithm: str = "gptq"
) -> tuple[Solved, str]:
    """The codes of `values` (rows, K) in `fmt` by GPTQ, and what the report says of them.

    `moments` are X^T X (K, K) and the number of rows; `uses` is the number of linears that read the weight.
    CalibrationError naming `path` for too few rows, and for moments without a factor.
    """
    sums, rows = moments
    cols = values.shape[1]
    if rows < cols // FEW:
        raise CalibrationError(
            f"`calibrate` gave {counted(rows, 'row')} to '{path}', which has {cols} columns; {algorithm} needs at "
            f"least {cols // FEW}, and {FEW * cols} or more to be of use. Give more or longer inputs, or "
            "algorithm='nearest'"
        )
    if rows < FEW * cols:
        note(
            f"'{path}' has {cols} columns, and `calibrate` gave it {counted(rows, 'row')}; {FEW * cols} or more are "
            "better"
        )
    importance = (np.diag(sums) / rows).astype(np.float32) if fmt.takes_importance and sums.any() else None
    nearest = encode(fmt, values, importance=importance)
    try:
        solved = gptq.solve(values, nearest, sums)
    except CalibrationError as error:
        raise CalibrationError(f"'{path}': {error}") from None
    return solved, (
        f"codes by gptq: squared error of the outputs {100 * solved.nearest_error:.2g} % -> "
        f"{100 * solved.error:.2g} %, {_told(rows, uses)}"
    )


def clip_scales(
    path: str, fmt: Format, values: Float32, moments: tuple[Float64, int], *, uses: int
) -> tuple[PackedTensor, str]:
    """The codes of `values` (rows, K) in `fmt` with scales clipped as in AWQ, and what the report says of them.

    The arguments are those of `choose_codes`.
    """
    sums, rows = moments
    found = clipping.clip(values, encode(fmt, values), sums)
    return found.packed, (
        f"{100 * found.share:.0f} % of the scales clipped: squared error of the outputs "
        f"{100 * found.nearest_error:.2g} % -> {100 * found.error:.2g} %, {_told(rows, uses)}"
    )


def _told(rows: int, uses: int) -> str:
    """Of which inputs a report speaks."""
    return f"of {counted(rows, 'row')}" + (f", by the inputs of the first of its {uses} uses" if uses > 1 else "")


__all__ = ["FEW", "NO_INPUTS", "ROWS", "Moments", "choose_codes", "clip_scales"]
