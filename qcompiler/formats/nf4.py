"""NF4: 4-bit codes into a table of normal quantiles, one fp32 absmax per block of the flattened tensor."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from qcompiler.formats.base import (
    Declaration,
    Encoding,
    Field,
    Format,
    Numerics,
    Parameter,
    refuse_nonfinite,
)
from qcompiler.formats.equation import Equation, Float32

# fmt: off
TABLE: tuple[float, ...] = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)
# fmt: on
"""The 16 values as QLoRA published them (Dettmers et al. 2023, appendix E), rounded to fp32."""

_VALUES = np.array(TABLE, np.float32)
MIDPOINTS: Float32 = (_VALUES[:-1] + _VALUES[1:]) / np.float32(2)
"""Decision thresholds, computed in fp32: a normalised weight takes code i where exactly i midpoints lie below it."""

ZERO_CODE = 7
SMALLEST_ABSMAX = np.float32(1e-38)
"""bitsandbytes' floor for the divisor (a denormal): it keeps the reciprocal finite."""


class NF4(Format):
    """Codes and absmax are bit for bit those of bitsandbytes 0.50's CPU `quantize_4bit(quant_type="nf4")`."""

    name: ClassVar[str] = "nf4"
    parameters: ClassVar[tuple[Parameter, ...]] = (
        Parameter("block", 64, (64, 128, 256, 512, 1024, 2048, 4096), "elements that share one absmax"),
    )

    def declare(self) -> Declaration:
        block = int(self.params["block"])
        return Declaration(
            summary="4-bit codes into a table of normal quantiles (QLoRA), one fp32 absmax per block",
            block=block,
            blocking="flat",
            tail="short",
            fields=(
                Field("codes", "uint", 4, order="high_first"),
                Field("absmax", "f32", 32, covers=block),
            ),
            table=TABLE,
            pad_code=ZERO_CODE,
            decode=Equation("table[codes] * absmax"),
            numerics=Numerics(
                ties="a normalised weight equal to a midpoint takes the lower code (strict >, fp32 midpoints)",
                zero_block="code 7 (value 0); absmax 0, but 1e-38 in a short last block",
                scale_clamp="the divisor is at least 1e-38; the stored absmax of a full block is not clamped",
                zero_point="none; code 7 is exactly 0",
                reciprocal="full blocks multiply by fp32 1/absmax; a short last block divides by absmax",
            ),
            reference="bitsandbytes 0.50, backends/default/ops.py, quantize_4bit on CPU",
        )

    def _encode_tile(self, job: Encoding, start: int, tile: Float32) -> None:
        block = int(self.params["block"])
        codes, absmax = job.packed.section("codes"), job.packed.section("absmax")
        full = tile.size - tile.size % block
        blocks = tile[:full].reshape(-1, block)
        largest = np.abs(blocks).max(axis=1, initial=0)
        if not np.isfinite(largest).all():
            refuse_nonfinite(self, job.weights, tile, start)
        absmax[start // block : start // block + largest.size] = largest
        inverse = np.float32(1) / np.maximum(largest, SMALLEST_ABSMAX)
        packed_tile = _pack(_nearest(blocks * inverse[:, None]).reshape(-1))
        codes[start // 2 : start // 2 + packed_tile.size] = packed_tile
        if full < tile.size:
            tail = tile[full:]
            if not np.isfinite(tail).all():
                refuse_nonfinite(self, job.weights, tail, start + full)
            absmax[-1] = np.maximum(np.abs(tail).max(), SMALLEST_ABSMAX)
            tail_codes = np.full(tail.size + tail.size % 2, ZERO_CODE, np.uint8)
            tail_codes[: tail.size] = _nearest(tail / absmax[-1])
            codes[(start + full) // 2 :] = _pack(tail_codes)


def _nearest(scaled: Float32) -> npt.NDArray[np.uint8]:
    """Codes of normalised weights: the number of midpoints below each.

    Fifteen comparisons over a tile that stays in cache are about ten times as fast as a binary search.
    """
    codes = np.zeros(scaled.shape, np.uint8)
    above = np.empty(scaled.shape, np.bool_)
    for midpoint in MIDPOINTS:
        np.greater(scaled, midpoint, out=above)
        np.add(codes, above.view(np.uint8), out=codes)
    return codes


def _pack(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Two codes per byte, even index in the high nibble."""
    pairs = codes.view("<u2")  # even + 256 * odd
    packed: npt.NDArray[np.uint8] = ((pairs << 4) | (pairs >> 8)).astype(np.uint8)
    return packed
