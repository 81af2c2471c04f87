"""What each step of a call wrote: for `Program.errors`, which compares it with the model's own values."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qcompiler.plan.dims import Dim, dim
from qcompiler.plan.kernel import ITEMSIZE
from qcompiler.plan.lookup import PlanIndex
from qcompiler.plan.plan import Copy, Launch, Plan, Select, Step, TorchCall, View
from qcompiler.plan.view_regions import is_packed
from qcompiler.plan.weights import NUMPY_DTYPES

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class StepResult:
    """A copy of one view that a step wrote: the step's number in its entry point, the buffer, the elements."""

    step: int
    buffer: str
    values: Array


def written_views(plan: Plan, step: Step) -> tuple[View, ...]:
    """The views that a step writes, without those that hold codes of a format."""
    match step:
        case Launch() | Select():
            kernel = step.kernel if isinstance(step, Launch) else step.cases[0].kernel
            operands = PlanIndex.of(plan).kernels[kernel].operands
            views = [v for o, v in zip(operands, step.operands, strict=True) if "w" in o.access]
        case Copy():
            views = [step.target]
        case TorchCall():
            views = list(step.outputs)
        case _:
            views = []
    return tuple(view for view in views if not is_packed(view))


Read = Callable[[int, int], Array]
"""(address, number of bytes) -> these bytes, as uint8."""


def of_host(address: int, nbytes: int) -> Array:
    """Bytes of host memory: a view, not a copy."""
    memory = (ctypes.c_char * nbytes).from_address(address)
    return np.frombuffer(memoryview(memory).cast("B"), np.uint8)


def copied(view: View, address: int, symbols: Mapping[str, int], read: Read = of_host) -> Array:
    """A copy of the elements of a view, in the view's shape. `address` is that of its first element, for `read`."""
    shape, strides = _sizes(view.shape, symbols), _sizes(view.strides, symbols)
    if 0 in shape:
        return np.empty(shape, NUMPY_DTYPES[view.dtype])
    size = ITEMSIZE[view.dtype]
    reach = [(n - 1) * stride for n, stride in zip(shape, strides, strict=True)]
    low, high = sum(min(each, 0) for each in reach), sum(max(each, 0) for each in reach)
    flat: Array = read(address + low * size, (high - low + 1) * size).view(NUMPY_DTYPES[view.dtype])
    return np.lib.stride_tricks.as_strided(flat[-low:], shape, [stride * size for stride in strides]).copy()


def _sizes(sizes: Sequence[Dim], symbols: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(dim(each).evaluate(symbols) for each in sizes)


__all__ = ["Read", "StepResult", "copied", "of_host", "written_views"]
