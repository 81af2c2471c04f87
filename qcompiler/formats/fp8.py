"""fp8: elements are 8-bit floats (E4M3 or E5M2), with fp32 scales per tensor, per row or per square of 128 x 128."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from qcompiler.formats.base import (
    Declaration,
    Encoding,
    Field,
    Format,
    Numerics,
    Parameter,
    absmax_of_all,
    refuse_nonfinite,
)
from qcompiler.formats.equation import Equation, Float32
from qcompiler.formats.minifloat import E4M3, E5M2, MiniFloat, absmax

SQUARE = 128
"""Rows and columns of a block with one scale, as in DeepSeek-V3's checkpoints and DeepGEMM."""

_SHARED = {
    "row": "one fp32 scale per row",
    "tensor": "one fp32 scale for the tensor",
    "block": "one fp32 scale per square of 128 x 128, the last ones shorter",
}


class _FP8(Format):
    """``scale = absmax / largest``, ``code = cast(w / scale)`` in fp32, as in torchao 0.18's float8 primitives."""

    element: ClassVar[MiniFloat]
    parameters: ClassVar[tuple[Parameter, ...]] = (
        Parameter("per", "row", ("row", "tensor", "block"), "what shares one scale; a block is 128 x 128", shown=True),
    )

    def declare(self) -> Declaration:
        name, largest, per = self.element.name, f"{self.element.largest:g}", str(self.setting("per"))
        scales = {
            "row": Field("scales", "f32", 32, covers="row"),
            "tensor": Field("scales", "f32", 32, covers="tensor"),
            "block": Field("scales", "f32", 32, covers=SQUARE, rows=SQUARE),
        }[per]
        return Declaration(
            summary=f"{name} elements, {_SHARED[per]}",
            block=SQUARE if per == "block" else "row",
            blocking="row",
            tail="short",
            fields=(Field("codes", "e4m3" if name == "e4m3" else "e5m2", 8), scales),
            decode=Equation("codes * scales"),
            numerics=Numerics(
                ties=f"to the even mantissa; |w / scale| is clipped to {largest} before the cast, so that it saturates "
                "(casts alone differ: NaN, infinity or the largest value)",
                zero_block="codes 0 (-0 keeps its sign); a scale that rounds to 0 in fp32 is stored as 1, where the "
                "reference divides 0 by 0",
                scale_clamp=f"absmax / {largest}, at most one step below fp32's maximum / {largest}; not rounded to a "
                "power of two",
                zero_point="none",
                reciprocal="divides by the stored fp32 scale, which multiplies when decoding (`weight_scale`; "
                "DeepSeek's `weight_scale_inv` is the same number). transformers multiplies by largest / absmax and "
                "stores the reciprocal of that, which rounds once more",
            ),
            reference="torchao 0.18, quant_primitives._choose_scale_float8 and _quantize_affine_float8, in fp32",
        )

    def _begin(self, job: Encoding) -> None:
        if self.setting("per") != "tensor":
            return
        job.packed.section("scales")[:] = self._scales(np.array([absmax_of_all(self, job.weights)], np.float32))

    def _scales(self, largest: Float32) -> Float32:
        """The scales for blocks with these absolute maxima."""
        scales: Float32 = np.minimum(largest / np.float32(self.element.largest), self.element.largest_scale)
        scales[scales == 0] = 1
        return scales

    def _encode_tile(self, job: Encoding, start: int, tile: Float32) -> None:
        cols, per = job.packed.cols, self.setting("per")
        codes, scales = job.packed.section("codes"), job.packed.section("scales")
        if per == "tensor":
            found: Any = self.element.saturate(tile / scales[0])
            codes.reshape(-1)[start : start + tile.size] = found
            return
        rows, first = tile.reshape(-1, cols), start // cols
        if per == "row":
            largest = absmax(rows, axis=1)[:, None]
        else:
            largest = np.maximum.reduceat(np.abs(rows), np.arange(0, cols, SQUARE), axis=1)
            largest = np.maximum.reduceat(largest, np.arange(0, len(rows), SQUARE), axis=0)
        if not np.isfinite(largest).all():
            refuse_nonfinite(self, job.weights, tile, start)
        stored = self._scales(largest)
        if per == "row":
            scales[first : first + len(rows)] = stored
            codes[first : first + len(rows)] = self.element.saturate(rows / stored)
            return
        scales[first // SQUARE : first // SQUARE + len(stored)] = stored
        wide = np.repeat(stored, SQUARE, axis=1)[:, :cols]
        for i, divisors in enumerate(wide):  # 128 rows at a time: their divisors are one row
            part = slice(i * SQUARE, (i + 1) * SQUARE)
            place = slice(first + i * SQUARE, first + i * SQUARE + len(rows[part]))
            codes[place] = self.element.saturate(rows[part] / divisors)


class FP8E4M3(_FP8):
    """E4M3 (finite: no infinity, NaN 0x7f): three bits of mantissa, up to 448."""

    name: ClassVar[str] = "fp8_e4m3"
    element: ClassVar[MiniFloat] = E4M3


class FP8E5M2(_FP8):
    """E5M2 (IEEE-like): two bits of mantissa, up to 57344."""

    name: ClassVar[str] = "fp8_e5m2"
    element: ClassVar[MiniFloat] = E5M2
