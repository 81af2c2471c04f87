"""Conversion from one format to another: without loss if their values agree, else by encoding again, with the error.

    q4_0, int4 (groups of 32)          (codes - 8) * scale in both; nibbles and scales change their places
    q8_0, int8 (groups of 32)          codes * scale in both
    int4 symmetric to asymmetric       the zero point 8 is stored; for more bits, or smaller groups, codes and scales
                                       are repeated
    nested statistics of nf4, fp4      become plain: each absmax is decoded, as every decoder does first
    mxfp4, mxfp4_ggml                  the same values, in another order of nibbles

Every result is checked: it is decoded and compared with the decoded original, bit for bit (but -0 and 0 count as one
value).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qcompiler.errors import FormatError
from qcompiler.formats import nested
from qcompiler.formats.base import Format, PackedTensor
from qcompiler.formats.equation import Entries, Float32
from qcompiler.formats.ggml_32 import Q4_0, Q8_0, MXFP4Ggml
from qcompiler.formats.integers import IntegerFormat
from qcompiler.formats.mx import MXFP4
from qcompiler.formats.nf4 import TableFormat


@dataclass(frozen=True)
class Loss:
    """The error: root of the sum of squared errors relative to that of squares, and the largest error."""

    relative: float = 0.0
    largest: float = 0.0

    def __bool__(self) -> bool:
        return self.largest != 0

    def __str__(self) -> str:
        return f"relative error {self.relative:.3g}, largest {self.largest:.3g}" if self else "no loss"


def transcode(
    packed: PackedTensor, to: Format, *, encode: Callable[[Format, Float32], PackedTensor] = Format.encode
) -> tuple[PackedTensor, Loss]:
    """The matrix in another format, and the loss: `Loss()` exactly if all values are the same.

    `encode` encodes values that cannot be moved (`runtime.encoder.encode` has compiled code).
    FormatShapeError and FormatValueError if the format cannot hold the matrix.
    """
    if packed.format == to:
        return packed, Loss()
    values = packed.format.decode(packed)
    made = moved(packed, to)
    if made is not None:
        loss = loss_of(values, to.decode(made))
        if not loss:
            return made, loss
    made = encode(to, values)
    return made, loss_of(values, to.decode(made))


def loss_of(before: Float32, after: Float32) -> Loss:
    """The loss between two matrices; sums are in fp64."""
    if np.array_equal(before, after):
        return Loss()
    squares = difference = largest = 0.0
    for first in range(0, len(before), 64):  # a few rows of fp64 at a time
        old, new = before[first : first + 64].astype(np.float64), after[first : first + 64].astype(np.float64)
        squares += float((old * old).sum())
        difference += float(((new - old) ** 2).sum())
        largest = max(largest, float(np.abs(new - old).max()))
    return Loss(float(np.sqrt(difference / squares)) if squares else float("inf"), largest)


def moved(packed: PackedTensor, to: Format) -> PackedTensor | None:
    """The same codes in the other format's layout, if both compute alike; None if no such conversion is known."""
    if isinstance(to, TableFormat) and isinstance(packed.format, TableFormat):
        return _plain_statistics(packed, to)
    if {type(packed.format), type(to)} == {MXFP4, MXFP4Ggml}:
        return _mx(packed, to)
    parts = _integers(packed)
    return None if parts is None else _as_integers(parts, to)


# --- integers --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Integers:
    """value = code * scale: codes (rows, cols) around zero, int16; scales (rows, groups).

    `zeros` (rows, groups) are the stored zero points, or None.
    """

    bits: int
    codes: npt.NDArray[np.int16]
    scales: Entries
    zeros: npt.NDArray[np.int16] | None


def _integers(packed: PackedTensor) -> _Integers | None:
    fmt, shape = packed.format, (packed.rows, packed.cols)
    if isinstance(fmt, Q4_0 | Q8_0):
        half = 8 if isinstance(fmt, Q4_0) else 0
        codes = fmt.entries(packed, "codes").reshape(shape).astype(np.int16) - np.int16(half)
        return _Integers(4 if half else 8, codes, fmt.entries(packed, "d").reshape(packed.rows, -1), None)
    if not isinstance(fmt, IntegerFormat):
        return None
    codes = fmt.entries(packed, "codes").reshape(shape).astype(np.int16)
    scales = fmt.entries(packed, "scales").reshape(packed.rows, -1)
    if fmt.setting("symmetric"):
        return _Integers(fmt.bits, codes - np.int16(0 if fmt.signed else fmt.half), scales, None)
    zeros = fmt.entries(packed, "zeros").reshape(packed.rows, -1).astype(np.int16)
    return _Integers(fmt.bits, codes - np.repeat(zeros, packed.cols // zeros.shape[1], axis=1), scales, zeros)


def _as_integers(parts: _Integers, to: Format) -> PackedTensor | None:
    rows, cols = parts.codes.shape
    ggml = isinstance(to, Q4_0 | Q8_0)
    if not ggml and not isinstance(to, IntegerFormat):
        return None
    bits = to.bits if isinstance(to, IntegerFormat) else 4 if isinstance(to, Q4_0) else 8
    group = to.group_size(cols) if isinstance(to, IntegerFormat) else 32
    stored_by_group = cols // parts.scales.shape[1]
    if cols % group or stored_by_group % group:
        return None
    repeats = stored_by_group // group
    scales = np.repeat(parts.scales, repeats, axis=1)
    half = 1 << bits - 1
    asymmetric = isinstance(to, IntegerFormat) and not to.setting("symmetric")
    zeros = np.full(scales.shape, half, np.int16)
    if asymmetric and parts.zeros is not None and parts.bits == bits:
        zeros = np.repeat(parts.zeros, repeats, axis=1)
    codes = parts.codes + np.repeat(zeros, group, axis=1)
    if codes.min() < 0 or codes.max() >= 2 * half:
        return None
    if ggml or (isinstance(to, IntegerFormat) and to.signed):
        signed = isinstance(to, Q8_0 | IntegerFormat)
        codes = (codes - half).astype(np.int8) if signed else codes.astype(np.uint8)
    made, flat = to.allocate(rows, cols), codes.reshape(-1, group)
    kind = np.float16 if ggml else made.section("scales").dtype
    with np.errstate(over="ignore"):
        stored = scales.astype(kind)
    if not np.array_equal(stored.astype(np.float32), scales.astype(np.float32)):
        return None
    if ggml:
        to.store(made, 0, {"d": stored.reshape(-1, 1), "codes": flat})
        return made
    flat = flat if flat.dtype == np.int8 else flat.astype(np.uint8)
    entries = {"codes": flat.reshape(1, -1), "scales": stored.reshape(1, -1)}
    if asymmetric:
        entries["zeros"] = zeros.astype(np.uint8).reshape(1, -1)
    to.store(made, 0, entries)
    return made


# --- tables and floats -----------------------------------------------------------------------------------------------


def _plain_statistics(packed: PackedTensor, to: TableFormat) -> PackedTensor | None:
    """Nested statistics as plain ones, with the same table and block."""
    fmt = packed.format
    if not isinstance(fmt, TableFormat) or to.nested or not fmt.nested:
        return None
    if fmt.name != to.name or fmt.setting("block") != to.setting("block"):
        return None
    made = to.allocate(packed.rows, packed.cols)
    made.section("codes")[:] = packed.section("codes")
    codes = packed.section("absmax")
    scales = np.repeat(packed.section("absmax_scales"), nested.BLOCKS)[: codes.size]
    made.section("absmax")[:] = nested.DYNAMIC[codes] * scales + packed.section("offset")
    return made


def _mx(packed: PackedTensor, to: Format) -> PackedTensor:
    fmt = packed.format
    made = to.allocate(packed.rows, packed.cols)
    names = {MXFP4: "scales", MXFP4Ggml: "scale"}
    codes = fmt.entries(packed, "codes").reshape(-1, 32)
    scales = fmt.entries(packed, names[type(fmt)]).reshape(-1, 1)
    if isinstance(to, MXFP4Ggml):
        to.store(made, 0, {"codes": codes, "scale": scales})
    else:
        to.store(made, 0, {"codes": codes.reshape(1, -1), "scales": scales.reshape(1, -1)})
    return made


def require(loss: Loss, what: str, packed: PackedTensor, to: Format, *, allowed: bool) -> None:
    """FormatError that says how much is lost, unless loss is allowed."""
    if loss and not allowed:
        raise FormatError(
            f"'{what}' does not go from {packed.format} to {to} without loss: {loss}. Say lossy=True (`--lossy`) if "
            "that is wanted, or name a format that holds it"
        )


__all__ = ["Loss", "loss_of", "moved", "require", "transcode"]
