"""tq: a trellis code of 2, 3 or 4 bits, whose values kernels compute in registers (trellis.py)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from qcompiler.errors import FormatValueError
from qcompiler.formats.base import Encoding, Format, Parameter, refuse_nonfinite
from qcompiler.formats.declaration import Declaration, Field, Numerics
from qcompiler.formats.equation import Equation, Float32
from qcompiler.formats.ggml import LARGEST_FP16, LARGEST_IMPORTANCE, quiet
from qcompiler.formats.ggml_search import ordered_sum
from qcompiler.formats.packing import stream
from qcompiler.formats.trellis import BLOCK, LENGTH, Trellis, from_sequences, to_sequences
from qcompiler.formats.trellis_search import choose

TRELLISES = {4: Trellis(4, 3, 0x35D08399), 3: Trellis(3, 4, 0xC55EC2CD), 2: Trellis(2, 6, 0x2618B891)}
"""Windows of 12 bits, and for each width one of the best of 150 random multipliers, by the error of normal weights. The
median one has 15 % (4 bits), 8 % (3) and 6 % (2) more."""

SPREAD = {4: 1.14, 3: 1.10, 2: 1.03}
"""The spread of the values at a block's first scale, divided by the root mean square of its weights. These have the
smallest error for normal weights: with more bits, a weight beyond the largest value counts for more."""

UNIT = np.float32(2**-7)
"""What a stored scale is multiplied with. Stored scales are near the root mean square of the weights; without it they
would be 147 times less, which is subnormal in fp16 for small weights."""


class TQ(Format):
    """tq: 4 bits, unless `bits` says 2 or 3."""

    name: ClassVar[str] = "tq"
    takes_importance = True
    parameters: ClassVar[tuple[Parameter, ...]] = (
        Parameter("bits", 4, (2, 3, 4), "bits of a code, of which an element costs one", shown=True),
    )

    @property
    def bits(self) -> int:
        return int(self.setting("bits"))

    @property
    def trellis(self) -> Trellis:
        return TRELLISES[self.bits]

    @property
    def factor(self) -> np.float32:
        """A block's scale divided by the root of the mean square of its weights."""
        return np.float32(SPREAD[self.bits] / self.trellis.values.std(dtype=np.float64) / UNIT)

    def declare(self) -> Declaration:
        trellis = self.trellis
        return Declaration(
            summary=f"{trellis.bits}-bit codes of a trellis, one fp16 scale per {BLOCK} elements of a row; a value is "
            f"computed from a window of {trellis.codes} codes (QTIP)",
            block=BLOCK,
            blocking="row",
            tail="refuse",
            fields=(
                Field("codes", "uint", trellis.bits, packing=stream(3, BLOCK) if trellis.bits == 3 else None),
                Field("scales", "f16", 16, covers=BLOCK),
            ),
            decode=Equation(f"table[codes] * (scales * {float(UNIT)})"),
            numerics=Numerics(
                ties="of two equal paths, the one whose oldest code that differs is lower",
                zero_block="codes 0, scale 0; likewise where the first scale rounds to 0 in fp16 (2^-25 or less)",
                scale_clamp="none; a scale that exceeds fp16 is an error",
                zero_point="none; the scale is first "
                f"{SPREAD[trellis.bits]} times the root of the mean square of the weights over the table's deviation, "
                "times 128, and after the search the best for its codes by least squares, both weighted by the "
                "importance",
                reciprocal="divides the weights by the first scale as stored, times 2^-7",
            ),
            reference="Tseng et al., QTIP (arXiv 2406.11235), with another multiplier and no addition: "
            f"table[w] is the sum of the four signed bytes of w * 0x{trellis.multiplier:08x} mod 2^32",
            table=tuple(map(float, trellis.values)),
            trellis=trellis,
        )

    def _encode_tile(self, job: Encoding, start: int, tile: Float32) -> None:
        if not np.isfinite(tile).all():
            refuse_nonfinite(self, job.weights, tile, start)
        blocks, first = tile.reshape(-1, BLOCK), start // BLOCK
        importance = self._importance(job, first, len(blocks))
        scale = self._half(job, first, self._first_scale(blocks, importance))
        codes = self.search(blocks, importance, scale)
        fitted = self._fitted_scale(blocks, importance, codes, scale)
        self.store(job.packed, first, {"codes": codes, "scales": self._half(job, first, fitted)[:, None]})

    def search(self, blocks: Float32, importance: Float32, scales: npt.NDArray[np.float16]) -> npt.NDArray[np.uint8]:
        """The codes (blocks, 256) of the paths with the smallest error at these scales (blocks,).

        `importance` (blocks, 256) weights the squared error of each element.  Codes of a block with scale 0 are 0.
        """
        divisor = scales.astype(np.float32) * UNIT
        live = divisor != 0
        codes = np.zeros(blocks.shape, np.uint8)
        if live.any():
            wanted = to_sequences(blocks[live] / divisor[live, None])
            found = choose(self.trellis, wanted.reshape(-1, LENGTH), to_sequences(importance[live]).reshape(-1, LENGTH))
            codes[live] = from_sequences(found.reshape(wanted.shape))
        return codes

    def _first_scale(self, blocks: Float32, importance: Float32) -> Float32:
        with quiet():
            squares = ordered_sum(np.ascontiguousarray((blocks * blocks * importance).T))
            weight = ordered_sum(np.ascontiguousarray(importance.T))
            mean = np.divide(squares, weight, out=np.zeros_like(squares), where=weight != 0)
            return np.sqrt(mean) * self.factor

    def _fitted_scale(
        self, blocks: Float32, importance: Float32, codes: npt.NDArray[np.uint8], scale: npt.NDArray[np.float16]
    ) -> Float32:
        """The scale with the smallest error for these codes; the first one where that is no positive number."""
        values = self.trellis.values[self.trellis.windows(codes)]
        with quiet():
            weighted = values * importance
            products = ordered_sum(np.ascontiguousarray((weighted * blocks).T))
            squares = ordered_sum(np.ascontiguousarray((weighted * values).T))
            fitted = products / squares / UNIT
        first = scale.astype(np.float32)
        return np.where((first > 0) & (fitted > 0) & (fitted <= np.float32(LARGEST_FP16)), fitted, first)

    def _half(self, job: Encoding, first: int, exact: Float32) -> npt.NDArray[np.float16]:
        with np.errstate(over="ignore"):
            half = exact.astype(np.float16)
        bad = np.flatnonzero(~np.isfinite(half))
        if bad.size:
            row, col = divmod((first + int(bad[0])) * BLOCK, job.packed.cols)
            raise FormatValueError(
                f"row {row}, columns {col}…{col + BLOCK - 1}: the scale {exact[bad[0]]:g} exceeds fp16's largest value "
                f"{LARGEST_FP16:g}, in which {self} stores it; nf4 and int8 have fp32 scales"
            )
        return half

    def _importance(self, job: Encoding, first: int, count: int) -> Float32:
        """The importance of each element of `count` blocks: all 1 if the caller gave none."""
        if job.importance is None:
            return np.ones((count, BLOCK), np.float32)
        if job.importance.max() > LARGEST_IMPORTANCE:
            raise FormatValueError(
                f"{self}: an importance of {job.importance.max():g} may overflow fp32 in the search; only ratios "
                f"matter: divide all by their mean (the limit is {LARGEST_IMPORTANCE:g})"
            )
        of_block = job.importance.reshape(-1, BLOCK)
        return of_block[(first + np.arange(count)) % len(of_block)]
