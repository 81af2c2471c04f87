"""Products of codes and rows of int8 on the device, to the bit what formats/integer_product.py says; both engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from by_path import load

from qcompiler.errors import KernelSelectionError
from qcompiler.formats import int8_rows
from qcompiler.kernels import layouts
from qcompiler.kernels.cuda.emit import emit_kernel
from qcompiler.kernels.cuda.signature import ARCHS
from qcompiler.kernels.cuda.weights import LAYOUT
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.quantize_rows import QuantizeRowsKernel

cases = load("tests/kernels/test_linear_int8.py")
CLASSES = {"2-8": (1, 2, 7, 8, 33), "large": (1, 33, 65), "9-64": (33,)}
ENGINES = {"sm_70": "dp4a", "sm_75": "mma", "sm_90a": "mma"}
FAST = ("int8", "int8_odd", "int4_zeros", "q4_K", "q6_K", "mxfp4")


def linear_spec(case: str, m_class: Any) -> KernelSpec:
    import msgspec

    spec = cases.linear_spec(case, LAYOUT)
    body = msgspec.structs.replace(spec.body, m_class=m_class)
    return msgspec.structs.replace(spec, name=f"{spec.name}_{m_class.replace('-', '_')}", body=body)


def check_products(run: Callable[..., Any], case: str, m_class: str, ms: tuple[int, ...]) -> None:
    packed, (_, _, n, k, dtype) = cases.packed_weight(case), cases.WEIGHTS[case]
    data = layouts.get(LAYOUT).pack(packed.format, "f32", n, k, packed.data)
    bias = np.random.default_rng(1).standard_normal(n).astype(np.float32)
    name = linear_spec(case, m_class).name
    for m in ms:
        rows = int8_rows.quantise(cases.activations(m, k, m), "token", 0.0, None)
        (out,) = run(name, [rows, data, bias, np.zeros((m, n), cases.DTYPES[dtype])], [m])
        assert cases.same_bits(out, cases.expected(case, packed, rows, bias)), (case, m_class, m)


@pytest.mark.parametrize("arch", ["sm_80", pytest.param("sm_70", marks=pytest.mark.slow)])
def test_products_have_the_bits_of_their_definition(sim_module: Callable[..., Any], arch: str) -> None:
    kernels = sim_module([linear_spec(case, m_class) for case in FAST for m_class in ("2-8", "large")], arch)
    for case in FAST:
        check_products(kernels.run, case, "2-8", (1, 7, 33))
        check_products(kernels.run, case, "large", (33, 65) if case == "int8" else (33,))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_70", "sm_75", "sm_80"])
@pytest.mark.parametrize("case", cases.WEIGHTS)
def test_every_weight_has_the_bits_of_its_definition(sim_module: Callable[..., Any], arch: str, case: str) -> None:
    kernels = sim_module([linear_spec(case, m_class) for m_class in CLASSES], arch)
    for m_class, ms in CLASSES.items():
        check_products(kernels.run, case, m_class, ms)


def test_rows_have_the_bits_of_their_definition(sim_module: Callable[..., Any]) -> None:
    kernels = sim_module(cases.ROWS, "sm_80")
    for spec in cases.ROWS:
        body = spec.body
        assert isinstance(body, QuantizeRowsKernel)
        held = np.zeros((9, body.cols + 3), cases.DTYPES[spec.operands[0].dtype])
        held[:, : body.cols] = cases.activations(9, body.cols, 9).astype(held.dtype)
        columns = np.arange(body.cols) % 7 == 3
        middle = [columns] if body.kind == "outliers" else []
        out = np.zeros((9, int8_rows.row_bytes(body.cols)), np.int8)
        (found,) = kernels.run(spec.name, [held[:, : body.cols], *middle, out], [9])
        want = int8_rows.quantise(held[:, : body.cols], body.kind, body.value, columns if middle else None)
        assert found.tobytes() == want.tobytes(), spec.name


@pytest.mark.parametrize("arch", [pytest.param(a, marks=[] if a == "sm_90a" else pytest.mark.slow) for a in ARCHS])
def test_every_architecture_compiles_them_without_spills(nvrtc: Callable[..., Any], arch: str) -> None:
    specs = [linear_spec(case, m_class) for case in ("int8", "int4_zeros", "q6_K", "iq4_xs") for m_class in CLASSES]
    resources = nvrtc([*specs, cases.ROWS[0]], arch)
    for spec in specs:
        assert emit_kernel(spec, arch).engine == ENGINES.get(arch, "mma")
        assert resources[spec.name].spill_stores == 0, (spec.name, resources[spec.name])


def test_rows_that_are_not_aligned_are_refused() -> None:
    import msgspec

    spec = linear_spec("int8", "large")
    x = msgspec.structs.replace(spec.operands[0], strides=(int8_rows.row_bytes(101) + 4, 1))
    with pytest.raises(KernelSelectionError, match="multiples of 16 bytes"):
        emit_kernel(msgspec.structs.replace(spec, operands=(x, *spec.operands[1:])), "sm_80")
