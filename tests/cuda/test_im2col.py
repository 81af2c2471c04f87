"""Linears that read the windows of an image in place, on the device: geometries, types, engines, packed weights.

Cases and the oracle are those of the CPU kernels (tests/support/window_cases.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from by_path import load

from qcompiler.config import parse_format, resolve_format
from qcompiler.errors import KernelSelectionError
from qcompiler.kernels import layouts
from qcompiler.kernels.cuda import linear
from qcompiler.kernels.cuda.emit import emit_kernel
from qcompiler.kernels.cuda.signature import ARCHS
from qcompiler.kernels.cuda.weights import LAYOUT
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.linear import LinearKernel

Array = npt.NDArray[Any]


cpu = load("tests/support/window_cases.py")
TENSOR_CORES = (
    replace(cpu.CASES[0], name="padded_bf16", dtype="bf16"),  # 16 channels: whole pieces
    replace(cpu.CASES[1], name="first_layer_bf16", dtype="bf16", m_class="9-64"),  # 3: element by element
    replace(cpu.CASES[3], name="dilated_bf16", dtype="bf16"),
    replace(cpu.CASES[4], name="gaps_bf16", dtype="bf16", channels=8, gap=8, m_class="9-64"),
)

SHORT = ("first_layer", "wide_border", "dilated", "gaps", "narrow_few_rows")


def in_tiles(case: Any, weight: str | None) -> KernelSpec:
    """The case with its weight in the layout of CUDA targets, packed or plain."""
    spec: KernelSpec = cpu.spec_of(case)
    image, w, out = spec.operands
    ref = None if weight is None else parse_format(weight)
    w = msgspec.structs.replace(w, strides=(), layout=LAYOUT, format=ref)
    return msgspec.structs.replace(spec, operands=(image, w, out))


def check(module: Any, spec: KernelSpec, case: Any, weight: str | None, bound: float) -> None:
    body, dtype, rng = spec.body, cpu.DTYPES[case.dtype], np.random.default_rng(0)
    assert isinstance(body, LinearKernel)
    values = (rng.standard_normal((case.n, body.k)) / np.sqrt(body.k)).astype(np.float32)
    w: Array = values.astype(dtype)
    data = w
    if spec.operands[1].layout == LAYOUT:
        t16 = layouts.get(LAYOUT)
        if weight is None:
            data = t16.pack(None, case.dtype, case.n, body.k, w.view(np.uint8).reshape(-1)).view(w.dtype)
        else:
            fmt = resolve_format(weight)
            packed = fmt.encode(values)
            w = fmt.decode(packed).astype(dtype)
            data = t16.pack(fmt, case.dtype, case.n, body.k, packed.data)
    for batch, height, width in ((1, 7, 7), (2, 9, 11), (3, 7, 8)):
        size = case.size(height, width)
        wide = rng.standard_normal((batch, height, width, case.channels + case.gap)).astype(dtype)
        wide[..., case.channels :] = np.nan  # between the pixels: never read
        image = wide[..., : case.channels]
        wanted = cpu.rows_of(case, image.astype(np.float64), size) @ w.astype(np.float64).T
        symbols = dict(zip(("b", "h", "w", "r", "q"), (batch, height, width, *size), strict=True))
        (found,) = module.run(spec.name, [wide, data, np.zeros(wanted.shape, np.float32)], symbols)
        error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
        assert error <= bound, f"{spec.name} of {batch} x {height} x {width}: relative error {error:.2e}"


def test_windows_are_read_where_they_lie_on_cuda_cores(sim_module: Callable[..., Any]) -> None:
    chosen = [case for case in cpu.CASES if case.name in SHORT]
    specs = [cpu.spec_of(case) for case in chosen]
    assert {linear.decision_of(spec, "sm_75").key for spec in specs} == {"fma"}
    module = sim_module(specs, "sm_75")
    for case, spec in zip(chosen, specs, strict=True):
        check(module, spec, case, None, 1e-6)


def test_windows_are_read_where_they_lie_on_tensor_cores(sim_module: Callable[..., Any]) -> None:
    weights = ("nf4", None, "nf4", "int8")
    specs = [in_tiles(case, weight) for case, weight in zip(TENSOR_CORES, weights, strict=True)]
    assert {linear.decision_of(spec, "sm_80").key for spec in specs} == {"mma"}
    module = sim_module(specs, "sm_80")
    for case, spec, weight in zip(TENSOR_CORES, specs, weights, strict=True):
        check(module, spec, case, weight, 1e-6)


@pytest.mark.parametrize("arch", ARCHS)
def test_windows_have_a_kernel_on_every_architecture(arch: str) -> None:
    for case in (*cpu.CASES, *TENSOR_CORES):
        for m_class in ("1", "2-8", "9-64", "large"):
            emit_kernel(in_tiles(replace(case, m_class=m_class), "int8"), arch)


def test_an_image_whose_channels_are_apart_is_named() -> None:
    spec = cpu.spec_of(cpu.CASES[0])
    image = msgspec.structs.replace(spec.operands[0], strides=("16*h*w", "16*w", 16, 2))
    broken = msgspec.structs.replace(spec, operands=(image, *spec.operands[1:]))
    with pytest.raises(KernelSelectionError, match="'x' needs unit stride in its last dim"):
        emit_kernel(broken, "sm_90a")
