"""Checkpoints with small floats: fp8 with scales of any kind, nvfp4 of two conventions, MX blocks.

    fp8     weight float8 (N, K);  scale () or (1,): the tensor; (N, 1) or (N,): rows; (N / 128, K / 128): squares
    nvfp4   weight uint8 (N, K / 2), even column in the low nibble; scale e4m3 (N, K / 16); global scale fp32 (1,) or ()
    mx      weight uint8 (N, K / 2) or float8 (N, K); scale uint8 or e8m0 (N, K / 32)

DeepSeek's `weight_scale_inv` and the `weight_scale` of compressed-tensors and ModelOpt all multiply.  For nvfp4's
global scale, ModelOpt's `weight_scale_2` multiplies, and compressed-tensors' `weight_global_scale` divides.
"""

from __future__ import annotations

from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from qcompiler.errors import FormatError, FormatValueError
from qcompiler.formats.base import Format, PackedTensor
from qcompiler.formats.foreign.arrays import FLOATS, Array, Arrays
from qcompiler.formats.fp8 import FP8E4M3, FP8E5M2, SQUARE
from qcompiler.formats.mx import MXFP4, MXFP8
from qcompiler.formats.nvfp4 import NVFP4

E4M3, E5M2, E8M0 = (np.dtype(t) for t in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu))
Per = Literal["tensor", "row", "block"]


# --- fp8 -------------------------------------------------------------------------------------------------------------


def read_fp8(found: Arrays, weight: str, scale: str, per: Per | None = None) -> PackedTensor:
    """The weight (N, K) of the arrays with these names; scales of 16 bits and powers of two are widened to fp32.

    `per` says which elements share a scale; None takes it from the scale's shape. A shape that contradicts it is an
    error.
    """
    codes = found.get(weight, (E4M3, E5M2), 2)
    if not found.has(scale):
        raise found.error(f"needs {scale}, and the layer has {', '.join(sorted(found.given))}")
    scales = np.asarray(found.given[scale])
    if scales.dtype not in (*FLOATS, E8M0):
        raise found.error(f"{scale} is {scales.dtype.name}, not float16, bfloat16, float32 or float8_e8m0fnu")
    found.refuse_nonfinite(scale, scales)
    kind = _kind_of(found, scale, scales.shape, codes.shape, per)
    fmt = (FP8E4M3 if codes.dtype == E4M3 else FP8E5M2)(per=kind)
    packed = fmt.allocate(*codes.shape)
    packed.section("codes")[:] = codes
    stored = packed.section("scales")
    stored[:] = scales.astype(np.float32).reshape(stored.shape)
    return packed


def _kind_of(found: Arrays, name: str, shape: tuple[int, ...], of: tuple[int, ...], per: Per | None) -> Per:
    rows, cols = of
    square = (-(-rows // SQUARE), -(-cols // SQUARE))
    fitting: dict[Per, tuple[tuple[int, ...], ...]] = {
        "tensor": ((), (1,)),
        "row": ((rows, 1), (rows,)),
        "block": (square,),
    }
    for kind, shapes in fitting.items():
        if shape in shapes and per in (kind, None):
            return kind
    if per == "tensor" and shape == (1, 1):
        return per
    expected = {kind: " or ".join(map(str, shapes)) for kind, shapes in fitting.items() if per in (kind, None)}
    wanted = ", ".join(f"{shapes} ({kind})" for kind, shapes in expected.items())
    raise found.shape_error(f"{name} has the shape {shape}; a weight of {rows} x {cols} has {wanted}")


def write_fp8(packed: PackedTensor, dtype: Any = np.float32) -> tuple[Array, Array]:
    """(weight, scale): the inverse. The scale is (1,), (N, 1) or (N / 128, K / 128), of `dtype`.

    FormatValueError if `dtype` cannot hold a scale exactly.
    """
    if not isinstance(packed.format, (FP8E4M3, FP8E5M2)):
        raise FormatError(f"fp8 checkpoints hold fp8_e4m3 or fp8_e5m2, and the tensor is {packed.format}")
    scales = packed.section("scales").copy()
    with np.errstate(over="ignore"):
        stored = scales.astype(dtype)
    differing = int((stored.astype(np.float32) != scales).sum())
    if differing:
        raise FormatValueError(f"{differing} of {scales.size} scales are not exact in {stored.dtype.name}; use float32")
    return packed.section("codes").copy(), stored


# --- nvfp4 -----------------------------------------------------------------------------------------------------------


def read_nvfp4(found: Arrays, weight: str, scale: str, of_all: str, *, divisor: bool) -> PackedTensor:
    """The weight (N, K); `divisor` says whether the global scale named `of_all` divides."""
    codes = found.get(weight, (np.uint8,), 2)
    rows, cols = codes.shape[0], 2 * codes.shape[1]
    packed = _allocate(found, NVFP4(divisor=divisor), rows, cols)
    scales = found.shaped(scale, (E4M3,), (rows, cols // 16), f"{rows} x {cols} elements in blocks of 16")
    found.refuse_nonfinite(scale, scales)
    global_scale = np.asarray(found.given.get(of_all, np.zeros(0)))
    if global_scale.dtype != np.float32 or global_scale.size != 1:
        raise found.error(f"needs {of_all}, one float32; got {global_scale.dtype.name} of shape {global_scale.shape}")
    if not np.isfinite(global_scale).all() or (divisor and not global_scale.all()):
        raise found.value_error(f"{of_all} is {global_scale.reshape(-1)[0]}")
    packed.section("codes")[:] = codes
    packed.section("scales")[:] = scales
    packed.section("global_scale")[:] = global_scale.reshape(-1)
    return packed


def write_nvfp4(packed: PackedTensor, *, divisor: bool) -> tuple[Array, Array, Array]:
    """(weight, scale, global scale of shape (1,)). FormatError if the tensor has the other kind of global scale."""
    fmt = packed.format
    if not isinstance(fmt, NVFP4) or fmt.setting("divisor") != divisor:
        raise FormatError(f"this checkpoint holds nvfp4(divisor={divisor}), and the tensor is {packed.format}")
    return packed.section("codes").copy(), packed.section("scales").copy(), packed.section("global_scale").copy()


# --- mx --------------------------------------------------------------------------------------------------------------


def read_mx(found: Arrays, weight: str, scale: str) -> PackedTensor:
    """The weight (N, K): mxfp4 of bytes, mxfp8 of float8.

    Bytes may also have the shape (N, K / 32, 16), as in gpt-oss.
    """
    array = np.asarray(found.given[weight]) if found.has(weight) else None
    if array is not None and array.dtype == np.uint8 and array.ndim == 3:
        found = Arrays({**found.given, weight: array.reshape(len(array), -1)}, found.layer, found.system)
    codes = found.get(weight, (np.uint8, E4M3, E5M2), 2)
    four = codes.dtype == np.uint8
    rows, cols = codes.shape[0], codes.shape[1] * (2 if four else 1)
    fmt: Format = MXFP4() if four else MXFP8(element="e4m3" if codes.dtype == E4M3 else "e5m2")
    packed = _allocate(found, fmt, rows, cols)
    why = f"{rows} x {cols} elements in blocks of 32"
    exponents = found.shaped(scale, (np.uint8, E8M0), (rows, cols // 32), why).view(np.uint8)
    found.refuse_nonfinite(scale, exponents.view(E8M0))
    packed.section("codes")[:] = codes
    packed.section("scales").view(np.uint8)[:] = exponents
    return packed


def write_mx(packed: PackedTensor) -> tuple[Array, npt.NDArray[np.uint8]]:
    """(weight, scale as uint8): the inverse."""
    if not isinstance(packed.format, (MXFP4, MXFP8)):
        raise FormatError(f"MX checkpoints hold mxfp4 or mxfp8, and the tensor is {packed.format}")
    return packed.section("codes").copy(), packed.section("scales").view(np.uint8).copy()


def _allocate(found: Arrays, fmt: Format, rows: int, cols: int) -> PackedTensor:
    try:
        return fmt.allocate(rows, cols)
    except FormatError as error:
        raise found.shape_error(str(error)) from None
