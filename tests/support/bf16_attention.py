"""By what attention in bf16 may differ from float64 of its rounded factors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
from attention_cases import Case, inputs, reference, run

from qcompiler.formats import cache_rows

EPSILON = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}
"""The largest relative error of a rounding."""


def may_round(case: Case) -> bool:
    """Units of one or two heads read keys in place, in fp32."""
    return not case.decode or case.heads // case.kv_heads > 2


def bf16(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def rounded(case: Case, arrays: list[np.ndarray]) -> tuple[Case, list[np.ndarray]]:
    """The case as plain float64 tensors of what the kernel multiplies. Codes of rows with one scale are exact."""
    q, k, v = arrays[:3]
    if case.cache is not None:
        k, v = (cache_rows.dequantise(a, d, case.cache) for a, d in ((k, case.dim), (v, case.value_dim)))
    codes = case.cache in ("int8", "fp8")
    k, v = (a.astype(np.float64) if codes else bf16(a) for a in (k, v))
    return replace(case, cache=None), [bf16(q), k, v, *arrays[3:]]


def allowed(case: Case, arrays: list[np.ndarray], want: np.ndarray) -> np.ndarray:
    """A rounding of each weight, as a share of |weight| |value|; the result's own.

    2^-15 is for what is fp32: an exponential (3e-6 of a weight), and scores, whose error of up to 2^-24 for each of 130
    products of numbers below 8 is one of their weight.
    """
    plain, values = rounded(case, arrays)
    size = reference(plain, [*values[:2], np.abs(values[2]), *values[3:]])
    return size * (EPSILON["bf16"] + 2.0**-15) + np.abs(want) * EPSILON[case.dtype] * 2


def check(kernels: Any, case: Case) -> None:
    arrays = inputs(case)
    want = reference(*rounded(case, arrays)) if may_round(case) else reference(case, arrays)
    error = np.abs(run(kernels, case, arrays).astype(np.float64) - want)
    bound = allowed(case, arrays, want) + 1e-6
    assert (error <= bound).all(), (error / bound).max()
    # a rounding is anywhere between nothing and the bound, so its rms is 1 / sqrt(3) of it, and less for a sum of many
    assert np.sqrt(np.mean((error / bound) ** 2)) < 0.58, np.sqrt(np.mean((error / bound) ** 2))
