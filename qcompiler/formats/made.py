"""A matrix whose values are computed a few rows at a time, each time they are read, for encoding matrices that do not
fit into memory.

    matrix = MadeMatrix(rows, cols, lambda first, stop: decode(first, stop) + delta(first, stop))
    fmt.encode_made(matrix)

Encoders read a matrix by flat slices, by rows, or by single elements; only these indices work here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from qcompiler.formats.equation import Float32

PIECE = 1 << 20
"""Elements that are computed at a time: 4 MiB of fp32, at least one row."""


class MadeMatrix:
    """(rows, cols) of fp32, of which one piece is held; `make(first, stop)` returns the rows [first, stop).

    Pieces are cut at the same rows in every pass.  So a computation whose order of sums depends on the rows (a product
    of matrices) gives the same bits each time it is read.
    """

    ndim = 2
    dtype = np.dtype(np.float32)

    def __init__(self, rows: int, cols: int, make: Callable[[int, int], Float32]) -> None:
        self.shape, self.size = (rows, cols), rows * cols
        self._make = make
        self._rows = max(1, PIECE // cols)
        self._held: tuple[int, Float32] | None = None

    @property
    def piece(self) -> int:
        """Elements of a piece."""
        return self._rows * self.shape[1]

    def rows(self, first: int, stop: int) -> Float32:
        """The rows [first, stop); a view of the held piece if they lie in it."""
        stop, parts = min(stop, self.shape[0]), []
        for number in range(first // self._rows, -(-stop // self._rows)):
            begin = number * self._rows
            parts.append(self._piece(number)[max(first - begin, 0) : stop - begin])
        if not parts:
            return np.empty((0, self.shape[1]), np.float32)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _piece(self, number: int) -> Float32:
        if self._held is None or self._held[0] != number:
            first = number * self._rows
            self._held = number, self._make(first, min(first + self._rows, self.shape[0]))
        return self._held[1]

    # --- the interface for encoders ---

    def reshape(self, _minus_one: int) -> _Flat:
        """The elements one after another."""
        return _Flat(self)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            first, stop, _ = index.indices(self.shape[0])
            return self.rows(first, stop)
        row, *rest = index if isinstance(index, tuple) else (index,)
        return self.rows(int(row), int(row) + 1)[(0, *rest)]


class _Flat:
    def __init__(self, matrix: MadeMatrix) -> None:
        self._matrix, self.size = matrix, matrix.size

    def __getitem__(self, index: slice) -> Float32:
        cols = self._matrix.shape[1]
        first, stop, _ = index.indices(self.size)
        begin = first // cols
        found: Float32 = self._matrix.rows(begin, -(-stop // cols)).reshape(-1)[
            first - begin * cols : stop - begin * cols
        ]
        return found
