"""The weight store: every constant of a program by key, as bytes, shared by reference and never inlined in the IR."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
import numpy.typing as npt

from qcompiler.errors import PlanError
from qcompiler.plan.kernel import DType, FormatRef

Bytes = npt.NDArray[np.uint8]

NUMPY_DTYPES: dict[str, np.dtype] = {
    "f64": np.dtype(np.float64), "f32": np.dtype(np.float32), "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16), "i64": np.dtype(np.int64), "i32": np.dtype(np.int32),
    "i16": np.dtype(np.int16), "i8": np.dtype(np.int8), "ui8": np.dtype(np.uint8), "i1": np.dtype(np.bool_),
}  # fmt: skip
DTYPE_NAMES: dict[np.dtype, DType] = {v: k for k, v in NUMPY_DTYPES.items()}  # type: ignore[misc]


@dataclass(frozen=True)
class StoredTensor:
    """One constant: `data` are its bytes in `layout` (read-only); `dtype` is what values are, or decode to.

    `parameters` lists the module paths it came from: several for tied weights, none for constants of the graph.
    """

    key: str
    dtype: DType
    shape: tuple[int, ...]
    data: Bytes = field(repr=False)
    format: FormatRef | None = None
    layout: str = "canonical"
    parameters: tuple[str, ...] = ()

    def array(self) -> npt.NDArray[np.generic]:
        """The values of a plain tensor in its canonical layout; PlanError for a packed one."""
        if self.format is not None or self.layout != "canonical":
            raise PlanError(f"constant '{self.key}' is stored as {self.format or self.layout}, not as plain values")
        return self.data.view(NUMPY_DTYPES[self.dtype]).reshape(self.shape)


class WeightStore:
    """An ordered dictionary of `StoredTensor`s. Adding a key twice is an error; `replace` swaps a layout."""

    def __init__(self) -> None:
        self._tensors: dict[str, StoredTensor] = {}

    def add(self, tensor: StoredTensor) -> None:
        if tensor.key in self._tensors:
            raise PlanError(f"the weight store already holds '{tensor.key}'")
        self._tensors[tensor.key] = tensor

    def add_array(self, key: str, values: npt.NDArray[np.generic], parameters: tuple[str, ...] = ()) -> None:
        """Adds plain values (copied to row-major order only if they are not already)."""
        if values.dtype not in DTYPE_NAMES:
            raise PlanError(f"constant '{key}' has dtype {values.dtype}, which programs cannot store")
        flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        self.add(StoredTensor(key, DTYPE_NAMES[values.dtype], values.shape, flat, parameters=parameters))

    def replace(self, tensor: StoredTensor) -> None:
        if tensor.key not in self._tensors:
            raise PlanError(f"the weight store does not hold '{tensor.key}'")
        self._tensors[tensor.key] = tensor

    def remove(self, key: str) -> None:
        del self._tensors[key]

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
        """A store with the same tensors (bytes shared)."""
        other = WeightStore()
        other._tensors = dict(self._tensors)
        return other
