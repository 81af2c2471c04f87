"""Whether an answer is the one that was wanted, and if not, how it is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from qcompiler.frontends.torch.common.values import to_numpy

Array = Any


def difference(got: Array, wanted: torch.Tensor, tolerance: torch.Tensor | None) -> str | None:
    """None where `got` (NumPy or torch) equals `wanted`: to the bit but for the sign of zero if `tolerance` is None."""
    array = to_numpy(got) if isinstance(got, torch.Tensor) else np.asarray(got)
    expected = to_numpy(wanted)
    if array.dtype != expected.dtype or array.shape != expected.shape:
        return f"is {array.dtype}{array.shape}, not {expected.dtype}{expected.shape}"
    if not expected.size:
        return None
    if not wanted.is_floating_point():
        wrong = array != expected
        return _first(wrong, array, expected, None) if wrong.any() else None
    a, w = array.astype(np.float64), expected.astype(np.float64)
    if tolerance is None:
        wrong = (a != w) & ~(np.isnan(a) & np.isnan(w))
        return _first(wrong, array, expected, None) if wrong.any() else None
    limit = tolerance.numpy()
    finite = np.isfinite(w)
    with np.errstate(invalid="ignore"):
        wrong = np.where(finite, ~(np.abs(a - w) <= limit), (a != w) & ~(np.isnan(a) & np.isnan(w)))
    return _first(wrong, array, expected, limit) if wrong.any() else None


def _first(wrong: Array, got: Array, wanted: Array, limit: Array | None) -> str:
    """The worst element in words."""
    places = np.argwhere(wrong)
    place = tuple(int(i) for i in places[0])
    if limit is not None:
        with np.errstate(invalid="ignore"):
            excess = np.where(wrong, np.abs(got.astype(np.float64) - wanted.astype(np.float64)) / limit, 0)
        place = tuple(
            int(i) for i in np.unravel_index(int(np.nanargmax(np.nan_to_num(excess, nan=np.inf))), wrong.shape)
        )
    allowed = (
        ""
        if limit is None
        else f", off by {abs(float(got[place]) - float(wanted[place])):.3g}, allowed {limit[place]:.3g}"
    )
    return f"{len(places)} of {wanted.size} differ; at {list(place)}: {got[place]}, not {wanted[place]}{allowed}"
