"""Codebooks of vectors: one index selects the codes of several elements, and a few more bits select their signs.

    book = Codebook("iq3_xxs", base=8, size=4, count=256, text=…)      256 of the 8^4 vectors of four digits
    Vectors(book, index=Pieces(…), flags=Pieces(…))                    where a block stores indices and signs

An element's code is its digit of the vector, and above it a flag: its sign, for instance.  So a code has few bits and
stands alone, and kernels decode it as they decode any other code: only canonical bytes have vectors.
"""

from __future__ import annotations

import base64
import functools
import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qcompiler.errors import FormatError
from qcompiler.formats.packing import Bytes, Packing, Piece, Pieces

__all__ = ["Codebook", "Vectors", "bit_run", "parity"]


@dataclass(frozen=True)
class Codebook:
    """`count` vectors of `size` digits below `base`, in ascending order of the number whose lowest digit comes first.

    `text` says which of the base ** size numbers are in the book: one bit for each, the lowest bit of a byte first,
    compressed by zlib and written in base 85.
    """

    name: str
    base: int
    size: int
    count: int
    text: str

    @property
    def width(self) -> int:
        """Bits of a digit."""
        return (self.base - 1).bit_length()

    @functools.cached_property
    def points(self) -> Bytes:
        """The digits of each vector: uint8 (count, size)."""
        bits = np.unpackbits(np.frombuffer(zlib.decompress(base64.b85decode(self.text)), np.uint8), bitorder="little")
        numbers = np.flatnonzero(bits)
        if len(numbers) != self.count or numbers[-1] >= self.base**self.size:
            raise ValueError(f"codebook {self.name!r}: {len(numbers)} vectors, not {self.count}")
        return (numbers[:, None] // self.base ** np.arange(self.size) % self.base).astype(np.uint8)

    @functools.cached_property
    def words(self) -> npt.NDArray[np.uint16]:
        """The digits of each vector in one word, `width` bits each, the first digit lowest: uint16 (count,)."""
        return self.words_of(self.points)

    def words_of(self, digits: Bytes) -> npt.NDArray[np.uint16]:
        """The same for any digits (…, size)."""
        places = np.uint16(1) << np.arange(0, self.width * self.size, self.width, dtype=np.uint16)
        words: npt.NDArray[np.uint16] = (digits * places).sum(axis=-1, dtype=np.uint16)
        return words

    @functools.cached_property
    def indices(self) -> npt.NDArray[np.int16]:
        """The index of each word; -1 for a word that is not in the book."""
        found = np.full(1 << self.width * self.size, -1, np.int16)
        found[self.words] = np.arange(self.count, dtype=np.int16)
        return found


@dataclass(frozen=True)
class Vectors(Packing):
    """The codes of a block: digits of vectors of `book`, and above them a flag of each element.

    `index` has the pieces of each vector's index.  `flags` has those of each element's flag, which is the parity of
    their bits: one bit that an element has for itself or shares, or seven bits whose parity is the eighth sign.  None
    for codes that have no flag.
    """

    book: Codebook
    index: Pieces
    flags: Pieces | None

    @property
    def entries(self) -> int:
        return self.index.entries * self.book.size

    @functools.cached_property
    def nbytes(self) -> int:
        return max(self.index.nbytes, 0 if self.flags is None else self.flags.nbytes)

    def used(self) -> Bytes:
        mask = np.zeros(self.nbytes, np.uint8)
        for part in (self.index, self.flags):
            if part is not None:
                mask[: part.nbytes] |= part.used()
        return mask

    def unpack(self, raw: Bytes) -> Bytes:
        digits = self.book.points[self.index.unpack(raw)].reshape(len(raw), -1)
        if self.flags is None:
            return digits
        return digits | parity(self.flags.unpack(raw)) << np.uint8(self.book.width)

    def pack(self, entries: Bytes) -> Bytes:
        """FormatError for codes that no index and no flags give."""
        book, out = self.book, np.zeros((len(entries), self.nbytes), np.uint8)
        digits = entries & np.uint8((1 << book.width) - 1)
        indices = book.indices[book.words_of(digits.reshape(len(entries), -1, book.size))]
        if self.flags is not None:
            own, pieces = self.stored_flags
            out[:, : pieces.nbytes] = pieces.pack(entries[:, own] >> np.uint8(book.width))
        out[:, : self.index.nbytes] |= self.index.pack(indices.astype(np.uint16).astype(self.index.dtype))
        if (indices < 0).any() or not np.array_equal(self.unpack(out), entries):
            raise FormatError(f"codes that no vector of the codebook {book.name} and no flags give")
        return out

    def describe(self) -> str:
        book = self.book
        text = f"digits of vectors of {book.size}: {book.count} vectors, an index of {self.index.bits} bits for each"
        if self.flags is None:
            return text
        eight = self.flags.pieces[:8]
        if any(sum(width for _, _, width in of) > 1 for of in eight):
            return text + "; above a digit its flag: seven of eight are stored, the eighth is their parity"
        return text + "; above a digit " + ("its flag" if len(set(eight)) == 8 else "a flag that eight elements share")

    @functools.cached_property
    def stored_flags(self) -> tuple[list[int], Pieces]:
        """(elements whose flag is a stored bit, the places of these bits)."""
        pieces = () if self.flags is None else self.flags.pieces
        stored = [(e, of) for e, of in enumerate(pieces) if sum(width for _, _, width in of) == 1]
        return [e for e, _ in stored], Pieces(tuple(of for _, of in stored))


def parity(values: Bytes) -> Bytes:
    """1 where an odd number of bits is set."""
    folded = values ^ values >> np.uint8(4)
    folded ^= folded >> np.uint8(2)
    folded ^= folded >> np.uint8(1)
    folded &= np.uint8(1)
    return folded


def bit_run(first: int, width: int) -> tuple[Piece, ...]:
    """The pieces of `width` consecutive bits from bit number `first` on; bit 0 is the lowest of byte 0."""
    pieces = []
    while width:
        here = min(width, 8 - first % 8)
        pieces.append((first // 8, first % 8, here))
        first, width = first + here, width - here
    return tuple(pieces)
