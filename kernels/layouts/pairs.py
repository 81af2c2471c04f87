"""Layouts of matrices whose two halves of rows are combined row by row: the gate and the up projection of a GLU.

    cpu_p16_pairs_v1    cpu_p16_v1 of the rows in this order; so is cpu_p16_pairs_v2 of cpu_p16_v2
    cuda_t16_pairs_v1   cuda_t16_v1 of the rows in this order

Of a matrix of 2 F rows, panel p holds rows 8 p … 8 p + 7 in its lanes 0 to 7, and rows F + 8 p … F + 8 p + 7 in its
lanes 8 to 15.  So whatever owns a panel (a task on the CPU, a warp's tile on a GPU) has both sums of each pair.  Rows
of the last panel that a half does not have are zero.  Every row must be whole entries and whole bytes of its format.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from qcompiler.errors import LayoutError
from qcompiler.formats import stacking
from qcompiler.formats.base import Format
from qcompiler.kernels.layouts.base import Items
from qcompiler.kernels.layouts.cpu import CpuP16V1, CpuP16V2
from qcompiler.kernels.layouts.cuda import CudaT16V1
from qcompiler.kernels.layouts.panels import LANES, PanelLayout, RowRange
from qcompiler.plan.pairs import HALF, stored_rows


def obstacle(fmt: Format | None, cols: int) -> str | None:
    """Why rows of `cols` elements cannot be put in the order of pairs, or None."""
    return None if fmt is None else stacking.obstacle(fmt, (1, 1), cols)


class _Pairs(PanelLayout):
    """The order of rows. What a panel looks like is the other base's."""

    def stored_rows(self, rows: int) -> int:
        return stored_rows(rows)

    def check_rows(self, fmt: Format | None, rows: int, cols: int) -> None:
        if rows % 2:
            raise LayoutError(f"layout '{self.name}' holds two halves of rows; got {rows} rows")
        why = obstacle(fmt, cols)
        if why is not None:
            raise LayoutError(f"layout '{self.name}' cannot hold {fmt}: {why}")

    def _ranges(self, rows: int, first: int, last: int, *, by_rows: bool) -> tuple[RowRange, ...]:
        if not by_rows:
            return ((0, rows),)
        half = rows // 2
        begin, end = first // 2, min(last // 2, half)
        return (begin, end), (half + begin, half + end)

    def _join(self, parts: Sequence[Items], count: int) -> Items:
        halves = np.split(parts[0], 2) if len(parts) == 1 else parts
        joined = np.zeros((count // LANES, 2, HALF, halves[0].shape[1]), halves[0].dtype)
        for number, items in enumerate(halves):
            full, rest = divmod(len(items), HALF)
            joined[:full, number] = items[: full * HALF].reshape(full, HALF, items.shape[1])
            if rest:
                joined[full, number, :rest] = items[full * HALF :]
        return joined.reshape(count, joined.shape[-1])

    def _split(self, items: Items, ranges: Sequence[RowRange]) -> list[Items]:
        count = sum(end - begin for begin, end in ranges) // 2
        by_half = items.reshape(-1, 2, HALF, items.shape[1])
        halves = [by_half[:, number].reshape(-1, items.shape[1])[:count] for number in (0, 1)]
        return [np.concatenate(halves)] if len(ranges) == 1 else halves


class CpuP16PairsV1(_Pairs, CpuP16V1):
    """cpu_p16_v1 of paired rows."""

    name: ClassVar[str] = "cpu_p16_pairs_v1"


class CpuP16PairsV2(_Pairs, CpuP16V2):
    """cpu_p16_v2 of paired rows."""

    name: ClassVar[str] = "cpu_p16_pairs_v2"


class CudaT16PairsV1(_Pairs, CudaT16V1):
    """cuda_t16_v1 of paired rows."""

    name: ClassVar[str] = "cuda_t16_pairs_v1"
