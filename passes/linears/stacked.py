"""Stacks the rows of several weights, or of several biases, in one stored tensor that names its parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qcompiler import formats
from qcompiler.formats import Format, stacking
from qcompiler.plan.kernel import ITEMSIZE, DType
from qcompiler.plan.plan import WeightPart
from qcompiler.plan.weights import NUMPY_DTYPES, Bytes, NoBytes, StoredTensor


@dataclass(frozen=True)
class Stacked:
    """The canonical bytes of a stack of tensors of one format. Each read computes them."""

    tensors: tuple[StoredTensor, ...]

    @property
    def nbytes(self) -> int:
        first, rows = self.tensors[0], sum(tensor.shape[0] for tensor in self.tensors)
        fmt = format_of(first)
        if fmt is not None:
            return fmt.nbytes(rows, first.shape[1])
        return rows * math.prod(first.shape[1:]) * ITEMSIZE[first.dtype]

    @property
    def valued(self) -> bool:
        return all(tensor.valued for tensor in self.tensors)

    def write(self, out: Bytes) -> None:
        fmt = format_of(self.tensors[0])
        if fmt is not None:
            parts = [(tensor.shape[0], tensor.data) for tensor in self.tensors]
            stacking.stack(fmt, parts, self.tensors[0].shape[1], out)
            return
        begin = 0
        for tensor in self.tensors:
            tensor.write(out[begin : begin + tensor.nbytes])
            begin += tensor.nbytes


def stacked(key: str, tensors: Sequence[StoredTensor]) -> StoredTensor:
    """Stacks tensors in canonical layout. `stacking.obstacle` must be None for them."""
    first = tensors[0]
    shape = (sum(tensor.shape[0] for tensor in tensors), *first.shape[1:])
    source = Stacked(tuple(tensors))
    parts = tuple(WeightPart(tensor.shape[0], tensor.parameters) for tensor in tensors)
    return StoredTensor(
        key, first.dtype, shape, source if source.valued else NoBytes(source.nbytes), first.format, parts=parts
    )


def nothing_to_add(rows: int, dtype: DType) -> StoredTensor:
    """A bias that changes no sum: x + -0.0 equals x to the bit, also if x is 0.0 or -0.0."""
    values = np.full(rows, -0.0, NUMPY_DTYPES[dtype])
    return StoredTensor("-0.0", dtype, (rows,), values.view(np.uint8))


def format_of(tensor: StoredTensor) -> Format | None:
    return None if tensor.format is None else formats.get(tensor.format.name, **tensor.format.params)
