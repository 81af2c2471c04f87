"""NF4: 4-bit codes into a table of normal quantiles, one absmax per block of the flattened tensor.

This module also has the parts that NF4 shares with FP4 (fp4.py): bitsandbytes' blocks, rounding, and nested statistics.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from qcompiler.formats import nested
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


def midpoints(ascending: npt.ArrayLike) -> Float32:
    """Decision thresholds between ascending values, computed in fp32."""
    values = np.asarray(ascending, np.float32)
    halves: Float32 = (values[:-1] + values[1:]) / np.float32(2)
    return halves


MIDPOINTS: Float32 = midpoints(TABLE)
"""A normalised weight takes code i if exactly i midpoints are below it."""

ZERO_CODE = 7
SMALLEST_ABSMAX = np.float32(1e-38)
"""bitsandbytes' floor for the divisor (a denormal): it keeps the reciprocal finite."""

BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_NESTED_RULE = (
    "of a second-level block: fp32 1/absmax_scales, the product rounded to 65536 levels (0 decodes to 2.1e-5 of it). "
    "offset is the float64 mean of absmax, rounded once"
)


_NESTED_REFERENCE = (
    " with compress_statistics=True, given the offset: its own depends on its number of threads, and its CUDA kernel "
    "finds the nearest code without the 65536 levels"
)


class TableFormat(Format):
    """4-bit codes into a table, in bitsandbytes' blocks; the statistics are plain or nested.

    Subclasses define the table, the thresholds between its values in ascending order, the code of each rank, and the
    code of zero.  Codes, absmax and (given the offset) nested statistics are bit for bit those of bitsandbytes 0.50's
    CPU `quantize_4bit`.
    """

    parameters: ClassVar[tuple[Parameter, ...]] = (
        Parameter("block", 64, BLOCKS, "elements that share one absmax"),
        Parameter("double_quant", False, (False, True), "True stores each absmax in 8 bits (QLoRA)", later=True),
    )
    table: ClassVar[tuple[float, ...]]
    thresholds: ClassVar[Float32]
    codes_by_rank: ClassVar[npt.NDArray[np.uint8] | None]
    zero_code: ClassVar[int]
    about: ClassVar[str]
    notes: ClassVar[dict[str, str]]

    @property
    def nested(self) -> bool:
        return bool(self.setting("double_quant"))

    def declare(self) -> Declaration:
        block = int(self.setting("block"))
        fields = [Field("codes", "uint", 4, order="high_first")]
        if self.nested:
            fields += [
                Field("absmax", "uint", 8, covers=block),
                Field("absmax_scales", "f32", 32, covers=block * nested.BLOCKS),
                Field("offset", "f32", 32, covers="tensor"),
            ]
            equation = "table[codes] * (dynamic[absmax] * absmax_scales + offset)"
            statistics = "one 8-bit absmax per block, one fp32 scale per 256 blocks, one fp32 offset"
        else:
            fields.append(Field("absmax", "f32", 32, covers=block))
            equation, statistics = "table[codes] * absmax", "one fp32 absmax per block"
        return Declaration(
            summary=f"4-bit codes into {self.about}, {statistics}",
            block=block,
            blocking="flat",
            tail="short",
            fields=tuple(fields),
            table=self.table,
            tables={"dynamic": tuple(nested.DYNAMIC.tolist())} if self.nested else {},
            pad_code=self.zero_code,
            decode=Equation(equation),
            numerics=self._numerics(),
            reference="bitsandbytes 0.50, backends/default/ops.py, quantize_4bit on CPU"
            + (_NESTED_REFERENCE if self.nested else "")
            + self.notes["reference"],
        )

    def _numerics(self) -> Numerics:
        reciprocal = "full blocks multiply by fp32 1/absmax; a short last block divides by absmax"
        return Numerics(
            ties="a normalised weight equal to a midpoint takes the lower code (strict >, fp32 midpoints)"
            + self.notes["ties"],
            zero_block=f"code {self.zero_code} (value 0); absmax 0, but 1e-38 in a short last block",
            scale_clamp="the divisor is at least 1e-38; the stored absmax of a full block is not clamped",
            zero_point=self.notes["zero_point"],
            reciprocal=reciprocal + (f"; {_NESTED_RULE}" if self.nested else ""),
        )

    # --- the encoder ---

    def _begin(self, job: Encoding) -> None:
        """Chooses where absmax goes: into its section, or aside until the mean of all is known."""
        if self.nested:
            job.notes["absmax"] = np.empty(-(-job.weights.size // int(self.setting("block"))), np.float32)
        else:
            job.notes["absmax"] = job.packed.section("absmax")

    def _encode_tile(self, job: Encoding, start: int, tile: Float32) -> None:
        block = int(self.setting("block"))
        codes: npt.NDArray[Any] = job.packed.section("codes")
        absmax: Float32 = job.notes["absmax"]
        full = tile.size - tile.size % block
        blocks = tile[:full].reshape(-1, block)
        largest = np.abs(blocks).max(axis=1, initial=0)
        if not np.isfinite(largest).all():
            refuse_nonfinite(self, job.weights, tile, start)
        absmax[start // block : start // block + largest.size] = largest
        inverse = np.float32(1) / np.maximum(largest, SMALLEST_ABSMAX)
        packed_tile = _pack(self._nearest(blocks * inverse[:, None]).reshape(-1))
        codes[start // 2 : start // 2 + packed_tile.size] = packed_tile
        if full < tile.size:
            tail = tile[full:]
            if not np.isfinite(tail).all():
                refuse_nonfinite(self, job.weights, tail, start + full)
            absmax[-1] = np.maximum(np.abs(tail).max(), SMALLEST_ABSMAX)
            tail_codes = np.full(tail.size + tail.size % 2, self.zero_code, np.uint8)
            tail_codes[: tail.size] = self._nearest(tail / absmax[-1])
            codes[(start + full) // 2 :] = _pack(tail_codes)

    def _end(self, job: Encoding) -> None:
        if self.nested:
            absmax = job.notes["absmax"]
            offset = nested.mean_offset(absmax)
            job.packed.section("offset")[0] = offset
            nested.encode(absmax, offset, job.packed.section("absmax"), job.packed.section("absmax_scales"))

    def _nearest(self, scaled: Float32) -> npt.NDArray[np.uint8]:
        """Codes of normalised weights: their rank is the number of midpoints below.

        Fifteen comparisons over a tile in cache are about ten times as fast as a binary search.
        """
        rank = np.zeros(scaled.shape, np.uint8)
        above = np.empty(scaled.shape, np.bool_)
        for threshold in self.thresholds:
            np.greater(scaled, threshold, out=above)
            np.add(rank, above.view(np.uint8), out=rank)
        return rank if self.codes_by_rank is None else self.codes_by_rank[rank]


class NF4(TableFormat):
    """Codes and statistics of `quantize_4bit(quant_type="nf4")`."""

    name: ClassVar[str] = "nf4"
    table: ClassVar[tuple[float, ...]] = TABLE
    thresholds: ClassVar[Float32] = MIDPOINTS
    codes_by_rank: ClassVar[npt.NDArray[np.uint8] | None] = None
    zero_code: ClassVar[int] = ZERO_CODE
    about: ClassVar[str] = "a table of normal quantiles (QLoRA)"
    notes: ClassVar[dict[str, str]] = {"ties": "", "zero_point": "none; code 7 is exactly 0", "reference": ""}


def _pack(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Two codes per byte, even index in the high nibble."""
    pairs = codes.view("<u2")  # even + 256 * odd
    packed: npt.NDArray[np.uint8] = ((pairs << 4) | (pairs >> 8)).astype(np.uint8)
    return packed
