"""torch: linears in fp32 and bf16, and `_int_mm`, the product of int8 matrices alone (rows of int8 are made before)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from shared import Array, Case, Engine, Made, UnableError, rows_of_8_bits

VERSION = torch.__version__


def use_threads(threads: int) -> None:
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)


def read(result: Any) -> Array:
    return np.asarray(result.float())


def linears(case: Case, dtype: torch.dtype) -> Made:
    x = torch.from_numpy(case.x).to(dtype)
    weights = [torch.from_numpy(w).to(dtype) for w in case.weights()]
    return lambda: [torch.nn.functional.linear(x, w) for w in weights], read


def int_mm(case: Case) -> Made:
    if case.m <= 16:
        raise UnableError("torch._int_mm takes more than 16 rows")
    codes, scales = rows_of_8_bits(case.first)
    rows, factors = rows_of_8_bits(case.x)
    x = torch.from_numpy(rows)
    weights = [torch.from_numpy(w).t() for w in case.turned(codes)]
    # Weights differ in the order of their rows, so scales are those of the copy; the order is found in the result.
    turned = case.turned(scales)

    def run() -> list[Any]:
        return list(zip((torch._int_mm(x, w) for w in weights), turned, strict=True))

    return run, lambda found: read(found[0]) * factors[:, None] * found[1]


ENGINES = {
    "torch fp32": Engine("fp32", 32, lambda case: linears(case, torch.float32)),
    "torch bf16": Engine("bf16", 16, lambda case: linears(case, torch.bfloat16)),
    "torch _int_mm": Engine("int8", 8, int_mm),
}
