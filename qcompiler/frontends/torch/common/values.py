"""Values of torch tensors as NumPy arrays, bf16 included, and names of dtypes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch

from qcompiler.errors import FrontendError
from qcompiler.plan.kernel import DType
from qcompiler.runtime.memory import Block

DTYPES: dict[torch.dtype, DType] = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "ui8",
    torch.bool: "i1",
}  # fmt: skip


def dtype_name(dtype: torch.dtype) -> DType:
    """The plan's name; FrontendError for a dtype that programs cannot hold."""
    if dtype not in DTYPES:
        way = '. Between operators that torch runs (fallback="torch") complex values are allowed' * dtype.is_complex
        raise FrontendError(f"tensors of {dtype} are not supported; there are: {', '.join(map(str, DTYPES))}{way}")
    return DTYPES[dtype]


def to_numpy(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The values on the CPU in row-major order, without a copy if the memory allows; bf16 as ml_dtypes."""
    dtype_name(tensor.dtype)
    if tensor.is_meta or isinstance(tensor, torch._subclasses.FakeTensor):
        raise FrontendError("a parameter is a meta or fake tensor, which has no values to compile")
    value = tensor.detach().cpu().contiguous()
    if value.dtype == torch.bfloat16:
        return value.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    array: npt.NDArray[Any] = value.numpy()
    return np.ascontiguousarray(array).reshape(tensor.shape)


def row_major(values: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The values row-major in `dtype`: the same tensor, or a copy in pages of its own.

    These pages return to the system with the copy.  The allocator's pages would not: the next small block would split
    the free space of a large one, the next large one would not fit there, and a model's weights would accumulate.
    """
    dtype = dtype if dtype is not None else values.dtype
    if values.is_contiguous() and values.dtype == dtype:
        return values
    made = torch.from_numpy(Block(values.numel() * dtype.itemsize).bytes).view(dtype).reshape(values.shape)
    return made.copy_(values)
