"""Few rows of x on tensor cores by integers that are scaled when a group is added up, against float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kernel_cases import stored_weight

from qcompiler.kernels.cuda import linear
from qcompiler.kernels.cuda.emit import emit_kernel
from qcompiler.kernels.cuda.weights import weight_of
from qcompiler.plan.kernel import FormatRef, KernelSpec, Operand
from qcompiler.plan.kinds.linear import LinearKernel
from qcompiler.plan.weights import NUMPY_DTYPES

FORMATS: dict[str, tuple[FormatRef, int]] = {  # and columns: some end inside a tile, some inside a ring of tiles
    "int4_128": (FormatRef("int4", {"group": 128}), 384), "int4_32": (FormatRef("int4", {"group": 32}), 96),
    "int4_zeros": (FormatRef("int4", {"group": 64, "symmetric": False}), 320), "q4_K": (FormatRef("q4_K", {}), 512),
    "q4_0": (FormatRef("q4_0", {}), 160), "q5_1": (FormatRef("q5_1", {}), 224), "q6_K": (FormatRef("q6_K", {}), 256),
    "q2_K": (FormatRef("q2_K", {}), 256), "int3": (FormatRef("int3", {"group": 128}), 256),
}  # fmt: skip
ADDS = ("q4_K", "q5_1", "q2_K")
SHORT = ("int4_128", "q4_K")
ROUNDED = {"bf16": 2.0**-9, "f16": 2.0**-12}
"""Half a unit in the last place of a result, relative: nothing else is rounded to the type."""


@pytest.mark.parametrize(
    ("kind", "dtype", "rows"),
    [
        pytest.param(kind, dtype, m, marks=[] if kind in SHORT and (dtype, m) == ("bf16", 1) else pytest.mark.slow)
        for kind in FORMATS
        for dtype in ("bf16", "f16")
        for m in (1, 5, 8)
        if (kind, dtype) != ("int4_zeros", "bf16")  # zero points of 8 bits, which bf16 does not hold beside 128
    ],
)
def test_sums_of_integers_are_scaled(sim_module: Callable[..., Any], kind: str, dtype: Any, rows: int) -> None:
    how, cols = FORMATS[kind]
    rng = np.random.default_rng(cols)
    w = rng.standard_normal((37, cols)).astype(np.float32) / np.float32(math.sqrt(cols))
    operand, data, _ = stored_weight(w, how, dtype, linear.LAYOUT)
    exact = stored_weight(w, how, "f32", linear.LAYOUT)[2].astype(np.float64)
    x = rng.standard_normal((rows, cols)).astype(NUMPY_DTYPES[dtype])
    operands = (
        Operand(name="x", dtype=dtype, access="r", shape=(rows, cols), strides=(cols, 1)),
        operand,
        Operand(name="out", dtype="f32", access="w", shape=(rows, 37), strides=(37, 1)),
    )
    body = LinearKernel(m=rows, n=37, k=cols, m_class="1" if rows == 1 else "2-8", has_bias=False)
    spec = KernelSpec(name=f"late_{kind}_{dtype}_{rows}", symbols=(), operands=operands, body=body)
    assert weight_of("w", operand).late == ("adds" if kind in ADDS else "scales")
    assert "true, true>" in emit_kernel(spec, "sm_80").text, "its template argument"
    (out,) = sim_module([spec], "sm_80").run(spec.name, [x, data, np.zeros((rows, 37), np.float32)])[-1:]
    wanted, sizes = x.astype(np.float64) @ exact.T, np.abs(x.astype(np.float64)) @ np.abs(exact).T
    # fp32 sums of exact products; with an offset, of two sums that are each up to sixteen times as large
    assert (np.abs(out - wanted) <= sizes * (cols + 2) * 2.0**-23 * (16 if kind in ADDS else 1)).all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int4_128", "int4_32", "q4_K"])
def test_what_is_no_number_stays_in_its_row_of_x(sim_module: Callable[..., Any], kind: str) -> None:
    """An infinite x has the sign of the weight, or is no number where the weight is zero or an offset is added."""
    how, cols = FORMATS[kind]
    rng = np.random.default_rng(1)
    w = rng.standard_normal((16, cols)).astype(np.float32)
    operand, data, _ = stored_weight(w, how, "bf16", linear.LAYOUT)
    exact = stored_weight(w, how, "f32", linear.LAYOUT)[2]
    operands = (
        Operand(name="x", dtype="bf16", access="r", shape=(5, cols), strides=(cols, 1)),
        operand,
        Operand(name="out", dtype="f32", access="w", shape=(5, 16), strides=(16, 1)),
    )
    spec = KernelSpec(
        name=f"late_alone_{kind}", symbols=(), operands=operands,
        body=LinearKernel(m=5, n=16, k=cols, m_class="2-8", has_bias=False),
    )  # fmt: skip
    module = sim_module([spec], "sm_80")
    x = rng.standard_normal((5, cols)).astype(NUMPY_DTYPES["bf16"])
    clean, out = (module.run(spec.name, [given, data, np.zeros((5, 16), np.float32)])[-1] for given in (x, _spoiled(x)))
    assert out[[0, 2, 4]].tobytes() == clean[[0, 2, 4]].tobytes()
    assert np.isnan(out[1]).all()
    sign = -np.sign(exact[:, -1])
    wanted = np.full(16, np.nan) if kind in ADDS else np.where(sign == 0, np.nan, sign * np.inf)
    assert np.array_equal(out[3], wanted.astype(np.float32), equal_nan=True)


def _spoiled(x: Any) -> Any:
    """With no number in row 1, and minus infinity in the last column of row 3."""
    spoiled = x.copy()
    spoiled[1, 0], spoiled[3, -1] = np.nan, -np.inf
    return spoiled
