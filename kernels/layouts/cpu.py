"""cpu_p16_v1 and cpu_p16_v2: one row per SIMD lane."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from qcompiler.formats.base import Bytes
from qcompiler.kernels.layouts.base import Items
from qcompiler.kernels.layouts.panels import LANES, WORD, PanelLayout, from_panels, to_panels
from qcompiler.plan.kernel import DType


class CpuP16V1(PanelLayout):
    """Panels with one row per SIMD lane.

    codes   a plane of b bits: uint32 [panel][ceil(K / (32 / b))][16], bits b * j … b * j + b - 1 of word g are those of
            k = (32 / b) * g + j.  So 4 bits: nibble j of word g is k = 8g + j; 8 bits: byte j is k = 4g + j
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


class CpuP16V2(CpuP16V1):
    """cpu_p16_v1, in which small scales and minima share bytes as well, as they do in files (`join_entries`): q4_K has
    4.5 bits per weight instead of 4.625. For formats without such entries the bytes are the same."""

    name = "cpu_p16_v2"
    JOINS: ClassVar[frozenset[int]] = frozenset((4, 6))
