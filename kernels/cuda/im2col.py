"""im2col on CUDA: a linear that reads its rows as windows of an image. im2col.cuh has the device code."""

from __future__ import annotations

from qcompiler.errors import KernelSelectionError
from qcompiler.kernels.text import c_dim
from qcompiler.plan.kernel import KernelSpec, Operand
from qcompiler.plan.kinds.linear import Window

PLACE_BYTES = 24
"""The size of im2col.cuh's `qc_window_place`."""

LARGEST_NUMBER = 2**31 - 1
"""The largest size of a window that im2col.cuh can hold."""


def check(spec: KernelSpec, window: Window) -> None:
    """KernelSelectionError for windows whose numbers do not fit 32 bits."""
    numbers = (*window.kernel, *window.strides, *window.padding, *window.dilation, window.image[3])
    if max(numbers) > LARGEST_NUMBER or min(window.padding) < 0:
        raise KernelSelectionError(f"kernel '{spec.name}': the windows of {numbers} need more than 32 bits to count")


def declaration(image: Operand, window: Window) -> str:
    """The statement that declares `window`, an instance of im2col.cuh's `qc_window`."""
    (_, height, width, channels), steps = window.image, image.strides[:3]
    (top, left), (dy, dx), (sy, sx) = window.padding, window.dilation, window.strides
    longs = [height, width, *steps, *window.size]
    literals = [channels, window.kernel[1], sy, sx, top, left, dy, dx]
    return f"const qc_window window = {{{', '.join([*map(c_dim, longs), *map(str, literals)])}}};"
