"""Linears that read the windows of an image in place: geometries, and the comparison with NumPy in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from qcompiler.plan.kernel import KernelSpec, Operand
from qcompiler.plan.kinds.linear import LinearKernel, Window

Array = npt.NDArray[Any]
DTYPES: dict[str, Any] = {"f32": np.float32, "bf16": ml_dtypes.bfloat16}


@dataclass(frozen=True)
class Case:
    """A geometry; `gap` are elements between neighbouring pixels of the image, so that a tap is a run of its own."""

    name: str
    channels: int
    kernel: tuple[int, int]
    strides: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    dtype: Any = "f32"
    m_class: Any = "large"
    gap: int = 0
    n: int = 37

    def size(self, height: int, width: int) -> tuple[int, int]:
        def count(axis: int, extent: int) -> int:
            reach = self.dilation[axis] * (self.kernel[axis] - 1) + 1
            return (extent + 2 * self.padding[axis] - reach) // self.strides[axis] + 1

        return count(0, height), count(1, width)


CASES = (
    Case("padded", 16, (3, 3), padding=(1, 1)),
    Case("first_layer", 3, (7, 7), (2, 2), (3, 3)),
    Case("wide_border", 5, (2, 3), padding=(4, 5)),
    Case("dilated", 21, (3, 2), (1, 2), (2, 1), (2, 3)),
    Case("gaps", 7, (3, 3), padding=(1, 1), gap=5),
    Case("line", 33, (1, 5), (1, 3), (0, 2)),
    Case("many_columns", 130, (3, 3), padding=(1, 1)),  # K = 1170 is cut into blocks that end inside of a run
    Case("few_rows", 16, (3, 3), padding=(1, 1), m_class="2-8"),
    Case("narrow", 19, (3, 3), (2, 1), (1, 1), dtype="bf16"),
    Case("narrow_few_rows", 19, (3, 3), (2, 1), (1, 1), dtype="bf16", m_class="2-8"),
)


def spec_of(case: Case) -> KernelSpec:
    """Sizes are symbols: b images of h x w, r x q windows each."""
    c, k = case.channels, case.kernel[0] * case.kernel[1] * case.channels
    step = c + case.gap
    window = Window(
        image=("b", "h", "w", c), size=("r", "q"), kernel=case.kernel, strides=case.strides, padding=case.padding,
        dilation=case.dilation,
    )  # fmt: skip
    strides = (f"{step}*h*w", f"{step}*w", step, 1)
    operands = (
        Operand(name="x", dtype=case.dtype, access="r", shape=("b", "h", "w", c), strides=strides),
        Operand(name="w", dtype=case.dtype, access="r", shape=(case.n, k), strides=(k, 1)),
        Operand(name="out", dtype="f32", access="w", shape=("b*q*r", case.n), strides=(case.n, 1)),
    )  # fmt: skip
    body = LinearKernel(m="b*q*r", n=case.n, k=k, m_class=case.m_class, has_bias=False, window=window)
    return KernelSpec(name=case.name, symbols=("b", "h", "w", "r", "q"), operands=operands, body=body)


def rows_of(case: Case, image: Array, size: tuple[int, int]) -> Array:
    """Every window by two loops over its taps."""
    (top, left), (dy, dx), (sy, sx) = case.padding, case.dilation, case.strides
    padded = np.pad(image, ((0, 0), (top, top), (left, left), (0, 0)))
    taps = [
        padded[:, y * dy : y * dy + (size[0] - 1) * sy + 1 : sy, x * dx : x * dx + (size[1] - 1) * sx + 1 : sx]
        for y in range(case.kernel[0])
        for x in range(case.kernel[1])
    ]
    return np.concatenate(taps, axis=-1).reshape(-1, len(taps) * case.channels)


def check(kernels: Any, case: Case) -> None:
    rng = np.random.default_rng(0)
    for batch, height, width in ((1, 7, 7), (2, 9, 11), (3, 7, 8)):
        size, dtype = case.size(height, width), DTYPES[case.dtype]
        wide = rng.standard_normal((batch, height, width, case.channels + case.gap)).astype(dtype)
        wide[..., case.channels :] = np.nan  # between the pixels: never read
        weight = rng.standard_normal((case.n, spec_of(case).body.k)).astype(dtype)
        image = wide[..., : case.channels].astype(np.float64)
        wanted = rows_of(case, image, size) @ weight.astype(np.float64).T

        def operands(wide: Array = wide, weight: Array = weight, shape: Any = wanted.shape) -> list[Array]:
            return [wide, weight, np.full(shape, np.nan, np.float32)]

        found = kernels.run_both(case.name, operands, symbols=(batch, height, width, *size))[-1]
        error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
        assert error <= 1e-6, f"{case.name} of {batch} x {height} x {width}: relative error {error:.2e}"
