"""Where a program stores the weights of its model, and reading and writing one of them in canonical bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qcompiler import formats
from qcompiler.formats import Format, PackedTensor, stacking
from qcompiler.kernels import layouts
from qcompiler.kernels.layouts.base import CANONICAL
from qcompiler.plan.plan import Plan, WeightEntry
from qcompiler.plan.weights import NUMPY_DTYPES
from qcompiler.runtime.memory import Bytes

Matrix = PackedTensor | npt.NDArray[Any]
"""A weight: quantised, or plain (rows, cols) in floating point."""


def places_of(plan: Plan) -> dict[str, StoredPlace]:
    """The place of each parameter; tied parameters have one place."""
    return {
        parameter: StoredPlace(entry, number)
        for entry in plan.weights
        for number, part in enumerate(entry.named)
        for parameter in part.parameters
    }


@dataclass(frozen=True)
class StoredPlace:
    """Where a program stores a weight: part `number` of an entry of its directory."""

    entry: WeightEntry
    number: int

    @property
    def format(self) -> Format | None:
        stored = self.entry.format
        return None if stored is None else formats.get(stored.name, **stored.params)

    @property
    def rows(self) -> list[int]:
        """Of all parts of the entry."""
        return [part.rows for part in self.entry.named]

    def read(self, weights: Bytes) -> Matrix:
        """The weight in canonical bytes; a plain vector as one column."""
        canonical, cols, fmt = self._whole(weights), self._shape[1], self.format
        if fmt is None:
            array: npt.NDArray[Any] = canonical.view(NUMPY_DTYPES[self.entry.dtype]).reshape(-1, cols)
            return array[self._range]
        if self.entry.parts:
            canonical = stacking.take(fmt, self.rows, cols, self.number, canonical)
        return PackedTensor(fmt, self.rows[self.number], cols, canonical)

    def read_plain(self, weights: Bytes) -> npt.NDArray[Any] | None:
        """A weight in floating point, of any rank; None for one of rank 3 or more that a layout has rearranged."""
        assert self.format is None
        if len(self.entry.shape) < 3:
            array = self.read(weights)
            assert isinstance(array, np.ndarray)
            return array
        if self.entry.layout != CANONICAL.name or self.entry.parts:
            return None
        stored = weights[self.entry.offset : self.entry.offset + self.entry.nbytes]
        return stored.view(NUMPY_DTYPES[self.entry.dtype]).reshape(self.entry.shape)

    def write(self, matrix: Matrix, weights: Bytes) -> None:
        """Puts the weight where it is stored; other parts of the entry keep their values."""
        rows, cols = self.entry.shape
        data = matrix.data if isinstance(matrix, PackedTensor) else matrix.reshape(-1).view(np.uint8)
        if self.entry.parts:
            part, data = data, np.array(self._whole(weights))
            if self.format is not None:
                stacking.put(self.format, self.rows, cols, self.number, part, data)
            else:
                data.reshape(rows, -1)[self._range] = part.reshape(self.rows[self.number], -1)
        packed = layouts.get(self.entry.layout).pack(self.format, self.entry.dtype, rows, cols, data)
        weights[self.entry.offset : self.entry.offset + self.entry.nbytes] = packed

    @property
    def _shape(self) -> tuple[int, int]:
        rows, cols = (*self.entry.shape, 1)[:2]
        return rows, cols

    @property
    def _range(self) -> slice:
        first = sum(self.rows[: self.number])
        return slice(first, first + self.rows[self.number])

    def _whole(self, weights: Bytes) -> Bytes:
        """The entry in canonical bytes."""
        rows, cols = self._shape
        stored = weights[self.entry.offset : self.entry.offset + self.entry.nbytes]
        return layouts.get(self.entry.layout).unpack(self.format, self.entry.dtype, rows, cols, stored)


__all__ = ["Matrix", "StoredPlace", "places_of"]
