"""cuda_t16_v1: tiles in which the share of a warp lane is one 16-byte load and one fragment of `mma`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from qcompiler.formats.base import Bytes
from qcompiler.kernels.layouts.base import Items
from qcompiler.kernels.layouts.panels import LANES, PanelLayout, join_bits, split_bits
from qcompiler.plan.kernel import ITEMSIZE, DType

TILE_BYTES = 512
"""Bytes of a tile: 32 warp lanes, 16 bytes each."""

_Grid = npt.NDArray[Any]


PIECES = 4
"""Pieces (16 x 16) in a tile of codes with fewer than 8 bits."""


def tile_columns(bits: int) -> int:
    """Columns of a tile (16 rows): 64 for codes of fewer than 8 bits, 32 for bytes, 16 and 8 for plain values."""
    return 16 * PIECES if bits < 8 else 8 * TILE_BYTES // (LANES * bits)


class CudaT16V1(PanelLayout):
    """Panels cut along K into tiles of 512 bytes; lane l owns bytes 16 l … 16 l + 15 of a tile, words j = 0 … 3.

    With g = l / 4 and t = l % 4, the elements of a 16 x 16 piece that a lane owns are those of the `mma` operand A:
    pair p = 0 … 3 holds row g + 8 (p % 2), columns 2t + 8 (p / 2) + h for h = 0, 1.

    codes   4 bits, tile 16 x 64: word j holds the piece at column 16 j, pair p in nibbles p (h = 0) and p + 4 (h = 1)
            2 bits, tile 16 x 64, 8 bytes per lane: word i holds the pieces j = 2i, 2i + 1, pair p in the two bits from
            8 (j % 2) + 2p (h = 0) and 16 above (h = 1)
            1 bit, tile 16 x 64, 4 bytes per lane: pair p of piece j in bits 4j + p (h = 0) and 16 above (h = 1)
            8 bits, tile 16 x 32: words 2j, 2j + 1 hold the piece at column 16 j, pair p in bytes 2 (p % 2) + h of
            word 2j + p / 2
            Codes of 3, 5, 6 and 7 bits are planes of these widths: for every width w, a shift by w (4j + p), counted
            in words of 32 / w codes, and one mask leave both codes of a pair in the halves of a word.
            A trellis: the 16 codes of a row that a lane owns are a stream, the oldest lowest. 4 bits: word j holds its
            bits 16 j … 16 j + 15, of row g in the low half, of row g + 8 in the high one. 2 bits: word 0 is row g's,
            word 1 row g + 8's. 3 bits: likewise the lowest 32 bits; the word of the plane of 1 bit has the other 16
            bits of row g in its low half, of row g + 8 in its high one
    values  bf16, f16, tile 16 x 16: word p is pair p, h = 0 in its low half
            f32, tile 16 x 8: word p is row g + 8 (p % 2), column t + 4 (p / 2)
    """

    name = "cuda_t16_v1"
    WIDTHS: ClassVar[frozenset[int]] = frozenset((1, 2, 4, 8))

    def _values_shape(self, dtype: DType, panels: int, cols: int) -> tuple[int, ...]:
        bits = 8 * ITEMSIZE[dtype]
        return (panels, -(-cols // tile_columns(bits)), 32, 128 // bits)

    def _codes_shape(self, bits: int, panels: int, cols: int) -> tuple[int, ...]:
        return (panels, -(-cols // tile_columns(bits)), 32, min(bits, 4))

    def _pack_values(self, values: Items, out: Items) -> None:
        panels, tiles = out.shape[:2]
        grid = _padded(values, panels, tiles * tile_columns(8 * values.dtype.itemsize))
        if values.dtype.itemsize == 4:  # panel, row half, g, tile, column half, t
            split = grid.reshape(panels, 2, 8, tiles, 2, 4)
            out.reshape(panels, tiles, 8, 4, 2, 2)[...] = split.transpose(0, 3, 2, 5, 4, 1)
        else:
            pairs = _as(grid, np.uint32).reshape(panels, 2, 8, tiles, 2, 4)
            _as(out, np.uint32).reshape(panels, tiles, 8, 4, 2, 2)[...] = pairs.transpose(0, 3, 2, 5, 4, 1)

    def _unpack_values(self, packed: Items, rows: int, cols: int) -> Items:
        panels, tiles = packed.shape[:2]
        words = _as(packed, np.uint32).reshape(panels, tiles, 8, 4, 2, 2)
        grid = np.ascontiguousarray(words.transpose(0, 5, 2, 1, 4, 3)).view(packed.dtype)
        return grid.reshape(panels * LANES, tiles * tile_columns(8 * packed.dtype.itemsize))[:rows, :cols]

    def _pack_codes(self, bits: int, row_bytes: Bytes, out: Items) -> None:
        panels, tiles = out.shape[:2]
        if bits < 4:
            _pack_narrow(bits, _padded(row_bytes, panels, tiles * 8 * bits), out)
        elif bits == 4:
            # Rows g and g + 8 share bytes: (k even, k odd) of each become (row g, row g + 8) at k even and at k odd.
            grid = _padded(row_bytes, panels, tiles * 32).reshape(panels, 2, 256 * tiles)
            upper, lower = grid[:, 0], grid[:, 1]
            columns = np.empty((*upper.shape, 2), np.uint8)
            columns[..., 0] = upper & 15 | lower << 4
            columns[..., 1] = upper >> 4 | lower & 240
            # panel, g, tile, piece, column half q, t, h -> panel, tile, g, t, piece, h, q
            split = columns.reshape(panels, 8, tiles, 4, 2, 4, 2)
            out.view(np.uint8).reshape(panels, tiles, 8, 4, 4, 2, 2)[...] = split.transpose(0, 2, 1, 5, 3, 6, 4)
        else:
            grid = _padded(row_bytes, panels, tiles * 32)
            # panel, row half, g, tile, piece, column half, t (of byte pairs h)
            pairs = grid.view(np.uint16).reshape(panels, 2, 8, tiles, 2, 2, 4)
            out.view(np.uint16).reshape(panels, tiles, 8, 4, 2, 2, 2)[...] = pairs.transpose(0, 3, 2, 6, 4, 5, 1)

    def _unpack_codes(self, bits: int, words: Items, rows: int, nbytes: int) -> Bytes:
        panels, tiles = words.shape[:2]
        if bits < 4:
            return _unpack_narrow(bits, words)[:rows, :nbytes]
        if bits == 4:
            lanes = words.view(np.uint8).reshape(panels, tiles, 8, 4, 4, 2, 2)
            columns = np.ascontiguousarray(lanes.transpose(0, 2, 1, 4, 6, 3, 5)).reshape(panels, 256 * tiles, 2)
            even, odd = columns[..., 0], columns[..., 1]
            grid = np.empty((panels, 2, 256 * tiles), np.uint8)
            grid[:, 0] = even & 15 | odd << 4
            grid[:, 1] = even >> 4 | odd & 240
        else:
            pairs = words.view(np.uint16).reshape(panels, tiles, 8, 4, 2, 2, 2)
            grid = np.ascontiguousarray(pairs.transpose(0, 6, 2, 1, 4, 5, 3)).view(np.uint8)
        return grid.reshape(panels * LANES, tiles * 32)[:rows, :nbytes]

    def _pack_trellis(self, bits: int, codes: Bytes, out: Sequence[Items]) -> None:
        panels, tiles = out[0].shape[:2]
        # panel, row half, g, tile, piece, column half, t, h -> panel, tile, lane (g, t), row half, the stream's codes
        split = _padded(codes, panels, 64 * tiles).reshape(panels, 2, 8, tiles, 4, 2, 4, 2)
        runs = np.ascontiguousarray(split.transpose(0, 3, 2, 6, 1, 4, 5, 7)).reshape(panels, tiles, 32, 2, 16)
        stream = np.zeros(runs.shape[:-1], np.uint64)
        for place in range(16):
            stream |= runs[..., place].astype(np.uint64) << np.uint64(bits * place)
        if bits == 4:
            quarters = stream.view(np.uint16).reshape(panels, tiles, 32, 2, 4)
            out[0].view(np.uint16).reshape(panels, tiles, 32, 4, 2)[...] = quarters.transpose(0, 1, 2, 4, 3)
            return
        out[0][...] = stream.astype(np.uint32)
        if bits == 3:
            out[1].view(np.uint16).reshape(panels, tiles, 32, 2)[...] = (stream >> np.uint64(32)).astype(np.uint16)

    def _unpack_trellis(self, bits: int, words: Sequence[Items], rows: int, cols: int) -> Bytes:
        panels, tiles = words[0].shape[:2]
        first = np.ascontiguousarray(words[0])
        if bits == 4:
            halves = first.view(np.uint16).reshape(panels, tiles, 32, 4, 2).transpose(0, 1, 2, 4, 3)
            stream = np.ascontiguousarray(halves).view(np.uint64)[..., 0]
        else:
            stream = first.astype(np.uint64)
        if bits == 3:
            high = np.ascontiguousarray(words[1]).view(np.uint16).reshape(panels, tiles, 32, 2)
            stream |= high.astype(np.uint64) << np.uint64(32)
        places = np.arange(0, 16 * bits, bits, dtype=np.uint64)
        runs = (stream[..., None] >> places & np.uint64((1 << bits) - 1)).astype(np.uint8)
        split = runs.reshape(panels, tiles, 8, 4, 2, 4, 2, 2).transpose(0, 4, 2, 1, 5, 6, 3, 7)
        return np.ascontiguousarray(split).reshape(panels * LANES, 64 * tiles)[:rows, :cols]


def _pack_narrow(bits: int, grid: Bytes, out: Items) -> None:
    """Packs codes of 1 or 2 bits: bytes of whole tiles (16 * panels, 8 * bits * tiles) to the lanes' words."""
    panels, tiles = out.shape[:2]
    together = PIECES // bits  # pieces per word
    codes = split_bits(grid, bits, tiles * 16 * PIECES)
    # panel, row half, g, tile, word, piece in it, column half q, t, h -> the slots of each half of a word
    split = codes.reshape(panels, 2, 8, tiles, bits, together, 2, 4, 2).transpose(5, 6, 1, 0, 3, 2, 7, 4, 8)
    halves = out.view(np.uint16).reshape(panels, tiles, 8, 4, bits, 2)
    for slot, (piece, q, half) in enumerate(np.ndindex(together, 2, 2)):
        halves |= split[piece, q, half].astype(np.uint16) << np.uint16(bits * slot)


def _unpack_narrow(bits: int, words: Items) -> Bytes:
    """The inverse: returns bytes of whole tiles."""
    panels, tiles = words.shape[:2]
    together = PIECES // bits
    halves = np.ascontiguousarray(words).view(np.uint16).reshape(panels, tiles, 8, 4, bits, 2)
    codes = np.empty((panels, 2, 8, tiles, bits, together, 2, 4, 2), np.uint8)
    split = codes.transpose(5, 6, 1, 0, 3, 2, 7, 4, 8)
    for slot, (piece, q, half) in enumerate(np.ndindex(together, 2, 2)):
        split[piece, q, half] = halves >> np.uint16(bits * slot) & np.uint16((1 << bits) - 1)
    return join_bits(codes.reshape(panels * LANES, tiles * 16 * PIECES), bits)


def _padded(items: Items, panels: int, columns: int) -> _Grid:
    """(rows, n) items as a contiguous (16 * panels, columns) array, padded with zeros."""
    rows, n = items.shape
    if (rows, n) == (LANES * panels, columns):
        return np.ascontiguousarray(items)
    grid = np.zeros((LANES * panels, columns), items.dtype)
    grid[:rows, :n] = items
    return grid


def _as(items: Items, dtype: type[np.uint32]) -> _Grid:
    """The bytes of a contiguous array as another type."""
    return items.reshape(-1).view(dtype)
