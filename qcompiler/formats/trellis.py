"""A trellis code: an element's value is a function of its own code and of those before it in its sequence.

    codes   … c[p-3]  c[p-2]  c[p-1]  c[p]        of one sequence, `bits` bits each
    window            c[p-2]  c[p-1]  c[p]        the last `codes` of them, the newest in the highest bits
    value   the sum of the four signed bytes of window * multiplier mod 2^32

So an element costs `bits` bits, and its value is one of 2^(bits * codes) numbers: which of them can follow is what the
code gives up.  The sum of four bytes is close to a Gaussian, and the sequence of neighbouring windows looks random, so
that a path with a small error exists for any sequence of weights; an encoder finds it by Viterbi's algorithm.  The
value is computed, not looked up: a multiplication and a dot product of bytes.

A block of 256 columns has four sequences of 64 elements.  Sequence t visits the columns 16 j + 2 t + {0, 1, 8, 9} for
j = 0 … 15: those that one lane of a warp holds of the operand of an `mma`.  A sequence is a circle: before its first
code stands its last one, so that a block is decoded alone and no bits are spent on a start.

Sources: Tseng et al., "QTIP: Quantization with Trellises and Incoherence Processing", NeurIPS 2024 (arXiv 2406.11235):
the trellis of shifted bits, its computed code "1MAD", and circular sequences ("tail-biting").  The multiplier is not
theirs: without their addition it was searched for the smallest error (docs/decisions/036-trellis.md).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qcompiler.formats.equation import Float32

Codes = npt.NDArray[np.uint8]
Windows = npt.NDArray[np.uint16]

BLOCK = 256
"""Columns of a block, whose sequences are circles."""

SEQUENCES = 4
"""Sequences of a block."""

LENGTH = BLOCK // SEQUENCES
"""Elements of a sequence."""


@dataclass(frozen=True)
class Trellis:
    """Codes of `bits` bits, of which `codes` make a window, and the odd number that a window is multiplied with."""

    bits: int
    codes: int
    multiplier: int

    @property
    def width(self) -> int:
        """Bits of a window."""
        return self.bits * self.codes

    @functools.cached_property
    def values(self) -> Float32:
        """The value of each window: fp32 (2 ** width,), integers between -512 and 508, about 147 in the mean square."""
        products = np.arange(1 << self.width, dtype=np.uint64) * np.uint64(self.multiplier)
        signed = products.astype("<u4").view(np.int8).reshape(-1, 4)
        sums: Float32 = signed.astype(np.float32).sum(axis=1)
        return sums

    def windows(self, codes: Codes) -> Windows:
        """The window of each element, by its column: (rows, columns) of whole blocks, both."""
        ordered = to_sequences(codes).astype(np.uint16)
        found = np.zeros_like(ordered)
        for back in range(self.codes):
            found |= np.roll(ordered, back, axis=-1) << np.uint16(self.bits * (self.codes - 1 - back))
        return from_sequences(found)


def to_sequences(items: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """(rows, columns) of whole blocks in the order of their sequences: (rows, blocks, 4, 64)."""
    rows, cols = items.shape
    split = items.reshape(rows, cols // BLOCK, 16, 2, SEQUENCES, 2)  # piece, half of its columns, sequence, neighbour
    return np.ascontiguousarray(split.transpose(0, 1, 4, 2, 3, 5)).reshape(rows, cols // BLOCK, SEQUENCES, LENGTH)


def from_sequences(items: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The inverse: (rows, columns)."""
    rows, blocks = items.shape[:2]
    split = items.reshape(rows, blocks, SEQUENCES, 16, 2, 2).transpose(0, 1, 3, 4, 2, 5)
    return np.ascontiguousarray(split).reshape(rows, blocks * BLOCK)


__all__ = ["BLOCK", "LENGTH", "SEQUENCES", "Trellis", "from_sequences", "to_sequences"]
