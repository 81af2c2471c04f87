"""What some of torch's kernels leave to their callers to check: conditions on the calls in a program's torch regions.

PyTorch checks the arguments of its public functions there, and lets the operators that they end in trust what they are
given: `torch.fft.fft` sorts its dims out, `aten._fft_c2c` indexes with them.  A program file names such operators
directly.  Each condition here was found by calls that read or wrote memory that was not theirs; what torch checks
itself is not repeated.  `tests/fallback/operatorfuzz/sweep.py` looks for more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Condition = Callable[..., bool]


def _fft(x: torch.Tensor, dim: Sequence[int], normalization: int, *_: Any) -> bool:
    """Each dim once, counted from 0, and none empty; normalisation by 1, 1/sqrt(n) or 1/n."""
    known = all(0 <= d < x.dim() and x.shape[d] for d in dim)
    return known and len(set(dim)) == len(dim) and normalization in (0, 1, 2)


def _fft_c2r(x: torch.Tensor, dim: Sequence[int], normalization: int, last_dim_size: int) -> bool:
    """The last dim of the input holds half of the frequencies of `last_dim_size` samples."""
    if not _fft(x, dim, normalization):
        return False
    return not dim or (last_dim_size > 0 and x.shape[dim[-1]] == last_dim_size // 2 + 1)


def _grid_sampler(x: torch.Tensor, grid: torch.Tensor, interpolation_mode: int, padding_mode: int, *_: Any) -> bool:
    return interpolation_mode in (0, 1, 2) and padding_mode in (0, 1, 2)


def _group_norm(x: torch.Tensor, weight: Any, bias: Any, N: int, C: int, HxW: int, group: int, *_: Any) -> bool:
    """The sizes that are given are the input's, and each parameter has one value for each channel; all contiguous."""
    if (
        x.dim() < 2
        or not x.is_contiguous()
        or group < 1
        or C % group
        or tuple(x.shape[:2]) != (N, C)
        or math.prod(x.shape[2:]) != HxW
    ):
        return False
    return _are_of_size(C, weight, bias)


def _batch_norm(x: torch.Tensor, weight: Any, bias: Any, mean: Any, var: Any, *_: Any) -> bool:
    """Each parameter and each statistic has one value for each channel."""
    return x.dim() >= 2 and _are_of_size(x.shape[1], weight, bias, mean, var)


def _are_of_size(size: int, *vectors: torch.Tensor | None) -> bool:
    return all(v is None or (tuple(v.shape) == (size,) and v.is_contiguous()) for v in vectors)


def _has_no_repeats(x: torch.Tensor, *_: Any, **__: Any) -> bool:
    """No dim along which all elements are one in memory: `median` counts through them as if they were many."""
    return all(stride or size <= 1 for stride, size in zip(x.stride(), x.shape, strict=True))


def _is_finite(x: torch.Tensor, *_: Any) -> bool:
    """LAPACK's eigenvalue solvers are not made for anything else, and crash."""
    return bool(torch.isfinite(x).all())


def _upsample_aa(
    x: torch.Tensor, output_size: Sequence[int], align_corners: bool,
    scales_h: float | None = None, scales_w: float | None = None,
) -> bool:  # fmt: skip
    """No output beyond what the factors make of the input."""
    if x.dim() != 4 or len(output_size) != 2:
        return False
    given = zip(output_size, x.shape[2:], (scales_h, scales_w), strict=True)
    return all(factor is None or (0 < factor < 1e6 and size <= before * factor) for size, before, factor in given)


CONDITIONS: Mapping[str, Condition] = {
    "aten._fft_c2c.default": _fft,
    "aten._fft_r2c.default": _fft,
    "aten._fft_c2r.default": _fft_c2r,
    "aten.grid_sampler_2d.default": _grid_sampler,
    "aten.grid_sampler_3d.default": _grid_sampler,
    "aten.native_group_norm.default": _group_norm,
    "aten._native_batch_norm_legit_no_training.default": _batch_norm,
    "aten.median.dim": _has_no_repeats,
    "aten.nanmedian.dim": _has_no_repeats,
    "aten._linalg_eigvals.default": _is_finite,
    "aten.linalg_eigvals.default": _is_finite,
    "aten.linalg_eig.default": _is_finite,
    "aten._upsample_bilinear2d_aa.default": _upsample_aa,
    "aten._upsample_bicubic2d_aa.default": _upsample_aa,
}
"""By operator and overload: whether a call may be made, from its arguments."""


def condition_of(overload: Any) -> Callable[[Sequence[Any], Mapping[str, Any]], bool] | None:
    """What the arguments of a call of torch's `overload` have to meet; None if torch's kernel checks them itself."""
    condition = CONDITIONS.get(str(overload))
    if condition is None:
        return None
    arguments = overload._schema.arguments

    def is_met(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        given = dict(zip((a.name for a in arguments), args, strict=False)) | dict(kwargs)
        try:
            return condition(*(given.get(a.name, a.default_value) for a in arguments))
        except (TypeError, AttributeError):  # an argument of another kind
            return False

    return is_met
