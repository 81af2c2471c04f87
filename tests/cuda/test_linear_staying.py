"""Linears of one row whose blocks stay for several panels: the bits of blocks with one panel each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from by_path import load
from kernel_cases import stored_weight

from qcompiler.kernels.cuda import linear
from qcompiler.kernels.cuda.emit import emit_kernel, geometry
from qcompiler.kernels.cuda.geometry import MULTIPROCESSORS
from qcompiler.plan.kernel import FormatRef, KernelSpec, Operand
from qcompiler.plan.kinds.linear import LinearKernel
from qcompiler.plan.weights import NUMPY_DTYPES

pairs, norms = load("tests/support/pair_cases.py"), load("tests/support/norm_prologue_cases.py")
ARCH = "sm_90a"
Module = Callable[..., Any]
FORMATS: dict[str, tuple[FormatRef | str, int]] = {  # and columns: whole rings of four tiles for one, two, four warps
    "nf4": (FormatRef("nf4", {"block": 64}), 256), "int4": (FormatRef("int4", {"group": 128}), 1024),
    "int8": (FormatRef("int8", {}), 512), "plain": ("layout", 128), "int4_32": (FormatRef("int4", {"group": 32}), 512),
    "q4_K": (FormatRef("q4_K", {}), 1024), "q6_K": (FormatRef("q6_K", {}), 512), "mxfp4": (FormatRef("mxfp4", {}), 256),
    "fp8": (FormatRef("fp8_e4m3", {}), 256), "int3": (FormatRef("int3", {"group": 128}), 512),
}  # fmt: skip
SHORT = ("nf4", "int8")


@pytest.fixture
def one_multiprocessor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two or three blocks at once, as a large weight on a large GPU."""
    monkeypatch.setitem(MULTIPROCESSORS, 90, 1)
    yield


def spec_of(name: str, kind: str, rows: int, dtype: Any = "bf16") -> tuple[KernelSpec, list[Any], Any]:
    """The kernel, its operands, and its result in float64."""
    how, cols = FORMATS[kind]
    rng = np.random.default_rng(rows + cols)
    w = rng.standard_normal((rows, cols)).astype(np.float32) / np.float32(math.sqrt(cols))
    operand, data, values = stored_weight(w, how, dtype, linear.LAYOUT)
    x = rng.standard_normal((1, cols)).astype(NUMPY_DTYPES[dtype])
    operands = (
        Operand(name="x", dtype=dtype, access="r", shape=(1, cols), strides=(cols, 1)),
        operand,
        Operand(name="out", dtype=dtype, access="w", shape=(1, rows), strides=(rows, 1)),
    )
    body = LinearKernel(m=1, n=rows, k=cols, m_class="1", has_bias=False)
    given = data.view(values.dtype) if how == "layout" else data
    wanted = x.astype(np.float64) @ values.astype(np.float64).T
    return (
        KernelSpec(name=name, symbols=(), operands=operands, body=body),
        [x, given, np.zeros_like(wanted, x.dtype)],
        wanted,
    )


@pytest.mark.parametrize(
    "kind", [kind if kind in SHORT else pytest.param(kind, marks=pytest.mark.slow) for kind in FORMATS]
)
@pytest.mark.parametrize("panels", [4, pytest.param(9, marks=pytest.mark.slow)])
def test_a_block_that_stays_has_the_bits_of_one_panel_each(
    sim_module: Module, monkeypatch: pytest.MonkeyPatch, kind: str, panels: int
) -> None:
    rows = 16 * panels - 5
    each, operands, wanted = spec_of(f"each_{kind}_{panels}", kind, rows)
    found = sim_module([each], ARCH).run(each.name, operands)[-1]
    assert geometry(each, ARCH).grid[0] == panels
    monkeypatch.setitem(MULTIPROCESSORS, 90, 1)
    stays, operands, _ = spec_of(f"stays_{kind}_{panels}", kind, rows)
    assert geometry(stays, ARCH).grid[0] in (2, 3)
    again = sim_module([stays], ARCH).run(stays.name, operands)[-1]
    assert again.tobytes() == found.tobytes()
    error = np.linalg.norm(again.astype(np.float64) - wanted) / np.linalg.norm(wanted)
    assert error <= 3e-3  # half a unit in the last place of bf16


@pytest.mark.usefixtures("one_multiprocessor")
@pytest.mark.parametrize("name", ["q4_K", pytest.param("q6_K", marks=pytest.mark.slow)])
def test_pairs(sim_module: Module, name: str) -> None:
    case = pairs.make("cuda_t16_pairs_v1", name, "bf16", "1", columns=33, has_bias=True, m=1)
    assert geometry(case.paired, ARCH).grid[0] in (2, 3)
    module = sim_module([case.paired, case.plain], ARCH)
    paired, plain = case.given(1)
    sums = module.run(case.plain.name, plain, {})[-1]
    assert module.run(case.paired.name, paired, {})[-1].tobytes() == case.combined(sums, 1).tobytes()


@pytest.mark.usefixtures("one_multiprocessor")
@pytest.mark.parametrize(
    ("norm", "keeps"),
    [("rms", True), *(pytest.param(*each, marks=pytest.mark.slow) for each in (("rms", False), ("layer", True)))],
)
def test_a_norm_in_front_whose_rows_others_read_too(sim_module: Module, norm: str, keeps: bool) -> None:
    case = norms.make("cuda_t16_v1", "plain", "bf16", norm, 1, "1", rows=75, cols=256, keeps=keeps)
    assert geometry(case.fused, ARCH).grid[0] < 5
    module = sim_module(case.specs, ARCH)
    operands = case.given(1)
    found = module.run(case.fused.name, operands)[-case.written :]
    apart = case.apart(lambda spec, given: module.run(spec.name, given)[-1], operands)
    assert [each.tobytes() for each in found] == [each.tobytes() for each in apart]


def test_what_a_block_cannot_stay_for_keeps_one_panel_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few panels, other architectures, several rows, columns that end inside a ring."""
    spec, *_ = spec_of("few_panels", "nf4", 40)
    assert emit_kernel(spec, ARCH).geometry.grid[0] == 3
    monkeypatch.setitem(MULTIPROCESSORS, 90, 1)
    spec, *_ = spec_of("another_arch", "nf4", 100)
    assert emit_kernel(spec, "sm_80").geometry.grid[0] == 7
    monkeypatch.setitem(FORMATS, "nf4", (FORMATS["nf4"][0], 320))
    spec, *_ = spec_of("no_whole_ring", "nf4", 100)
    assert emit_kernel(spec, ARCH).geometry.grid[0] == 7
