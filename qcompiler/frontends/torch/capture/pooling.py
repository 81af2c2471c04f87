"""Pooling of dynamic sizes under torch.export: output sizes that follow the input's, without a guard on the size.

With `ceil_mode` torch drops a last window that would begin in the padding behind the input.  Whether there is one
depends on the size, so torch decides it for the traced size and guards the decision, which narrows the dimension.  But
no window begins there at any size if

    stride <= dilation * (kernel - 1) + 1 - padding

since the last of floor((size + 2 padding - dilation (kernel - 1) - 1 + stride - 1) / stride) + 1 windows begins at most
at size + 2 padding - dilation (kernel - 1) + stride - 2, which is then less than size + padding.  That holds for all
usual poolings (kernel 3, stride 2, padding 0 or 1; kernel 2, stride 2).  For others torch's guard stays, and the error
names the line.

torch's `max_pool1d` reads its size as a number, so every dynamic size becomes a constant.  The variant that also
returns indices does not, and replaces it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch._meta_registrations as meta
from torch.nn import functional
from torch.overrides import TorchFunctionMode


@contextlib.contextmanager
def sizes_that_follow() -> Iterator[None]:
    """Active while a model is traced."""
    with mock.patch.object(meta, "pooling_output_shape_pad_lr", _size), _WithIndices():
        yield


_torchs_size: Callable[..., Any] = meta.pooling_output_shape_pad_lr


def _size(size: Any, kernel: int, before: int, after: int, stride: int, dilation: int, ceil_mode: bool) -> Any:
    reach = dilation * (kernel - 1) + 1
    if ceil_mode and isinstance(size, torch.SymInt) and stride <= reach - before:
        return (size + before + after - reach + stride - 1) // stride + 1
    return _torchs_size(size, kernel, before, after, stride, dilation, ceil_mode)


class _WithIndices(TorchFunctionMode):
    """max_pool1d as the first result of max_pool1d_with_indices, if a size is dynamic."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.max_pool1d, functional.max_pool1d):
            x = args[0] if args else kwargs["input"]
            if any(isinstance(size, torch.SymInt) for size in x.shape):
                both = kwargs.pop("return_indices", False)
                found = functional.max_pool1d_with_indices(*args, **kwargs)
                return found if both else found[0]
        return func(*args, **kwargs)
