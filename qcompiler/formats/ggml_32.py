"""ggml's formats with blocks of 32: q4_0, q4_1, q5_0, q5_1, q8_0 and its variant of mxfp4."""

from __future__ import annotations

import itertools
from typing import ClassVar

import ml_dtypes
import numpy as np

from qcompiler.errors import FormatError
from qcompiler.formats.base import TILE, Encoding, Weights
from qcompiler.formats.declaration import Bytes, Declaration, Field, Numerics
from qcompiler.formats.equation import Float32
from qcompiler.formats.ggml import SOURCE, GgmlFormat, codes_of, quiet, reciprocal, round_away
from qcompiler.formats.ggml_search import Trials, first_minimum, search_affine, search_scale, signed_extreme, transposed
from qcompiler.formats.packing import Pieces, planes, together

_NIBBLES = planes(4, 16, 32)
_FIVE = together(
    planes(4, 16, 32, first=4),
    Pieces(tuple(((e // 8, e % 8, 1),) for e in range(32)), "bit 4 of element i is bit i of the first four bytes"),
    text="bits 0…3 in the last 16 bytes, elements i and i + 16 in byte i (low, high); bit 4 of element i is bit i of "
    "the first four bytes",
)
_AGREE = "gguf-py 0.19 gives the same bytes"
_AGREE_BUT = f"{_AGREE}, but for signs of zero scales and minima in blocks that mix 0 and -0"
_WEIGHTED = (
    "errors weighted by importance · sqrt(mean(w²) of the row + w²), and codes are nearest integers, halves to even"
)
_TINY = (
    "a block whose 1/d is infinite (|d| < 2.9e-39, stored as 0) takes code 0, as the undefined conversion does on x86"
)


class _Searched32(GgmlFormat):
    """With an importance, minimises the squared error weighted by the importance and the weights' size."""

    block = 32
    bits: ClassVar[int]
    takes_importance = True

    def _begin(self, job: Encoding) -> None:
        if job.importance is None:
            return
        rows, cols = job.weights.shape
        squares = np.empty(rows, np.float32)
        step = max(1, TILE // cols)
        for first in range(0, rows, step):
            with quiet():
                some = _float32(job.weights[first : first + step])
                squares[first : first + step] = np.add.accumulate(some * some, axis=1)[:, -1]
        for row in np.flatnonzero(~np.isfinite(squares)):  # the error names the element
            self._blocks(job, int(row) * cols, _float32(job.weights[row]))
        job.notes["mean_square"] = squares / np.float32(cols)

    def _weights(self, job: Encoding, start: int, blocks: Float32) -> Float32:
        """importance * sqrt(mean square of the row + w * w), (32, blocks)."""
        importance = self._importance(job, start, blocks)
        if importance is None:
            raise FormatError(f"{self}: the error is weighted by an importance, and none was given")
        row = (start // 32 + np.arange(len(blocks))) // (job.packed.cols // 32)
        sigma2 = job.notes["mean_square"][row][:, None]
        return transposed(importance * np.sqrt(sigma2 + blocks * blocks), 32)


def _float32(weights: Weights) -> Float32:
    """Rounded to fp32; float64 values beyond its range become infinite, and are refused later."""
    with quiet():
        return weights.astype(np.float32, copy=False)


class _Symmetric32(_Searched32):
    """q4_0 and q5_0: the signed extreme of a block becomes the lowest code."""

    def declare(self) -> Declaration:
        half = 1 << self.bits - 1
        packing = _NIBBLES if self.bits == 4 else _FIVE
        return self._declare(
            f"{self.bits}-bit codes with their zero at {half}, one fp16 scale per 32 elements of a row",
            (Field("d", "f16", 16, covers=32, offset=0), Field("codes", "uint", self.bits, offset=2, packing=packing)),
            f"(codes - {half}) * d",
            Numerics(
                ties=f"halves upwards: code = min({2 * half - 1}, trunc(w · (1/d) + {half}.5)), in fp32",
                zero_block=f"code {half}, d 0 (stored as -0, for -0 = 0 / -{half}); {_TINY}",
                scale_clamp="none; a scale that exceeds fp16 is an error",
                zero_point=f"{half}, fixed; d = (signed extreme) / -{half}, and of two equal extremes the first. With "
                f"an importance the best of 19 scales around that one, {_WEIGHTED}",
                reciprocal="multiplies by fp32 1/d, before d is rounded to fp16",
            ),
            f"{SOURCE}, quantize_row_{self.name}_ref and quantize_{self.name}; {_AGREE_BUT}",
        )

    def _encode_tile(self, job: Encoding, start: int, tile: Float32) -> None:
        blocks = self._blocks(job, start, tile)
        half = 1 << self.bits - 1
        if job.importance is not None:
            with quiet():
                d, found = search_scale(transposed(blocks, 32), self._weights(job, start, blocks), half)
            stored = self._half(job, start, d, "scale")
            self.store(job.packed, start // 32, {"d": stored, "codes": codes_of(found, 32)})
            return
        d = signed_extreme(blocks.T) / np.float32(-half)
        stored = self._half(job, start, d, "scale")
        codes = _truncated(blocks, reciprocal(d), np.float32(half + 0.5), 2 * half - 1)
        self.store(job.packed, start // 32, {"d": stored, "codes": codes})


class Q4_0(_Symmetric32):
    """ggml's q4_0."""

    name, bits, ggml_type = "q4_0", 4, 2


class Q5_0(_Symmetric32):
    """ggml's q5_0."""

    name, bits, ggml_type = "q5_0", 5, 6


class _Affine32(_Searched32):
    """q4_1 and q5_1: codes count from the smallest element of the block."""

    def declare(self) -> Declaration:
        largest = (1 << self.bits) - 1
        packing = _NIBBLES if self.bits == 4 else _FIVE
        return self._declare(
            f"{self.bits}-bit codes above a minimum, fp16 scale and minimum per 32 elements of a row",
            (
                Field("d", "f16", 16, covers=32, offset=0),
                Field("m", "f16", 16, covers=32, offset=2),
                Field("codes", "uint", self.bits, offset=4, packing=packing),
            ),
            "d * codes + m",
            Numerics(
                ties=f"halves upwards: code = min({largest}, trunc((w - minimum) · (1/d) + 0.5)), in fp32",
                zero_block=f"code 0, d 0, m 0; a constant block has d 0 and its value in m; {_TINY}",
                scale_clamp="none; a scale or a minimum that exceeds fp16 is an error",
                zero_point="m, the minimum itself: zero is not always representable. With an importance m <= 0, and "
                f"d and m are the best of the plain range and 37 least-squares lines, {_WEIGHTED}",
                reciprocal="multiplies by fp32 1/d, before d and m are rounded to fp16",
            ),
            f"{SOURCE}, quantize_row_{self.name}_ref and quantize_{self.name}; {_AGREE_BUT}",
        )

    def _encode_tile(self, job: Encoding, start: int, tile: Float32) -> None:
        blocks = self._blocks(job, start, tile)
        largest = (1 << self.bits) - 1
        if job.importance is not None:
            with quiet():
                trials = Trials(-0.9, 0.05, 36)
                d, low, found = search_affine(
                    transposed(blocks, 32), self._weights(job, start, blocks), largest, trials
                )
            stored = {"d": self._half(job, start, d, "scale"), "m": self._half(job, start, low, "minimum")}
            self.store(job.packed, start // 32, {**stored, "codes": codes_of(found, 32)})
            return
        low = first_minimum(blocks.T)
        with np.errstate(over="ignore"):
            d = (blocks.max(axis=1) - low + np.float32(0)) / np.float32(largest)  # + 0: -0 and 0 are equal here
        stored = {"d": self._half(job, start, d, "scale"), "m": self._half(job, start, low, "minimum")}
        codes = _truncated(blocks - low[:, None], reciprocal(d), np.float32(0.5), largest)
        self.store(job.packed, start // 32, {**stored, "codes": codes})


class Q4_1(_Affine32):
    """ggml's q4_1."""

    name, bits, ggml_type = "q4_1", 4, 3


class Q5_1(_Affine32):
    """ggml's q5_1."""

    name, bits, ggml_type = "q5_1", 5, 7


def _truncated(blocks: Float32, inverse: Float32, shift: np.float32, largest: int) -> Bytes:
    """min(largest, trunc(blocks * inverse + shift)) of nonnegative values; 0 where 1 / d is infinite."""
    scaled = blocks * np.where(np.isinf(inverse), np.float32(0), inverse)[:, None]
    scaled += shift
    codes = np.minimum(scaled, np.float32(largest)).astype(np.uint8)
    codes[np.isinf(inverse)] = 0
    return codes


class Q8_0(GgmlFormat):
    """ggml's q8_0."""

    name, block, ggml_type = "q8_0", 32, 8

    def declare(self) -> Declaration:
        return self._declare(
            "8-bit signed codes, one fp16 scale per 32 elements of a row",
            (Field("d", "f16", 16, covers=32, offset=0), Field("codes", "int", 8, offset=2)),
            "codes * d",
            Numerics(
                ties="away from zero: code = roundf(w · (1/d))",
                zero_block=f"code 0, d 0; {_TINY}",
                scale_clamp="none; a scale that exceeds fp16 is an error",
                zero_point="none; code -128 is not used; d = absmax / 127",
                reciprocal="multiplies by fp32 1/d, before d is rounded to fp16",
            ),
            f"{SOURCE}, quantize_row_q8_0_ref; {_AGREE}; SIMD versions of it in ggml round halves to even",
        )

    def _encode_tile(self, job: Encoding, start: int, tile: Float32) -> None:
        blocks = self._blocks(job, start, tile)
        d = np.abs(blocks).max(axis=1) / np.float32(127)
        stored = self._half(job, start, d, "scale")
        inverse = reciprocal(d)
        inverse[np.isinf(inverse)] = 0
        codes = round_away(blocks * inverse[:, None]).astype(np.int8)
        self.store(job.packed, start // 32, {"d": stored, "codes": codes})


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MAGNITUDES = np.array(E2M1, np.float32)


class MXFP4Ggml(GgmlFormat):
    """mxfp4 in the blocks of GGUF files, where it is the type MXFP4; `mxfp4` is the same in safetensors files.

    The scales and the values are those of the OCP standard, but elements i and i + 16 share a byte, and code 8 decodes
    to +0 instead of -0.  The encoder is ggml's: the scale is 2 ** (floor(log2(absmax)) - 2), so up to a quarter of
    the range above 6 scales is clipped, and codes go to the nearest value.
    """

    name, block, ggml_type = "mxfp4_ggml", 32, 39

    def declare(self) -> Declaration:
        return self._declare(
            "4-bit floats (e2m1) with one power of two per 32 elements of a row, in the blocks of GGUF files",
            (Field("scale", "e8m0", 8, covers=32, offset=0), Field("codes", "uint", 4, offset=1, packing=_NIBBLES)),
            "scale * table[codes]",
            Numerics(
                ties="to the smaller magnitude (the first of the table that is nearest, differences in fp32)",
                zero_block="codes 0, scale byte 0 (2^-127)",
                scale_clamp="byte floor(log2f(absmax)) + 125, with log2f's rounding, at least 0 (in ggml it wraps, so "
                "that blocks below 2^-125 become zeros with a huge scale); beyond 6 · scale the largest finite code",
                zero_point="none; codes 0 and 8 are both +0, and 8 is not written",
                reciprocal="none: each value times the scale is compared with the weight",
            ),
            f"{SOURCE}, quantize_row_mxfp4_ref; {_AGREE}, from 2^-125 on",
            table=(*E2M1, 0.0, *(-v for v in E2M1[1:])),
        )

    def _encode_tile(self, job: Encoding, start: int, tile: Float32) -> None:
        blocks = self._blocks(job, start, tile)
        sizes = np.abs(blocks)
        with np.errstate(divide="ignore"):
            power = np.floor(np.log2(sizes.max(axis=1), dtype=np.float64).astype(np.float32))
        exponent = np.maximum(power + np.float32(125), np.float32(0)).astype(np.uint8)  # the logarithm of 0 is -inf
        scale = np.ldexp(np.float32(1), exponent.astype(np.int32) - 127).astype(np.float32)[:, None]
        codes = np.zeros(blocks.shape, np.uint8)
        for low, high in itertools.pairwise(_MAGNITUDES):
            with np.errstate(over="ignore"):
                middle = (low + high) / np.float32(2) * scale  # a power of two times a small number: exact
                middle[np.isinf(high * scale)] = np.inf
            codes += sizes > middle
        codes[(blocks < 0) & (codes > 0)] += 8
        self.store(job.packed, start // 32, {"scale": exponent[:, None].view(ml_dtypes.float8_e8m0fnu), "codes": codes})
