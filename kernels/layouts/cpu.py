"""cpu_p16_v1 and cpu_p16_v2: one row per SIMD lane."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from qcompiler.formats.base import Bytes
from qcompiler.kernels.layouts.base import Items
from qcompiler.kernels.layouts.panels import LANES, WORD, PanelLayout, from_panels, join_bits, split_bits, to_panels
from qcompiler.plan.kernel import DType


class CpuP16V1(PanelLayout):
    """Panels with one row per SIMD lane.

    codes   a plane of b bits: uint32 [panel][ceil(K / (32 / b))][16], bits b * j … b * j + b - 1 of word g are those of
            k = (32 / b) * g + j.  So 4 bits: nibble j of word g is k = 8g + j; 8 bits: byte j is k = 4g + j
            A trellis, in sequences t of the columns 2t, 2t + 1, 2t + 8, 2t + 9 of each 16, the oldest code lowest:
            4 bits: half t % 2 of word 2u + t / 2 holds four codes, of 16 columns u
            2 bits: half t % 2 of word 2u + t / 2 holds eight codes, of 32 columns u
            3 bits: likewise the lowest 16 bits of eight codes in a row; byte t of word u of the plane of 1 bit holds
            the other eight
    values  plain f32, bf16, f16: [panel][K][16]
    """

    name = "cpu_p16_v1"
    WIDTHS: ClassVar[frozenset[int]] = frozenset((1, 2, 4, 8))

    def _values_shape(self, dtype: DType, panels: int, cols: int) -> tuple[int, ...]:
        del dtype
        return (panels, cols, LANES)

    def _codes_shape(self, bits: int, panels: int, cols: int) -> tuple[int, ...]:
        return (panels, -(-cols * bits // 32), LANES)

    def _pack_values(self, values: Items, out: Items) -> None:
        to_panels(values, out)

    def _unpack_values(self, packed: Items, rows: int, cols: int) -> Items:
        del cols
        return from_panels(packed, rows)

    def _pack_codes(self, bits: int, row_bytes: Bytes, out: Items) -> None:
        del bits
        padded = np.zeros((row_bytes.shape[0], 4 * out.shape[1]), np.uint8)
        padded[:, : row_bytes.shape[1]] = row_bytes
        to_panels(padded.view(WORD), out)

    def _unpack_codes(self, bits: int, words: Items, rows: int, nbytes: int) -> Bytes:
        del bits
        by_row: Bytes = from_panels(words, rows).view(np.uint8)[:, :nbytes]
        return by_row

    def _pack_trellis(self, bits: int, codes: Bytes, out: Sequence[Items]) -> None:
        runs = _runs_of_sequences(bits, codes)
        if bits != 3:
            to_panels(join_bits(runs.reshape(len(codes), -1), bits).view(WORD), out[0])
            return
        stream = np.zeros(runs.shape[:-1], WORD)
        for place in range(runs.shape[-1]):
            stream |= runs[..., place].astype(WORD) << np.uint32(3 * place)
        low = np.ascontiguousarray(stream.astype(np.uint16)).view(WORD)
        to_panels(low.reshape(len(codes), -1), out[0])
        to_panels((stream >> np.uint32(16)).astype(np.uint8).reshape(len(codes), -1).view(WORD), out[1])

    def _unpack_trellis(self, bits: int, words: Sequence[Items], rows: int, cols: int) -> Bytes:
        by_row = [from_panels(each, rows) for each in words]
        if bits != 3:
            return _columns_of_runs(bits, split_bits(by_row[0].view(np.uint8), bits, cols))
        stream = by_row[0].view(np.uint16).astype(WORD) | by_row[1].view(np.uint8).astype(WORD) << np.uint32(16)
        runs = stream[..., None] >> np.arange(0, 24, 3, dtype=np.uint32) & np.uint32(7)
        return _columns_of_runs(bits, runs.astype(np.uint8).reshape(rows, cols))


class CpuP16V2(CpuP16V1):
    """cpu_p16_v1, in which small scales and minima share bytes as well, as they do in files (`join_entries`): q4_K has
    4.5 bits per weight instead of 4.625. For formats without such entries the bytes are the same."""

    name = "cpu_p16_v2"
    JOINS: ClassVar[frozenset[int]] = frozenset((4, 6))


def _runs_of_sequences(bits: int, codes: Bytes) -> Bytes:
    """Codes (rows, cols) of a trellis as (rows, units of 16 or 32 columns, 4 sequences, codes in a row)."""
    rows, cols = codes.shape
    pieces = 1 if bits == 4 else 2
    split = codes.reshape(rows, cols // (16 * pieces), pieces, 2, 4, 2).transpose(0, 1, 4, 2, 3, 5)
    return np.ascontiguousarray(split).reshape(rows, -1, 4, 4 * pieces)


def _columns_of_runs(bits: int, runs: Bytes) -> Bytes:
    """The inverse, from (rows, cols) in that order."""
    rows, cols = runs.shape
    pieces = 1 if bits == 4 else 2
    split = runs.reshape(rows, cols // (16 * pieces), 4, pieces, 2, 2).transpose(0, 1, 3, 4, 2, 5)
    return np.ascontiguousarray(split).reshape(rows, cols)
