"""A matrix whose codes and scales are learned by gradients: what is stored, as a differentiable function in torch.

    code   = nearest(place)                               places count the codes, in the order of their values
    value  = slope * of_code[code] + offset               slope = scale * factor, as it is stored

The gradient passes through the rounding as if it were not there ("straight through"): that of a place is the gap
between the two codes beside it, times the slope.  Places stay within half a gap of the lowest and the highest code, so
that no gradient is lost where a code is clipped.  Formats whose scales are codes themselves have only places
(levels.py); the others learn a factor per group, too (free_scales.py), which moves values and no codes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from qcompiler.calibrate import gptq
from qcompiler.calibrate.free_scales import FreeScales, assemble, scales_of, why_no_scales
from qcompiler.calibrate.levels import Float64, Levels, with_codes
from qcompiler.formats import PackedTensor

INSIDE = 0.49
"""How far a place may begin from its code, in gaps: less than a half, so that it begins as this code."""


class SoftMatrix:
    """A matrix (rows, K) that begins as `start`. Its codes were rounded from the values `rounded` (rows, K)."""

    def __init__(self, start: PackedTensor, rounded: Any) -> None:
        self.start = start
        rows, cols = start.rows, start.cols
        self.factors: torch.Tensor | None = None
        self.free = None if why_no_scales(start.format, cols) else FreeScales.of(start.format, cols)
        if self.free is not None:
            self.shape = (-1, self.free.size)
            scales, zeros = scales_of(start)
            self.scales = torch.from_numpy(np.ascontiguousarray(scales))[:, None]
            self.zeros = torch.from_numpy(np.ascontiguousarray(zeros))[:, None]
            self.factors = torch.ones_like(self.scales, requires_grad=True)
            codes, of_code = self.free.codes, self.free.of_code
        else:
            self.shape = (rows, cols)
            levels = Levels.of(start)
            self.slope, self.offset = (_float(each) for each in (levels.slope, levels.offset))
            codes, of_code = levels.codes, levels.of_code.astype(np.float32)
        apart = np.diff(of_code, prepend=-np.inf) > 0  # floats have two zeros
        self.codes, self.of_code = codes[apart], torch.from_numpy(of_code[apart])
        self.gaps = self.of_code.diff()
        self.whole = bool((self.gaps == 1).all())
        begun = np.zeros(256, np.float32)
        begun[codes] = np.cumsum(apart) - 1
        begin = torch.from_numpy(begun[gptq.codes_of(start)]).reshape(self.shape)
        found = self._places(torch.from_numpy(np.ascontiguousarray(rounded, np.float32)).reshape(self.shape))
        self.places = (begin + (found - begin).clamp_(-INSIDE, INSIDE)).requires_grad_()

    @property
    def learned(self) -> list[torch.Tensor]:
        return [self.places, *([self.factors] if self.factors is not None else [])]

    def limit(self) -> None:
        """Brings what was learned back into its range."""
        with torch.no_grad():
            self.places.clamp_(-0.5, len(self.of_code) - 0.5)
            if self.factors is not None:
                self.factors.clamp_(0.5, 1.5)

    def values(self) -> torch.Tensor:
        """What the codes decode to (rows, K) in fp32, with gradients of `learned`."""
        slope, offset = self._line()
        moved = self.places - self.places.detach()  # zero, with the gradient of the places
        if self.whole:
            chosen = self._nearest().to(torch.float32) + self.of_code[0] + moved
        else:
            between = self.places.detach().floor().clamp_(0, len(self.gaps) - 1).to(torch.int64)
            chosen = self.of_code[self._nearest()] + self.gaps[between] * moved
        return (chosen * slope + offset).reshape(self.start.rows, self.start.cols)

    def packed(self) -> PackedTensor:
        """What was learned, encoded."""
        rows, cols = self.start.rows, self.start.cols
        with torch.no_grad():
            slope, _ = self._line()
            codes = self.codes[self._nearest().numpy()].reshape(rows, cols)
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

    def _nearest(self) -> torch.Tensor:
        """The place of each code."""
        return self.places.detach().round().clamp_(0, len(self.of_code) - 1).to(torch.int64)

    def _places(self, values: torch.Tensor) -> torch.Tensor:
        """The places of values, between codes and beyond them on the line through the two nearest codes."""
        with torch.no_grad():
            slope, offset = self._line()
            units = (values - offset) / torch.where(slope == 0, 1.0, slope)
            if self.whole:
                return units.sub_(self.of_code[0])
            below = torch.searchsorted(self.of_code, units.contiguous()).clamp_(1, len(self.gaps)) - 1
            return below + (units - self.of_code[below]) / self.gaps[below]


def _float(values: Float64) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, np.float32))


__all__ = ["SoftMatrix"]
