"""A matrix whose codes and scales are learned by gradients: what is stored, as a differentiable function in torch.

    units  = (wanted - offset) / slope                    in units of the codes' values
    code   = nearest(units + offsets * gap)               offsets in [-0.5, 0.5] of the gap to the next code
    value  = slope * of_code[code] + offset               slope = scale * factor, as it is stored

The gradient passes through the rounding as if it were not there ("straight through"), except where a code is clipped.
`offsets` start at 0, and `factors` at 1: the start is what rounding `wanted` to the nearest code gives.  Formats whose
scales are codes themselves have only offsets (levels.py); the others learn a factor per group (free_scales.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from qcompiler.calibrate.free_scales import FreeScales, assemble, scales_of, why_no_scales
from qcompiler.calibrate.levels import Float64, Levels, with_codes
from qcompiler.formats import PackedTensor


class SoftMatrix:
    """The matrix (rows, K) that `start` encodes, and whose values before rounding are `wanted` (rows, K)."""

    def __init__(self, start: PackedTensor, wanted: Any) -> None:
        self.start = start
        rows, cols = start.rows, start.cols
        self.offsets = torch.zeros(rows, cols, requires_grad=True)
        self.factors: torch.Tensor | None = None
        self.free = None if why_no_scales(start.format, cols) else FreeScales.of(start.format, cols)
        if self.free is not None:
            self.shape = (-1, self.free.size)
            scales, zeros = scales_of(start)
            self.scales = torch.from_numpy(np.ascontiguousarray(scales))[:, None]
            self.zeros = torch.from_numpy(np.ascontiguousarray(zeros))[:, None]
            self.factors = torch.ones_like(self.scales, requires_grad=True)
            of_code = self.free.of_code
        else:
            self.shape = (rows, cols)
            levels = Levels.of(start)
            self.slope, self.offset = (_float(each) for each in (levels.slope, levels.offset))
            of_code = levels.of_code.astype(np.float32)
        codes = self.free.codes if self.free is not None else levels.codes
        apart = np.diff(of_code, prepend=-np.inf) > 0  # floats have two zeros
        self.codes, of_code = codes[apart], of_code[apart]
        self.of_code = torch.from_numpy(of_code)
        self.whole = bool((np.diff(of_code) == 1).all())
        self.wanted = torch.from_numpy(np.ascontiguousarray(wanted, np.float32)).reshape(self.shape)

    @staticmethod
    def of(packed: PackedTensor) -> SoftMatrix:
        """A matrix that is what its codes decode to."""
        return SoftMatrix(packed, packed.format.decode(packed))

    @property
    def learned(self) -> list[torch.Tensor]:
        return [self.offsets, *([self.factors] if self.factors is not None else [])]

    def limit(self) -> None:
        """Brings what was learned back into its range."""
        with torch.no_grad():
            self.offsets.clamp_(-0.5, 0.5)
            if self.factors is not None:
                self.factors.clamp_(0.5, 1.5)

    def values(self) -> torch.Tensor:
        """What the codes decode to (rows, K) in fp32, with gradients of `learned`."""
        slope, offset = self._line()
        units, places, gap = self._places(slope, offset)
        soft = units + self.offsets.reshape(self.shape) * gap
        inside = (soft >= self.of_code[0] - 0.5 * gap) & (soft <= self.of_code[-1] + 0.5 * gap)
        hard = self.of_code[places] if not self.whole else places.to(torch.float32) + self.of_code[0]
        chosen = torch.where(inside, soft + (hard - soft).detach(), hard)
        return (chosen * slope + offset).reshape(self.start.rows, self.start.cols)

    def packed(self) -> PackedTensor:
        """What was learned, encoded."""
        rows, cols = self.start.rows, self.start.cols
        with torch.no_grad():
            slope, offset = self._line()
            codes = self.codes[self._places(slope, offset)[1].numpy()].reshape(rows, cols)
        if self.free is None:
            return with_codes(self.start, codes)
        scales, zeros = slope.reshape(-1).numpy(), self.zeros.reshape(-1).numpy()
        return assemble(self.start.format, rows, cols, codes, scales, zeros)

    def _line(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.free is None:
            return self.slope, self.offset
        assert self.factors is not None
        exact = self.scales * self.factors
        stored = torch.from_numpy(self.free.storable(exact.detach().numpy()))
        slope = exact + (stored - exact).detach()
        return slope, -self.zeros * slope

    def _places(self, slope: torch.Tensor, offset: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """The wanted values in units of the codes' values, the codes' places, and the gap to the next code."""
        units = (self.wanted - offset) / torch.where(slope == 0, 1.0, slope)
        with torch.no_grad():
            moved, last = units.detach(), len(self.of_code) - 1
            offsets = self.offsets.detach().reshape(self.shape)
            if self.whole:
                places = (moved + offsets - self.of_code[0]).round_().clamp_(0, last)
                return units, places.to(torch.int64), 1.0
            above = torch.searchsorted(self.of_code, moved.contiguous()).clamp_(1, last)
            low, high = self.of_code[above - 1], self.of_code[above]
            gap = high - low
            places = (above - 1 + (moved - low) / gap + offsets).round_().clamp_(0, last).to(torch.int64)
        return units, places, gap


def _float(values: Float64) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, np.float32))


__all__ = ["SoftMatrix"]
