"""Linears that share a launch on a GPU: each has the results of a launch of its own, and no kernel spills."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from by_path import load

from qcompiler.kernels.cuda import emit
from qcompiler.plan.kernel import FormatRef, KernelSpec, Operand
from qcompiler.plan.kinds.linear import LinearKernel

support = load("tests/support/linears_cases.py")
norms = load("tests/support/norm_prologue_cases.py")
LAYOUT, PAIRS = "cuda_t16_v1", "cuda_t16_pairs_v1"
BOUNDS = {"f32": 1e-6, "bf16": 4e-3, "f16": 5e-4}
"""Relative differences of two orders of a sum, rounded to the type."""
Module = Callable[..., Any]
TARGETS = [
    ("sm_80", "bf16"),
    *(
        pytest.param(*each, marks=pytest.mark.slow)
        for each in (("sm_70", "f32"), ("sm_75", "f16"), ("sm_75", "bf16"), ("sm_80", "f32"), ("sm_90a", "bf16"))
    ),
]


@pytest.mark.parametrize(("arch", "dtype"), TARGETS)
def test_each_linear_has_the_results_of_a_launch_of_its_own(sim_module: Module, arch: str, dtype: str) -> None:
    made = support.cases(LAYOUT, dtype, (1, 7) if arch == "sm_80" else (1, 2, 8), PAIRS)
    module = sim_module([spec for case in made for spec in (case.spec, *case.alone)], arch)
    for case in made:
        found = iter(module.run(case.spec.name, case.fresh()))
        threads = emit.geometry(case.spec, arch).threads
        for spec, own in zip(case.alone, case.operands, strict=True):
            same_order = emit.geometry(spec, arch).threads == threads
            for apart in module.run(spec.name, own):  # what it writes
                together = next(found)
                assert np.any(apart)
                assert together.tobytes() == apart.tobytes() or not same_order, (case.spec.name, spec.name)
                error = np.linalg.norm(together.astype(np.float64) - apart.astype(np.float64))
                assert error <= BOUNDS[dtype] * np.linalg.norm(apart.astype(np.float64)), (case.spec.name, spec.name)


def test_a_launch_has_the_blocks_of_all_and_the_room_of_the_largest() -> None:
    for case in support.cases(LAYOUT, "bf16", (1,), PAIRS):
        launch, *own = (emit.geometry(spec, "sm_90a") for spec in (case.spec, *case.alone))
        assert launch.grid == (sum(each.grid[0] for each in own), 1, 1)
        fewest = min(each.threads for each in own)
        assert launch.threads == (128 if "narrow" in case.spec.name else fewest)
        assert launch.shared >= min(each.shared for each in own)


def _of_a_model(dtype: Any, m: int, formats: tuple[str, ...], codes: bool) -> KernelSpec:
    """q and k of an 8 B model, and v in another format, behind a norm."""
    specs = []
    for name, rows in zip(formats, (5120, 1024), strict=True):
        params: dict[str, Any] = {"block": 64} if name == "nf4" else {}
        x, out = (
            Operand(name=end, dtype=dtype, access=access, shape=(m, size), strides=(size, 1))
            for end, access, size in (("x", "r", 4096), ("out", "w", rows))
        )
        ref = FormatRef(name=name, params=params)
        w = Operand(name="w", dtype=dtype, access="r", shape=(rows, 4096), format=ref, layout=LAYOUT)
        scale = Operand(name="norm_weight", dtype=dtype, access="r", shape=(4096,), strides=(1,))
        body = LinearKernel(
            m=m, n=rows, k=4096, m_class="1" if m == 1 else "2-8", has_bias=False, norm=norms.NORMS["rms"],
            codes=codes, rows=norms.RowCodes(kind="token") if codes else None,
        )  # fmt: skip
        specs.append(KernelSpec(name="", symbols=(), operands=(x, w, scale, out), body=body))
    return support.beside(f"{'_'.join(formats)}_{m}_{codes}", specs)


@pytest.mark.parametrize(
    "arch",
    [
        "sm_90a",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("sm_70", "sm_75", "sm_80", "sm_100", "sm_120")),
    ],
)
def test_no_launch_of_several_linears_spills(nvrtc: Callable[..., Any], arch: str) -> None:
    dtype = "bf16" if arch not in ("sm_70", "sm_75") else "f16"
    formats = (("q4_K", "q6_K"), ("q5_K", "q6_K"), ("nf4", "int8"), ("q3_K", "q5_K"))
    specs = [_of_a_model(dtype, m, each, codes=False) for m in (1, 7) for each in formats]
    specs += [_of_a_model(dtype, m, ("int4", "int8"), codes=True) for m in (1, 7)]
    for name, used in nvrtc(specs, arch).items():
        assert (used.spill_stores, used.spill_loads, used.stack) == (0, 0, 0), (name, arch, used)
