"""Packings: bit for bit what they declare, and bijections."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qcompiler.formats.packing import Packing, Pieces, Trits, planes, stream, together

# The 6-bit scales of a superblock of eight: 12 bytes, scales and minima of the last four in pieces.
SIX_BITS = Pieces(
    tuple(((j, 0, 6),) for j in range(4))
    + tuple(((j + 8, 0, 4), (j, 6, 2)) for j in range(4))
    + tuple(((j + 4, 0, 6),) for j in range(4))
    + tuple(((j + 8, 4, 4), (j + 4, 6, 2)) for j in range(4))
)
PACKINGS: dict[str, Packing] = {
    "planes of 4": planes(4, 16, 32),
    "planes of 2": planes(2, 32, 256),
    "planes of 1": planes(1, 32, 256),
    "stream of 3": stream(3, 32),
    "stream of 5": stream(5, 64),
    "4 and 1": together(planes(4, 16, 32), planes(1, 4, 32, first=16)),
    "4 and 2": together(planes(4, 64, 256), planes(2, 32, 256, first=128)),
    "six bits": SIX_BITS,
}


@pytest.mark.parametrize("packing", PACKINGS.values(), ids=PACKINGS)
def test_every_bit_of_a_block_belongs_to_one_entry(packing: Pieces) -> None:
    bits = [(byte, shift + i) for entry in packing.pieces for byte, shift, width in entry for i in range(width)]
    assert sorted(bits) == [(byte, bit) for byte in range(packing.nbytes) for bit in range(8)]


@pytest.mark.parametrize("packing", PACKINGS.values(), ids=PACKINGS)
def test_packing_is_the_inverse_of_unpacking_for_any_bytes(packing: Pieces) -> None:
    raw = np.random.default_rng(0).integers(0, 256, (50, packing.nbytes), np.uint8)
    entries = packing.unpack(raw)
    assert entries.shape == (50, packing.entries)
    assert entries.max() == (1 << packing.bits) - 1
    np.testing.assert_array_equal(packing.pack(entries), raw)


@pytest.mark.parametrize("packing", PACKINGS.values(), ids=PACKINGS)
def test_unpacking_is_what_the_pieces_say(packing: Pieces) -> None:
    raw = np.random.default_rng(1).integers(0, 256, (3, packing.nbytes), np.uint8)
    for block, entries in zip(raw, packing.unpack(raw), strict=True):
        for value, pieces in zip(entries, packing.pieces, strict=True):
            expected, place = 0, 0
            for byte, shift, width in pieces:
                expected |= (int(block[byte]) >> shift & (1 << width) - 1) << place
                place += width
            assert value == expected


@given(st.lists(st.integers(0, 7), min_size=32, max_size=32))
def test_a_stream_of_three_bits_is_one_number(entries: list[int]) -> None:
    number = sum(entry << 3 * i for i, entry in enumerate(entries))
    packed = stream(3, 32).pack(np.array([entries], np.uint8))
    assert packed.tobytes() == number.to_bytes(12, "little")


def test_planes_stand_where_ggml_puts_them() -> None:
    raw = np.arange(64, dtype=np.uint8)[None]
    entries = planes(2, 32, 256).unpack(raw)[0]
    for e in range(256):
        half, inside = divmod(e, 128)
        assert entries[e] == raw[0, 32 * half + inside % 32] >> 2 * (inside // 32) & 3


TQ1 = Trits(((32, 5), (16, 5), (4, 4)))


def test_trits_round_trip() -> None:
    assert (TQ1.entries, TQ1.nbytes) == (256, 52)
    digits = np.random.default_rng(0).integers(0, 3, (200, 256), np.uint8)
    packed = TQ1.pack(digits)
    np.testing.assert_array_equal(TQ1.unpack(packed), digits)
    first = digits[0, [0, 32, 64, 96, 128]].astype(int)  # the digits of the first byte
    number = int("".join(map(str, first)), 3)
    assert packed[0, 0] == -(-number * 256 // 243)
