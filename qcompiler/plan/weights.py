"""The weight store: the bytes of every constant of a program, by key. The IR refers to constants by key only.

The bytes are an array, often of a mapped file, or `Lazy`: computed at each read, or of known number only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

from qcompiler.errors import PlanError, WeightsError
from qcompiler.plan.kernel import DType, FormatRef
from qcompiler.plan.moved import Moved
from qcompiler.plan.plan import WeightPart

Bytes = npt.NDArray[np.uint8]

NUMPY_DTYPES: dict[str, np.dtype] = {
    "f64": np.dtype(np.float64), "f32": np.dtype(np.float32), "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16), "i64": np.dtype(np.int64), "i32": np.dtype(np.int32),
    "i16": np.dtype(np.int16), "i8": np.dtype(np.int8), "ui8": np.dtype(np.uint8), "i1": np.dtype(np.bool_),
}  # fmt: skip
DTYPE_NAMES: dict[np.dtype, DType] = {v: k for k, v in NUMPY_DTYPES.items()}  # type: ignore[misc]


class Lazy(Protocol):
    """Bytes that are not kept in memory. Each read computes all `nbytes` of them."""

    @property
    def nbytes(self) -> int: ...

    @property
    def valued(self) -> bool:
        """Whether `write` has values to give."""

    def write(self, out: Bytes) -> None:
        """Puts the bytes into `out`, which is zeroed and has their number."""


@dataclass(frozen=True)
class NoBytes:
    """The size of a weight without values (`weights="none"`)."""

    nbytes: int
    valued: bool = field(default=False, init=False)

    def write(self, out: Bytes) -> None:
        raise WeightsError(NO_VALUES)


@dataclass(frozen=True)
class Transposed:
    """The bytes of the transpose of a plain matrix."""

    tensor: StoredTensor

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    @property
    def valued(self) -> bool:
        return self.tensor.valued

    def write(self, out: Bytes) -> None:
        values = self.tensor.array()
        out.view(values.dtype).reshape(values.T.shape)[...] = values.T


NO_VALUES = (
    'the program was compiled with weights="none": it has a plan and sizes, but no values to run with or to save. '
    "Compile it with weights=<folder of safetensors>, or from a model that holds its values"
)


@dataclass(frozen=True)
class StoredTensor:
    """One constant. `data` are its bytes in `layout` (read-only). `dtype` is the type of its values, or of its decoded
    values.

    `parameters` lists its module paths, several for tied weights. It is empty for a constant of the graph, and for a
    tensor that combines several weights, which are its `parts`.
    """

    key: str
    dtype: DType
    shape: tuple[int, ...]
    source: Bytes | Lazy = field(repr=False)
    format: FormatRef | None = None
    layout: str = "canonical"
    parameters: tuple[str, ...] = ()
    parts: tuple[WeightPart, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        """All module paths of the tensor and of its parts."""
        return (*self.parameters, *(path for part in self.parts for path in part.parameters))

    @property
    def data(self) -> Bytes:
        """The bytes. WeightsError if the program was compiled without values."""
        if isinstance(self.source, np.ndarray):
            return self.source
        made = np.zeros(self.nbytes, np.uint8)
        self.source.write(made)
        return made

    def write(self, out: Bytes) -> None:
        """Puts the bytes into `out`, which is zeroed and has their number."""
        if isinstance(self.source, np.ndarray):
            out[...] = self.source
        else:
            self.source.write(out)

    @property
    def nbytes(self) -> int:
        return int(self.source.nbytes)

    @property
    def valued(self) -> bool:
        """False if only the size is known."""
        return isinstance(self.source, np.ndarray) or self.source.valued

    def array(self) -> npt.NDArray[np.generic]:
        """The values of a plain tensor in its canonical layout; PlanError for a packed one."""
        if self.format is not None or self.layout != "canonical":
            raise PlanError(f"constant '{self.key}' is stored as {self.format or self.layout}, not as plain values")
        return self.data.view(NUMPY_DTYPES[self.dtype]).reshape(self.shape)


class WeightStore:
    """An ordered dictionary of `StoredTensor`s. Adding a key twice is an error; `replace` changes a layout.

    `moved` has what moved each parameter whose values are not the model's; None if that is not known.
    """

    def __init__(self, moved: Moved | None = None) -> None:
        self._tensors: dict[str, StoredTensor] = {}
        self.moved = moved

    def add(self, tensor: StoredTensor) -> None:
        if tensor.key in self._tensors:
            raise PlanError(f"the weight store already holds '{tensor.key}'")
        self._tensors[tensor.key] = tensor

    def add_array(self, key: str, values: npt.NDArray[np.generic], parameters: tuple[str, ...] = ()) -> None:
        """Adds plain values. They are copied only if they are not in row-major order."""
        if values.dtype not in DTYPE_NAMES:
            raise PlanError(f"constant '{key}' has dtype {values.dtype}, which programs cannot store")
        flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        self.add(StoredTensor(key, DTYPE_NAMES[values.dtype], values.shape, flat, parameters=parameters))

    @property
    def valued(self) -> bool:
        """Whether every tensor has its bytes."""
        return all(tensor.valued for tensor in self)

    def replace(self, tensor: StoredTensor) -> None:
        if tensor.key not in self._tensors:
            raise PlanError(f"the weight store does not hold '{tensor.key}'")
        self._tensors[tensor.key] = tensor

    def remove(self, key: str) -> None:
        del self._tensors[key]

    def merge(self, keys: Sequence[str], tensor: StoredTensor) -> None:
        """Replaces all tensors in `keys` by `tensor`, at the position of the first of them."""
        kept: dict[str, StoredTensor] = {}
        for key, each in self._tensors.items():
            if key == keys[0]:
                kept[tensor.key] = tensor
            elif key not in keys:
                kept[key] = each
        if len(kept) != len(self._tensors) - len(keys) + 1:
            raise PlanError(f"the weight store does not hold all of {', '.join(keys)}, or holds '{tensor.key}' already")
        self._tensors = kept

    def __getitem__(self, key: str) -> StoredTensor:
        if key not in self._tensors:
            raise PlanError(f"the weight store does not hold '{key}'")
        return self._tensors[key]

    def __contains__(self, key: object) -> bool:
        return key in self._tensors

    def __iter__(self) -> Iterator[StoredTensor]:
        return iter(self._tensors.values())

    def __len__(self) -> int:
        return len(self._tensors)

    def copy(self) -> WeightStore:
        """A store with the same tensors. The bytes are shared."""
        other = WeightStore(self.moved)
        other._tensors = dict(self._tensors)
        return other


FILE_ALIGNMENT = 256
"""The alignment, in bytes, of weights in a file: what CUDA's allocators guarantee."""


def file_offsets(tensors: Iterable[StoredTensor], used: Collection[str]) -> dict[str, int]:
    """The offsets in the weight file of the tensors whose keys are `used`. The file has them in the store's order."""
    offsets: dict[str, int] = {}
    end = 0
    for tensor in tensors:
        if tensor.key in used:
            offsets[tensor.key] = end = -(-end // FILE_ALIGNMENT) * FILE_ALIGNMENT
            end += max(tensor.nbytes, 1)  # an offset identifies a weight, so an empty one needs its own
    return offsets
