"""HQQ: scales, zero points and clipping that lessen the error of the weights themselves, without data.

    start    the encoder's scales times each of `FACTORS`: the best for each group stays
    step     codes = nearest;  weight of an element = |w - value| ** (NORM - 2)
             scale, zero = weighted least squares of w over the codes

The error is the sum of ``|w - value| ** NORM``.  A half-quadratic form turns such a norm into a sequence of least
squares problems.  A step that does not lessen the error of a group is not taken for it.  The result is ordinary codes
with other scales, rounded as they are stored.

Source: Badri & Shaji, "Half-Quadratic Quantization of Large Machine Learning Models", 2023.  They take a norm of 0.7 in
the additive form, fit only the zero point, and keep it in floating point.  Here zero points are whole numbers, so
scales are fitted, too; and norms of 1 and 0.7 made the tiny Llama in int4 worse than nearest codes, so large errors
count more, not less (the multiplicative form: Geman & Reynolds 1992).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qcompiler.calibrate.free_scales import Float32, FreeScales, assemble, scales_of
from qcompiler.formats import PackedTensor

NORM = 3.0
"""Chosen on the tiny Llama among 2, 2.4, 3 and 4: 4 is a little better in int4, and worse in int3."""
FACTORS = np.linspace(0.5, 1.1, 25, dtype=np.float32)
"""Of the encoder's scale: 0.5 clips half of the range, and above 1 signed formats use both ends of their codes."""
SHIFTS = (0, -1, 1)
"""Of the encoder's zero point, for those who ask for it.  Fitting alone never moves one: the errors of nearest codes
have no mean.  GPTQ begins better with it; by itself it made the tiny Llama in int2 worse (0.75 of nearest codes' KL,
where it was 0.72)."""
STEPS = 10
SETTINGS = (NORM, FACTORS.tolist(), SHIFTS, STEPS)
"""What a result depends on, for those who keep results."""
ELEMENTS = 1 << 20
"""Elements that are fitted at a time: it bounds the memory."""


def solve(weights: Float32, nearest: PackedTensor, shifts: Sequence[int] = (0,)) -> PackedTensor:
    """The matrix `weights` (rows, K) with other scales and codes than `nearest` has, which is its usual encoding.

    `shifts` are added to zero points, each in turn.
    """
    fmt, (rows, cols) = nearest.format, weights.shape
    scheme = FreeScales.of(fmt, cols)
    scales, zeros = scales_of(nearest)
    codes = np.empty((scales.size, scheme.size), np.uint8)
    groups = weights.reshape(-1, scheme.size)
    count = max(ELEMENTS // scheme.size, 1)
    for first in range(0, scales.size, count):
        part = slice(first, first + count)
        fit = _Fit(scheme, groups[part].astype(np.float32, copy=False), scales[part], zeros[part])
        fit.clip(shifts)
        fit.refine()
        scales[part], zeros[part] = fit.scales, fit.zeros
        codes[part] = scheme.codes[scheme.nearest(fit.groups, fit.scales, fit.zeros)]
    return assemble(fmt, rows, cols, codes.reshape(rows, cols), scales, zeros)


class _Fit:
    """Groups (n, size) with the best scales and zero points (n,) so far, and their errors."""

    def __init__(self, scheme: FreeScales, groups: Float32, scales: Float32, zeros: Float32) -> None:
        self.scheme, self.groups = scheme, groups
        self.scales, self.zeros = scales.copy(), zeros.copy()
        self.errors = self._values(scales, zeros)[1]

    def _values(self, scales: Float32, zeros: Float32) -> tuple[Float32, Float32]:
        """What codes stand for in units of the scale, less the zero point (n, size), and the error of each group."""
        units = self.scheme.of_code[self.scheme.nearest(self.groups, scales, zeros)] - zeros[:, None]
        errors = np.abs(self.groups - units * scales[:, None])
        return units, (errors ** np.float32(NORM)).sum(axis=1)

    def _take(self, scales: Float32, zeros: Float32) -> None:
        scales = self.scheme.storable(scales)
        errors = self._values(scales, zeros)[1]
        better = errors < self.errors
        for mine, other in ((self.scales, scales), (self.zeros, zeros), (self.errors, errors)):
            mine[better] = other[better]

    def clip(self, shifts: Sequence[int]) -> None:
        start, zeros = self.scales.copy(), self.zeros.copy()
        for shift in shifts if self.scheme.zeros else (0,):
            shifted = np.clip(zeros + np.float32(shift), 0, self.scheme.last)
            for factor in FACTORS:
                self._take(start * factor, shifted)
                if not self.scheme.zeros and self.scheme.whole:
                    self._take(-start * factor, shifted)

    def refine(self) -> None:
        scales, zeros = self.scales.copy(), self.zeros.copy()
        for _ in range(STEPS):
            units = self._values(scales, zeros)[0]
            weights = np.abs(self.groups - units * scales[:, None]) ** np.float32(NORM - 2)
            scales, zeros = self._fitted(units + zeros[:, None], weights, scales, zeros)
            self._take(scales, zeros)

    def _fitted(self, codes: Float32, weights: Float32, scales: Float32, zeros: Float32) -> tuple[Float32, Float32]:
        """Scales and zero points by weighted least squares, for the values of codes (n, size)."""
        if self.scheme.zeros:
            shifts, sums = codes - self.groups / scales[:, None], weights.sum(axis=1)
            mean = np.divide((weights * shifts).sum(axis=1), sums, out=zeros.copy(), where=sums > 0)
            zeros = np.clip(np.rint(np.where(np.isfinite(mean), mean, zeros)), 0, self.scheme.last)
        units = codes - zeros[:, None]
        squares = (weights * np.square(units)).sum(axis=1)
        found = np.divide((weights * units * self.groups).sum(axis=1), squares, out=scales.copy(), where=squares > 0)
        return self.scheme.storable(np.where(np.isfinite(found) & (found != 0), found, scales)), zeros


__all__ = ["SETTINGS", "SHIFTS", "solve"]
