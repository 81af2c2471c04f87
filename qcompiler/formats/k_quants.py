"""ggml's k-quants: superblocks of 256 elements, whose 8 or 16 sub-blocks have small integer scales (and minima)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from qcompiler.formats.base import Encoding
from qcompiler.formats.declaration import Declaration, Field, Numerics
from qcompiler.formats.equation import Entries, Float32
from qcompiler.formats.ggml import SOURCE, GgmlFormat, codes_of, quiet
from qcompiler.formats.ggml_search import (
    SMALLEST,
    Trials,
    descend_scale,
    nearest,
    ordered_sum,
    over,
    plain_range,
    search_affine,
    search_levels,
    search_scale,
    signed_extreme,
    transposed,
)
from qcompiler.formats.packing import Packing, Pieces, planes, together

_LOW_NIBBLES = Pieces(tuple(((e, 0, 4),) for e in range(16)), "the low nibbles of 16 bytes")
_HIGH_NIBBLES = Pieces(tuple(((e, 4, 4),) for e in range(16)), "the high nibbles of 16 bytes")

_SCALES_OF_8 = Pieces(
    tuple(((e, 0, 6),) for e in range(4)) + tuple(((e + 8, 0, 4), (e, 6, 2)) for e in range(4)),
    "the first four in bits 0…5 of bytes 0…3; of the others bits 0…3 in the low nibbles of bytes 8…11, bits 4 and 5 "
    "in bits 6 and 7 of bytes 0…3",
)
_MINS_OF_8 = Pieces(
    tuple(((e + 4, 0, 6),) for e in range(4)) + tuple(((e + 8, 4, 4), (e + 4, 6, 2)) for e in range(4)),
    "the first four in bits 0…5 of bytes 4…7; of the others bits 0…3 in the high nibbles of bytes 8…11, bits 4 and 5 "
    "in bits 6 and 7 of bytes 4…7",
)
_SCALES_OF_16 = Pieces(
    tuple(((e % 8, 4 * (e // 8), 4), (8 + e % 4, 2 * (e // 4), 2)) for e in range(16)),
    "bits 0…3 in nibbles of bytes 0…7, eight entries apart; bits 4 and 5 in bytes 8…11, four entries apart",
)

_CLAMP = "none; an fp16 scale that overflows is an error. Codes are clipped to {}"


def _numerics(value: str, codes: str, zero_block: str, zero_point: str) -> Numerics:
    return Numerics(
        ties=f"to even: code = nearest integer to {value} in fp32, with d and the scales as stored",
        zero_block=f"{zero_block}; a sub-block whose stored scale is 0 keeps the codes of the search",
        scale_clamp=_CLAMP.format(codes),
        zero_point=zero_point,
        reciprocal="divides by d · scale; the search before multiplies by fp32 reciprocals",
    )


def _affine_numerics(largest: int, trials: int, weights: str, levels: int, sigma: str) -> Numerics:
    return _numerics(
        "(w + dmin · min) / (d · scale)",
        f"0…{largest}",
        "all bytes 0; a constant block that is not positive has scale 0 and its value as the minimum",
        f"minima are <= 0 and stored as magnitudes. The best of {trials} roundings by a least-squares line, with "
        f"{weights}; then scale = nearest(s · ({levels} / max s)), d = max s / {levels}, and minima likewise. With an "
        f"importance: 37 roundings, squared errors weighted by importance · sqrt({sigma} + w²), and scales and minima "
        "are searched as well. A falling line gives way to the plain range (ggml keeps low bits of its negative scale)",
    )


class _KQuant(GgmlFormat):
    """A superblock of 256 in sub-blocks of `size`. As in ggml, an importance changes the search."""

    block = 256
    size: ClassVar[int]
    takes_importance = True

    def _parts(self, blocks: Float32) -> Float32:
        """(blocks, 256) to (size, blocks * sub-blocks)."""
        return transposed(blocks, self.size)

    def _mean_square(self, blocks: Float32, times: float) -> Float32:
        """`times` the mean square of each superblock (blocks,), summed in order."""
        return np.float32(times) * ordered_sum(transposed(blocks * blocks, 256)) / np.float32(256)

    def _weighted(self, importance: Float32, blocks: Float32, sigma2: Float32) -> Float32:
        """importance * sqrt(sigma2 + w * w), as (size, blocks * sub-blocks)."""
        weights: Float32 = importance * np.sqrt(sigma2[:, None] + blocks * blocks)
        return self._parts(weights)

    def _round(
        self, x: Float32, codes: Float32, scale: Float32, shift: Float32 | None, limits: tuple[int, int]
    ) -> None:
        """Replaces codes by the nearest ones under stored scales (and minima), where the scale is not 0."""
        live = scale != 0
        divisor: Float32 = np.where(live, scale, np.float32(1)).astype(np.float32, copy=False)
        rounded = nearest((x if shift is None else x + shift) / divisor)
        np.copyto(codes, np.clip(rounded, *limits) - np.float32(limits[0]), where=live)


class _Affine(_KQuant):
    """q2_K, q4_K, q5_K: codes above a minimum, with quantised scales and minima."""

    bits: ClassVar[int]
    level: ClassVar[int]
    """The largest quantised scale and minimum."""
    trials: ClassVar[Trials]
    weighted_trials: ClassVar[Trials] = Trials(-0.9, 0.05, 36)

    def _error_weights(self, blocks: Float32, x: Float32) -> Float32:
        """The weights of errors without an importance, (size, blocks * sub-blocks): rms of the sub-block plus |w|."""
        weights: Float32 = np.sqrt(ordered_sum(x * x) / np.float32(self.size)) + np.abs(x)
        return weights

    def _encode_tile(self, job: Encoding, start: int, tile: Float32) -> None:
        blocks = self._blocks(job, start, tile)
        x = self._parts(blocks)
        importance = self._importance(job, start, blocks)
        with quiet():
            if importance is None:
                weights, trials = self._error_weights(blocks, x), self.trials
            else:
                sigma2 = self._mean_square(blocks, 1 if self.bits == 2 else 2)
                weights, trials = self._weighted(importance, blocks, sigma2), self.weighted_trials
            scale, minimum, codes = search_affine(x, weights, (1 << self.bits) - 1, trials)
            self._repair(x, scale, minimum, codes)
            scales, mins = scale.reshape(len(blocks), -1), -minimum.reshape(len(blocks), -1)
        self._check_scales(job, start, scales)
        self._check_scales(job, start, mins)
        with quiet():
            if importance is None:
                d, levels = self._levels(scales)
                dmin, low_levels = self._levels(mins)
            else:
                total = ordered_sum(weights).reshape(len(blocks), -1).T
                d, levels = _searched_levels(scales, total, self.level)
                dmin, low_levels = _searched_levels(mins, total, self.level)
        stored = {"d": self._half(job, start, d, "scale"), "dmin": self._half(job, start, dmin, "scale of minima")}
        with quiet():
            half = {name: value.astype(np.float32) for name, value in stored.items()}
            shift = (half["dmin"] * low_levels).reshape(-1)
            self._round(x, codes, (half["d"] * levels).reshape(-1), shift, (0, (1 << self.bits) - 1))
        entries = {"scales": levels.astype(np.uint8), "mins": low_levels.astype(np.uint8)}
        self.store(job.packed, start // 256, {**stored, **entries, "codes": codes_of(codes, 256)})

    def _repair(self, x: Float32, scale: Float32, minimum: Float32, codes: Float32) -> None:
        """Gives sub-blocks with a negative scale the plain scale.

        If all but one weight have no importance, rounding may make the slope of the line negative.  Stored scales have
        no sign: ggml keeps the low bits of the negative level, and its other bits overwrite the next field.
        """
        falling = np.flatnonzero(scale < 0)
        if falling.size:
            plain = plain_range(np.ascontiguousarray(x[:, falling]), (1 << self.bits) - 1)
            scale[falling], minimum[falling], codes[:, falling] = plain

    def _levels(self, values: Float32) -> tuple[Float32, Float32]:
        """The largest of (blocks, sub-blocks) divided by `level`, and every value as a multiple of that."""
        top = np.maximum(values.max(axis=1), np.float32(0))
        inverse = np.where(top > 0, over(self.level, top), np.float32(0))
        levels = nearest(inverse[:, None] * values).astype(np.int32).astype(np.uint8)  # wraps, as ggml does
        return top / np.float32(self.level), np.minimum(levels, self.level).astype(np.float32)


def _searched_levels(values: Float32, weights: Float32, largest: int) -> tuple[Float32, Float32]:
    d, levels = search_levels(np.ascontiguousarray(values.T), np.ascontiguousarray(weights), largest)
    return d, levels.T


class Q2_K(_Affine):
    """ggml's q2_K."""

    name, ggml_type, size, bits, level = "q2_K", 10, 16, 2, 15
    trials = Trials(-0.5, 0.1, 15, absolute=True)

    def _error_weights(self, blocks: Float32, x: Float32) -> Float32:
        return np.abs(x)

    def declare(self) -> Declaration:
        return self._declare(
            "2-bit codes above a minimum; each 16 elements have a 4-bit scale and minimum, 256 an fp16 scale of each",
            (
                Field("scales", "uint", 4, covers=16, offset=0, packing=_LOW_NIBBLES),
                Field("mins", "uint", 4, covers=16, offset=0, packing=_HIGH_NIBBLES),
                Field("codes", "uint", 2, offset=16, packing=planes(2, 32, 256)),
                Field("d", "f16", 16, covers=256, offset=80),
                Field("dmin", "f16", 16, covers=256, offset=82),
            ),
            "d * scales * codes - dmin * mins",
            _affine_numerics(3, 16, "absolute errors weighted by |w|", 15, "mean(w²)"),
            f"{SOURCE}, quantize_row_q2_K_ref and quantize_q2_K (gguf-py has no encoder)",
        )


class Q3_K(_KQuant):
    """ggml's q3_K."""

    name, ggml_type, size = "q3_K", 11, 16

    def declare(self) -> Declaration:
        codes = together(planes(2, 32, 256, first=32), planes(1, 32, 256))
        return self._declare(
            "3-bit codes with their zero at 4; each 16 elements have a 6-bit scale (zero at 32), 256 an fp16 one",
            (
                Field("codes", "uint", 3, offset=0, packing=codes),
                Field("scales", "uint", 6, covers=16, offset=96, packing=_SCALES_OF_16),
                Field("d", "f16", 16, covers=256, offset=108),
            ),
            "d * (scales - 32) * (codes - 4)",
            _numerics(
                "w / (d · (scale - 32))",
                "0…7",
                "codes 0, scales 0, d 0, where the largest magnitude lies below 1e-15",
                "4, fixed; scales 32. Sub-blocks start from (signed extreme) / -4 and move one code after another "
                "while the squared error, weighted by w², falls (five rounds at most); d = (signed extreme of the "
                "scales) / -32. With an importance: 19 scales tried, squared errors weighted by importance · "
                "sqrt(2 · mean(w²) + w²), and the scales are searched as well",
            ),
            f"{SOURCE}, quantize_row_q3_K_ref and quantize_q3_K (gguf-py has no encoder)",
        )

    def _encode_tile(self, job: Encoding, start: int, tile: Float32) -> None:
        blocks = self._blocks(job, start, tile)
        x = self._parts(blocks)
        importance = self._importance(job, start, blocks)
        with quiet():
            if importance is None:
                scale, codes = descend_scale(x, 4)
            else:
                weights = self._weighted(importance, blocks, self._mean_square(blocks, 2))
                scale, codes = search_scale(x, weights, 4)
            scales = scale.reshape(len(blocks), -1)
        self._check_scales(job, start, scales)
        with quiet():
            if importance is None:
                d, levels = _signed_levels(scales, 32)
                levels = np.clip(levels, -32, 31) + np.float32(32)
                levels[d == 0] = 0
            else:
                total = ordered_sum(weights).reshape(len(blocks), -1).T
                d, found = search_scale(np.ascontiguousarray(scales.T), np.ascontiguousarray(total), 32)
                levels = found.T
        stored = self._half(job, start, d, "scale")
        with quiet():
            step = stored.astype(np.float32) * (levels - np.float32(32))
            self._round(x, codes, step.reshape(-1), None, (-4, 3))
        entries: dict[str, Entries] = {"scales": levels.astype(np.uint8), "d": stored, "codes": codes_of(codes, 256)}
        self.store(job.packed, start // 256, entries)


def _signed_levels(scales: Float32, half: int) -> tuple[Float32, Float32]:
    """d, with which the signed extreme of (blocks, sub-blocks) becomes -half, and the nearest multiples of it."""
    inverse = over(-half, signed_extreme(scales.T))
    d = np.where(np.isinf(inverse), np.float32(0), over(1, inverse))
    return d, nearest(inverse[:, None] * scales)


class _ScaleMin(_Affine):
    """q4_K and q5_K."""

    size, level = 32, 63
    packing: ClassVar[Packing]

    def declare(self) -> Declaration:
        return self._declare(
            f"{self.bits}-bit codes above a minimum; each 32 elements have a 6-bit scale and minimum, "
            "256 an fp16 scale of each",
            (
                Field("d", "f16", 16, covers=256, offset=0),
                Field("dmin", "f16", 16, covers=256, offset=2),
                Field("scales", "uint", 6, covers=32, offset=4, packing=_SCALES_OF_8),
                Field("mins", "uint", 6, covers=32, offset=4, packing=_MINS_OF_8),
                Field("codes", "uint", self.bits, offset=16, packing=self.packing),
            ),
            "d * scales * codes - dmin * mins",
            _affine_numerics(
                (1 << self.bits) - 1,
                self.trials.count + 1,
                "squared errors weighted by rms of the 32 + |w|",
                63,
                "2 · mean(w²)",
            ),
            f"{SOURCE}, quantize_row_{self.name}_ref and quantize_{self.name} (gguf-py has no encoder)",
        )


class Q4_K(_ScaleMin):
    """ggml's q4_K."""

    name, bits, ggml_type = "q4_K", 4, 12
    trials = Trials(-1.0, 0.1, 20)
    packing = planes(4, 32, 256)


class Q5_K(_ScaleMin):
    """ggml's q5_K."""

    name, bits, ggml_type = "q5_K", 5, 13
    trials = Trials(-0.5, 0.1, 15)
    packing = together(planes(4, 32, 256, first=32), planes(1, 32, 256))


class Q6_K(_KQuant):
    """ggml's q6_K."""

    name, ggml_type, size = "q6_K", 14, 16

    def declare(self) -> Declaration:
        codes = together(planes(4, 64, 256), planes(2, 32, 256, first=128))
        return self._declare(
            "6-bit codes with their zero at 32; each 16 elements have an 8-bit scale, 256 an fp16 one",
            (
                Field("codes", "uint", 6, offset=0, packing=codes),
                Field("scales", "int", 8, covers=16, offset=192),
                Field("d", "f16", 16, covers=256, offset=208),
            ),
            "d * scales * (codes - 32)",
            _numerics(
                "w / (d · scale)",
                "0…63",
                "all bytes 0, where every scale of a sub-block lies below 1e-15",
                "32, fixed. Sub-blocks take the best of 19 scales around (signed extreme) / -32, the squared errors "
                "weighted by w² or by the importance; d = (signed extreme of the scales) / -128, scales at most 127",
            ),
            f"{SOURCE}, quantize_row_q6_K_ref and quantize_q6_K (gguf-py has no encoder)",
        )

    def _encode_tile(self, job: Encoding, start: int, tile: Float32) -> None:
        blocks = self._blocks(job, start, tile)
        x = self._parts(blocks)
        importance = self._importance(job, start, blocks)
        with quiet():
            scale, codes = search_scale(x, x * x if importance is None else self._parts(importance), 32)
            scales = scale.reshape(len(blocks), -1)
        self._check_scales(job, start, scales)
        zero = np.abs(scales).max(axis=1) < SMALLEST
        with quiet():
            d, levels = _signed_levels(np.where(zero[:, None], np.float32(1), scales), 128)
        d[zero], levels[zero] = 0, 0
        stored = self._half(job, start, d, "scale")
        levels = np.minimum(levels, np.float32(127))
        with quiet():
            self._round(x, codes, (stored.astype(np.float32) * levels).reshape(-1), None, (-32, 31))
        every = codes_of(codes, 256)
        every[zero] = 0
        entries: dict[str, Entries] = {"codes": every, "scales": levels.astype(np.int8), "d": stored}
        self.store(job.packed, start // 256, entries)
