"""How entries of odd widths share bytes: declared as pieces of bits, from which packing and unpacking are derived.

    planes(2, stride=32, entries=256)       q2_K's codes: byte l of 32 holds elements l, l + 32, l + 64, l + 96
    stream(3, entries=32)                   a stream of bits, lowest first, that crosses bytes
    together(planes(4, 16, 32), planes(1, 4, 32))      q5_0's codes: four bits here, the fifth in bytes behind them
    Pieces(((…),))                          anything else: the places of each entry's bits, lowest bits first

A packing is a bijection between the entries of a block and the block's bytes if every bit belongs to an entry; bits
that belong to no entry are zero.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
LONG_RUN = 8
"""From this many neighbouring entries on, a slice is worth a step of its own."""

Piece = tuple[int, int, int]
"""(byte of the block, lowest bit in it, number of bits)"""


class Packing(ABC):
    """How the entries of one block are stored in its `nbytes` bytes."""

    @property
    @abstractmethod
    def entries(self) -> int:
        """Entries of a block."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of a block."""

    @abstractmethod
    def unpack(self, raw: Bytes) -> Bytes:
        """Bytes (blocks, nbytes) to entries (blocks, entries): uint8, or uint16 if they have more than 8 bits."""

    @abstractmethod
    def pack(self, entries: Bytes) -> Bytes:
        """Entries (blocks, entries), each within its width, to bytes (blocks, nbytes)."""

    @abstractmethod
    def describe(self) -> str:
        """A sentence for docs/formats.md."""

    def used(self) -> Bytes:
        """The bits of a block's bytes that belong to entries, as a mask (nbytes,)."""
        return np.full(self.nbytes, 0xFF, np.uint8)


@dataclass(frozen=True)
class Pieces(Packing):
    """Entries whose bits are stored in pieces: `pieces[e]` lists the pieces of entry e, lowest bits first."""

    pieces: tuple[tuple[Piece, ...], ...]
    text: str = ""

    @property
    def entries(self) -> int:
        return len(self.pieces)

    @functools.cached_property
    def nbytes(self) -> int:
        return 1 + max(byte for entry in self.pieces for byte, _, _ in entry)

    @functools.cached_property
    def bits(self) -> int:
        """Bits of the widest entry: 16 at most."""
        return max(sum(width for _, _, width in entry) for entry in self.pieces)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of unpacked entries: uint8, or uint16 for entries of more than 8 bits."""
        return np.dtype("u1") if self.bits <= 8 else np.dtype("u2")

    def used(self) -> Bytes:
        mask = np.zeros(self.nbytes, np.uint8)
        for entry in self.pieces:
            for byte, shift, width in entry:
                mask[byte] |= ((1 << width) - 1) << shift
        return mask

    def unpack(self, raw: Bytes) -> Bytes:
        raw = raw.astype(self.dtype, copy=False)
        out = np.zeros((len(raw), self.entries), self.dtype)
        for entries, stored, shift, mask, place in self._runs:
            found = raw[:, stored] >> shift
            found &= mask
            if place:
                found <<= place
            out[:, entries] |= found
        for bytes_, shifts, masks, places, which in self._gathers:
            gathered = raw[:, bytes_]
            gathered >>= shifts
            gathered &= masks
            gathered <<= places
            if which is None:
                out |= gathered
            else:
                out[:, which] |= gathered
        return out

    def pack(self, entries: Bytes) -> Bytes:
        out = np.zeros((len(entries), self.nbytes), np.uint8)
        for byte, shift, mask, place, which in self._scatters:
            found = entries[:, which]
            found >>= place
            found &= mask
            found <<= shift
            out[:, byte] |= found.astype(np.uint8, copy=False)
        return out

    def describe(self) -> str:
        return self.text or f"{self.entries} entries in {self.nbytes} bytes, by pieces of bits"

    @functools.cached_property
    def _rows(self) -> list[tuple[int, int, int, int, int]]:
        """(entry, byte, shift, mask, place) of each piece; `place` is its lowest bit in the entry."""
        rows = []
        for e, entry in enumerate(self.pieces):
            place = 0
            for byte, shift, width in entry:
                rows.append((e, byte, shift, (1 << width) - 1, place))
                place += width
        return rows

    @functools.cached_property
    def _in_runs(self) -> list[list[tuple[int, int, int, int, int]]]:
        """`_rows` cut into runs of neighbouring entries in neighbouring bytes with equal shift, mask and place."""
        runs: list[list[tuple[int, int, int, int, int]]] = []
        for row in sorted(self._rows, key=lambda row: (row[4], row[0])):
            last = runs[-1][-1] if runs else None
            if last is not None and row == (last[0] + 1, last[1] + 1, *last[2:]):
                runs[-1].append(row)
            else:
                runs.append([row])
        return runs

    @functools.cached_property
    def _runs(self) -> list[tuple[slice, slice, np.uint8, np.uint8, np.uint8]]:
        """Steps of `unpack` for long runs, by (entries, bytes, shift, mask, place): slices with one shift for all are
        several times as fast as a shift for each entry."""
        return [
            (slice(e, e + len(run)), slice(byte, byte + len(run)), np.uint8(shift), np.uint8(mask), np.uint8(place))
            for run in self._in_runs
            if len(run) >= LONG_RUN
            for e, byte, shift, mask, place in run[:1]
        ]

    @functools.cached_property
    def _gathers(self) -> list[tuple[npt.NDArray[np.intp], Bytes, Bytes, Bytes, npt.NDArray[np.intp] | None]]:
        """Steps of `unpack` for all other pieces: one for the first piece of each entry, one for the second…"""
        alone = [row for run in self._in_runs if len(run) < LONG_RUN for row in run]
        return [_columns(step, self.entries) for step in _unrepeated(alone, key=0)]

    @functools.cached_property
    def _scatters(self) -> list[tuple[npt.NDArray[np.intp], Bytes, Bytes, Bytes, npt.NDArray[np.intp]]]:
        """Steps of `pack`; in each step every byte occurs at most once."""
        steps = (np.array(step) for step in _unrepeated(self._rows, key=1))
        return [(s[:, 1], _u8(s[:, 2]), _u8(s[:, 3]), _u8(s[:, 4]), s[:, 0]) for s in steps]


def _unrepeated(rows: list[tuple[int, int, int, int, int]], key: int) -> list[list[tuple[int, int, int, int, int]]]:
    """The rows split into lists; no list holds a value of column `key` twice."""
    seen: dict[int, int] = {}
    lists: list[list[tuple[int, int, int, int, int]]] = []
    for row in rows:
        number = seen.get(row[key], 0)
        seen[row[key]] = number + 1
        if number == len(lists):
            lists.append([])
        lists[number].append(row)
    return lists


def _columns(
    step: list[tuple[int, int, int, int, int]], count: int
) -> tuple[npt.NDArray[np.intp], Bytes, Bytes, Bytes, npt.NDArray[np.intp] | None]:
    s = np.array(step)
    every = len(step) == count and np.array_equal(s[:, 0], np.arange(count))
    return s[:, 1], _u8(s[:, 2]), _u8(s[:, 3]), _u8(s[:, 4]), None if every else s[:, 0]


def _u8(values: npt.NDArray[np.int_]) -> Bytes:
    return values.astype(np.uint8)


@dataclass(frozen=True)
class Trits(Packing):
    """Base-3 digits as in ggml's tq1_0: a byte q is a fraction q / 256, its digit n is ``(q * 3^n mod 256) * 3 >> 8``.

    `runs` are (bytes, digits per byte): in a run of b bytes, digit n of byte l is entry ``n * b + l`` of the run.  A
    byte is ``ceil(v * 256 / 243)`` of the five-digit number v, the first digit highest and missing digits zero.  Other
    bytes, which no encoder writes, unpack to digits, too, but packing these digits gives different bytes.
    """

    runs: tuple[tuple[int, int], ...]

    @property
    def entries(self) -> int:
        return sum(count * digits for count, digits in self.runs)

    @property
    def nbytes(self) -> int:
        return sum(count for count, _ in self.runs)

    def unpack(self, raw: Bytes) -> Bytes:
        parts, first = [], 0
        for count, digits in self.runs:
            run = raw[:, first : first + count].astype(np.uint16)
            parts += [((run * 3**n & 255) * 3 >> 8).astype(np.uint8) for n in range(digits)]
            first += count
        return np.concatenate(parts, axis=1)

    def pack(self, entries: Bytes) -> Bytes:
        parts, first = [], 0
        for count, digits in self.runs:
            number = np.zeros((len(entries), count), np.uint16)
            for n in range(5):
                number *= 3
                if n < digits:
                    number += entries[:, first + n * count : first + (n + 1) * count]
            parts.append(((number * 256 + 242) // 243).astype(np.uint8))
            first += count * digits
        return np.concatenate(parts, axis=1)

    def describe(self) -> str:
        runs = ", ".join(f"{count} bytes of {digits}" for count, digits in self.runs)
        return f"base-3 digits: {runs}, first digit highest"


@functools.lru_cache
def planes(bits: int, stride: int, entries: int, *, first: int = 0, text: str = "") -> Pieces:
    """Entries of `bits` bits (1, 2, 4): in a run of `stride` bytes, byte l holds the run's entries l + stride * place.

    The lowest place is in the lowest bits.  The bytes begin at byte `first` of the field.
    """
    places = 8 // bits
    pieces = []
    for e in range(entries):
        run, inside = divmod(e, stride * places)
        place, byte = divmod(inside, stride)
        pieces.append(((first + run * stride + byte, place * bits, bits),))
    return Pieces(tuple(pieces), text or f"{places} per byte, {stride} entries apart, the first in the lowest bits")


@functools.lru_cache
def stream(bits: int, entries: int) -> Pieces:
    """Entries of `bits` bits one after another, lowest bits first, across bytes."""
    pieces = []
    for e in range(entries):
        entry, at, left = [], e * bits, bits
        while left:
            width = min(left, 8 - at % 8)
            entry.append((at // 8, at % 8, width))
            at, left = at + width, left - width
        pieces.append(tuple(entry))
    return Pieces(tuple(pieces), f"a stream of {bits}-bit entries, lowest bits first")


def together(*parts: Pieces, text: str = "") -> Pieces:
    """The bytes of all parts in order; entry e has the bits of the first part lowest, then those of the next."""
    joined = tuple(sum(entry, ()) for entry in zip(*(p.pieces for p in parts), strict=True))
    return Pieces(joined, text or "; above them ".join(p.describe() for p in parts))
