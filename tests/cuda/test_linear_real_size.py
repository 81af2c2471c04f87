"""A quantised linear of a real size, every access checked. benchmarks/linear_sim.py says what that takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from qcompiler import formats
from qcompiler.kernels import layouts
from qcompiler.kernels.cuda import linear
from qcompiler.plan.kernel import FormatRef, KernelSpec, Operand
from qcompiler.plan.kinds.linear import LinearKernel

SIZE = 512
DTYPES: dict[str, Any] = {"f32": np.float32, "bf16": ml_dtypes.bfloat16}
BOUNDS = {"f32": 2e-6, "bf16": 3e-3}


def nf4_linear(m_class: Any, dtype: Any) -> KernelSpec:
    x, y = (
        Operand(name=name, dtype=dtype, access=access, shape=("m", SIZE), strides=(SIZE, 1))
        for name, access in (("x", "r"), ("y", "w"))
    )
    nf4 = FormatRef(name="nf4", params={"block": 64})
    w = Operand(name="w", dtype=dtype, access="r", shape=(SIZE, SIZE), format=nf4, layout=linear.LAYOUT)
    body = LinearKernel(m="m", n=SIZE, k=SIZE, m_class=m_class, has_bias=False)
    name = f"nf4_{m_class.replace('-', '_')}_{dtype}"
    return KernelSpec(name=name, symbols=("m",), operands=(x, w, y), body=body)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_512_x_512_nf4_linear_is_right_in_every_row_class(sim_module: Callable[..., Any], dtype: str) -> None:
    rng = np.random.default_rng(0)
    fmt = formats.get("nf4", block=64)
    packed = fmt.encode(rng.standard_normal((SIZE, SIZE)).astype(np.float32))
    data = layouts.get(linear.LAYOUT).pack(fmt, dtype, SIZE, SIZE, packed.data)
    values = fmt.decode(packed).astype(DTYPES[dtype]).astype(np.float64)
    rows = {"1": 1, "2-8": 8, "9-64": 64, "large": 128}
    specs = {m_class: nf4_linear(m_class, dtype) for m_class in rows}
    module = sim_module(list(specs.values()), "sm_80")
    for m_class, m in rows.items():
        x = rng.standard_normal((m, SIZE)).astype(DTYPES[dtype])
        (y,) = module.run(specs[m_class].name, [x, data, np.zeros((m, SIZE), x.dtype)], {"m": m})
        expected = x.astype(np.float64) @ values.T
        assert np.linalg.norm(y.astype(np.float64) - expected) <= BOUNDS[dtype] * np.linalg.norm(expected)
