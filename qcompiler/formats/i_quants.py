"""ggml's i-quants of one to three bits: codebooks of vectors, signs beside them, and small scales.

A superblock of 256 elements has an fp16 scale; 16 or 32 elements share a scale of 3 or 4 bits.  Four or eight elements
are one vector of a codebook (codebooks_ggml.py).  In iq2 and iq3 the vector holds magnitudes, and each element has a
sign, of which some formats store seven of eight: the number of minus signs of eight elements is even.  In iq1 the
vector holds -1, 0 and 1, and a bit for several elements moves all of them by 1/8 up or down.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from qcompiler.formats import codebooks_ggml as books
from qcompiler.formats.base import Encoding
from qcompiler.formats.codebook import Codebook, Vectors, bit_run
from qcompiler.formats.declaration import Declaration, Field, Numerics
from qcompiler.formats.equation import Entries, Float32
from qcompiler.formats.ggml import SOURCE, GgmlFormat
from qcompiler.formats.packing import Piece, Pieces
from qcompiler.formats.vector_search import Found, Sought, Target, search, signs_and_sizes

Places = tuple[tuple[Piece, ...], ...]


def _signed(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The values of codes that have a sign above their digit. Digits that no vector has repeat the largest size."""
    whole = sizes + sizes[-1:] * ((1 << (len(sizes) - 1).bit_length()) - len(sizes))
    return (*whole, *(-size for size in whole))


_IQ2_VALUES = _signed((8, 25, 43))
_IQ3_XXS_VALUES = _signed((4, 12, 20, 28, 36, 44, 52, 62))
_IQ3_S_VALUES = _signed((1, 3, 5, 7, 9, 11, 13, 15))
_IQ1_SHIFTS = (0.125, -0.125)
_IQ1_M_VALUES = tuple(number + shift for shift in _IQ1_SHIFTS for number in (-1, 0, 1, 1))


def _even_signs(first_bits: list[int]) -> Places:
    """Seven sign bits of each eight elements, from these bits on; the eighth sign makes their number even."""
    seven = [bit_run(first, 7) for first in first_bits]
    return tuple(bit_run(first + e, 1) if e < 7 else seven[v] for v, first in enumerate(first_bits) for e in range(8))


def _bytes_and(high: list[int], width: int) -> Places:
    """Indices of which byte v holds the low bits of vector v's; `width` more bits start at bit high[v]."""
    return tuple((*bit_run(8 * v, 8), *bit_run(bit, width)) for v, bit in enumerate(high))


def _vectors(book: Codebook, index: Places, flags: Places | None) -> Vectors:
    return Vectors(book, Pieces(index), None if flags is None else Pieces(flags))


class _IQuant(GgmlFormat):
    """`sub` elements share a level; level l stands for `steps[l]` times the superblock's scale."""

    takes_importance = True
    block = 256
    book: ClassVar[Codebook]
    sub: ClassVar[int]
    steps: ClassVar[tuple[float, ...]]
    packing: ClassVar[Vectors]
    signs: ClassVar[str]
    """What the flags of codes are: "none", "free" or "even" signs (of eight, an even number is minus), or "shifts"."""

    def _numerics(self, choice: str, zero: str) -> Numerics:
        return Numerics(
            ties="the vector of the codebook with the least squared error, of several equal ones the first",
            zero_block=zero,
            scale_clamp=f"levels 0…{len(self.steps) - 1}; a scale that exceeds fp16 is an error",
            zero_point=choice,
            reciprocal="none: scales are quotients of sums, and vectors are compared by their errors",
        )

    @abstractmethod
    def sought(self) -> Sought:
        """What the search chooses among."""

    @property
    def far(self) -> float:
        """Larger magnitudes are no multiples of a codebook's numbers that fp16 scales can reach."""
        return self.reach

    def _halves(self, job: Encoding, start: int) -> Callable[[Float32], npt.NDArray[np.float16]]:
        """Rounds scales of the superblocks of a tile for storage."""
        return lambda exact: self._half(job, start, exact, "scale")

    def _weights(self, job: Encoding, start: int, blocks: Float32) -> Float32:
        """The weight of each element's squared error: the importance of its column, or 1."""
        importance = self._importance(job, start, blocks)
        return np.ones_like(blocks) if importance is None else importance


_REFERENCE = f"{SOURCE}, dequantize_row_{{name}}; encoding is this project's own search"
_SIGNED_ZERO = "d 0 and level 0, codes of the first vector without minus signs"


class _Signed(_IQuant):
    """Magnitudes of a codebook, and signs."""

    values: ClassVar[tuple[int, ...]]

    def sought(self) -> Sought:
        sizes = np.array(self.values[: len(self.values) // 2], np.float32)
        return Sought((sizes[self.book.points],), self.sub, np.array(self.steps, np.float32))

    def _encode_tile(self, job: Encoding, start: int, tile: Float32) -> None:
        blocks = self._blocks(job, start, tile)
        weights = self._weights(job, start, blocks)
        signs, sizes = signs_and_sizes(blocks, weights, even=self.signs == "even")
        found = search(self.sought(), Target(sizes, weights), self._halves(job, start))
        digits = self.book.points[found.points].reshape(len(blocks), -1)
        codes = digits | signs << np.uint8(self.book.width)
        codes[found.scale[:, 0] == 0] = np.resize(self.book.points[0], blocks.shape[1])
        entries: dict[str, Entries] = {"codes": codes, "scales": found.levels, "d": found.scale}
        self.store(job.packed, start // self.block, entries)

    def _made(self, summary: str, offset: int, scales: Field, decode: str) -> Declaration:
        choice = "none; signs beside the sizes of a vector"
        if self.signs == "even":
            choice += ". Where the weights have an odd number of minus signs, the least important one changes"
        return self._declare(
            summary,
            (
                Field("d", "f16", 16, covers=256, offset=0),
                Field("codes", "uint", self.book.width + 1, offset=offset, packing=self.packing),
                scales,
            ),
            decode,
            self._numerics(choice, _SIGNED_ZERO),
            _REFERENCE.format(name=self.name),
            table=self.values,
        )


_QUARTERS = tuple((level + 0.5) * 0.25 for level in range(16))
_HALVES = tuple((level + 0.5) * 0.5 for level in range(16))
_ODDS_OF_16 = tuple(2 * level + 1.0 for level in range(16))
_ODDS_OF_8 = tuple(2 * level + 1.0 for level in range(8))


class IQ2_XXS(_Signed):
    """ggml's iq2_xxs: eight bytes for 32 elements, four of indices, then 28 bits of signs and four of a scale."""

    name, ggml_type = "iq2_xxs", 16
    book, sub, steps, values, signs = books.IQ2_XXS, 32, _QUARTERS, _IQ2_VALUES, "even"
    packing = _vectors(
        book,
        tuple(bit_run(64 * (v // 4) + 8 * (v % 4), 8) for v in range(32)),
        _even_signs([64 * (v // 4) + 32 + 7 * (v % 4) for v in range(32)]),
    )

    def declare(self) -> Declaration:
        return self._made(
            "256 vectors of 8 sizes, signs; 32 elements of a row share a 4-bit scale, 256 an fp16 one",
            2,
            Field("scales", "uint", 4, covers=32, offset=2, packing=_scales_above_signs(7, 8)),
            "d * (scales + 0.5) * 0.25 * table[codes]",
        )


def _scales_above_signs(first: int, step: int) -> Pieces:
    every = {4: "fourth", 8: "eighth"}[step]
    return Pieces(tuple(((first + step * g, 4, 4),) for g in range(8)), f"the high nibble of every {every} byte")


class IQ2_XS(_Signed):
    """ggml's iq2_xs: two bytes for 8 elements, nine bits of an index and seven of signs."""

    name, ggml_type = "iq2_xs", 17
    book, sub, steps, values, signs = books.IQ2_XS, 16, _QUARTERS, _IQ2_VALUES, "even"
    packing = _vectors(
        book,
        tuple(bit_run(16 * v, 9) for v in range(32)),
        _even_signs([16 * v + 9 for v in range(32)]),
    )

    def declare(self) -> Declaration:
        return self._made(
            "512 vectors of 8 sizes, signs; 16 elements of a row share a 4-bit scale, 256 an fp16 one",
            2,
            Field("scales", "uint", 4, covers=16, offset=66),
            "d * (scales + 0.5) * 0.25 * table[codes]",
        )


class IQ2_S(_Signed):
    """ggml's iq2_s: bytes of indices, bytes of signs, two more bits of each index, scales."""

    name, ggml_type = "iq2_s", 22
    book, sub, steps, values, signs = books.IQ2_S, 16, _QUARTERS, _IQ2_VALUES, "free"
    packing = _vectors(
        book,
        _bytes_and([8 * 64 + 2 * v for v in range(32)], 2),
        tuple(bit_run(8 * 32 + e, 1) for e in range(256)),
    )

    def declare(self) -> Declaration:
        return self._made(
            "1024 vectors of 8 sizes, signs; 16 elements of a row share a 4-bit scale, 256 an fp16 one",
            2,
            Field("scales", "uint", 4, covers=16, offset=74),
            "d * (scales + 0.5) * 0.25 * table[codes]",
        )


class IQ3_XXS(_Signed):
    """ggml's iq3_xxs: bytes of indices, then for 32 elements each 28 bits of signs and four of a scale."""

    name, ggml_type = "iq3_xxs", 18
    book, sub, steps, values, signs = books.IQ3_XXS, 32, _HALVES, _IQ3_XXS_VALUES, "even"
    packing = _vectors(
        book,
        tuple(bit_run(8 * v, 8) for v in range(64)),
        _even_signs([8 * 64 + 32 * (v // 4) + 7 * (v % 4) for v in range(32)]),
    )

    def declare(self) -> Declaration:
        return self._made(
            "256 vectors of 4 sizes, signs; 32 elements of a row share a 4-bit scale, 256 an fp16 one",
            2,
            Field("scales", "uint", 4, covers=32, offset=2, packing=_scales_above_signs(67, 4)),
            "d * (scales + 0.5) * 0.5 * table[codes]",
        )


class IQ3_S(_Signed):
    """ggml's iq3_s: bytes of indices, one more bit of each, bytes of signs, scales."""

    name, ggml_type = "iq3_s", 21
    book, sub, steps, values, signs = books.IQ3_S, 32, _ODDS_OF_16, _IQ3_S_VALUES, "free"
    packing = _vectors(
        book,
        _bytes_and([8 * 64 + v for v in range(64)], 1),
        tuple(bit_run(8 * 72 + e, 1) for e in range(256)),
    )

    def declare(self) -> Declaration:
        return self._made(
            "512 vectors of 4 sizes, signs; 32 elements of a row share a 4-bit scale, 256 an fp16 one",
            2,
            Field("scales", "uint", 4, covers=32, offset=106),
            "d * (scales * 2 + 1) * table[codes]",
        )


# --- one bit ---------------------------------------------------------------------------------------------------------

_IQ1_CHOICE = "1, fixed, moved by 1/8 up or down for all elements of a vector or of a scale, whichever has less error"


class IQ1_S(_IQuant):
    """ggml's iq1_s: bytes of indices; words for 32 elements: three more bits of four indices, a scale, the shift."""

    name, ggml_type = "iq1_s", 19
    book, sub, steps, signs = books.IQ1, 32, _ODDS_OF_8, "none"
    packing = _vectors(
        book,
        _bytes_and([8 * 32 + 16 * (v // 4) + 3 * (v % 4) for v in range(32)], 3),
        None,
    )

    def declare(self) -> Declaration:
        scales = Pieces(tuple(((33 + 2 * g, 4, 3),) for g in range(8)), "bits 12…14 of words of 16")
        shifts = Pieces(tuple(((33 + 2 * g, 7, 1),) for g in range(8)), "bit 15 of words of 16")
        return self._declare(
            "2048 vectors of 8 values -1, 0, 1, moved by 1/8 up or down; 32 elements of a row share the shift and a "
            "3-bit scale, 256 an fp16 one",
            (
                Field("d", "f16", 16, covers=256, offset=0),
                Field("codes", "uint", 2, offset=2, packing=self.packing),
                Field("scales", "uint", 3, covers=32, offset=2, packing=scales),
                Field("shifts", "uint", 1, covers=32, offset=2, packing=shifts),
            ),
            "d * (scales * 2 + 1) * (codes - 1 + shift[shifts])",
            self._numerics(_IQ1_CHOICE, "d 0, level 0, shift up, codes of the first vector"),
            _REFERENCE.format(name=self.name),
            tables={"shift": _IQ1_SHIFTS},
        )

    def _encode_tile(self, job: Encoding, start: int, tile: Float32) -> None:
        blocks = self._blocks(job, start, tile)
        found = search(self.sought(), Target(blocks, self._weights(job, start, blocks)), self._halves(job, start))
        zero = found.scale[:, 0] == 0
        entries: dict[str, Entries] = {
            "d": found.scale,
            "codes": np.where(zero[:, None], np.resize(self.book.points[0], 256), self._codes(found)),
            "scales": found.levels,
            "shifts": np.where(zero[:, None], np.uint8(0), found.variants),
        }
        self.store(job.packed, start // 256, entries)

    def _codes(self, found: Found) -> Entries:
        return self.book.points[found.points].reshape(len(found.points), -1)

    def sought(self) -> Sought:
        digits = self.book.points.astype(np.float32) - np.float32(1)
        variants = tuple(digits + np.float32(shift) for shift in _IQ1_SHIFTS)
        return Sought(variants, self.sub, np.array(self.steps, np.float32))


class IQ1_M(_IQuant):
    """ggml's iq1_m: bytes of indices, nibbles with three more bits and the shift, scales with the fp16 scale in their
    highest nibbles."""

    name, ggml_type = "iq1_m", 29
    book, sub, steps, signs = books.IQ1, 16, _ODDS_OF_8, "shifts"
    packing = _vectors(
        book,
        _bytes_and([8 * 32 + 4 * v for v in range(32)], 3),
        tuple(bit_run(8 * 32 + 4 * (e // 8) + 3, 1) for e in range(256)),
    )

    def declare(self) -> Declaration:
        scales = Pieces(
            tuple(bit_run(16 * (s // 4) + 3 * (s % 4), 3) for s in range(16)), "four of 3 bits in each word of 16"
        )
        d = Pieces(
            (tuple(piece for word in range(4) for piece in bit_run(16 * word + 12, 4)),),
            "the high nibbles of four words of 16, the lowest first",
        )
        return self._declare(
            "2048 vectors of 8 values -1, 0, 1, each moved by 1/8 up or down; 16 elements of a row share a 3-bit "
            "scale, 256 an fp16 one",
            (
                Field("codes", "uint", 3, offset=0, packing=self.packing),
                Field("scales", "uint", 3, covers=16, offset=48, packing=scales),
                Field("d", "f16", 16, covers=256, offset=48, packing=d),
            ),
            "d * (scales * 2 + 1) * table[codes]",
            self._numerics(_IQ1_CHOICE, "d 0, level 0, shifts up, codes of the first vector"),
            _REFERENCE.format(name=self.name),
            table=_IQ1_M_VALUES,
        )

    def _encode_tile(self, job: Encoding, start: int, tile: Float32) -> None:
        blocks = self._blocks(job, start, tile)
        found = search(self.sought(), Target(blocks, self._weights(job, start, blocks)), self._halves(job, start))
        shifts, points = np.divmod(found.points, self.book.count)
        codes = self.book.points[points] | shifts.astype(np.uint8)[..., None] << np.uint8(self.book.width)
        codes = codes.reshape(len(blocks), -1)
        codes[found.scale[:, 0] == 0] = np.resize(self.book.points[0], 256)
        self.store(job.packed, start // 256, {"codes": codes, "scales": found.levels, "d": found.scale})

    def sought(self) -> Sought:
        digits = self.book.points.astype(np.float32) - np.float32(1)
        every = np.concatenate([digits + np.float32(shift) for shift in _IQ1_SHIFTS])
        return Sought((every,), self.sub, np.array(self.steps, np.float32))
