"""Experts whose sums are combined in the kernel, on the device, against float64; their resources and geometry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from combined_cases import Case, cases, check, codes, make, routings

from qcompiler.errors import KernelSelectionError
from qcompiler.kernels.cuda import grouped_linear
from qcompiler.kernels.cuda.emit import emit_kernel
from qcompiler.plan.kernel import KernelSpec

LAYOUT = "cuda_t16_v1"


def run(module: Any, case: Case, chosen: list[int], **options: Any) -> tuple[Any, list[Any]]:
    inputs = case.inputs(chosen)
    (result,) = module.run(case.spec.name, inputs, {}, **options)
    return result, inputs


def test_combined_sums_equal_float64(sim_module: Callable[..., Any]) -> None:
    every = cases(LAYOUT)
    assert {grouped_linear.decision_of(case.spec, "sm_80").key for case in every} == {"few_fma", "few_mma"}
    module = sim_module([case.spec for case in every], "sm_80")
    for case in every:
        for chosen in routings(case):
            result, inputs = run(module, case, chosen)
            check(case, result, case.expected(chosen, inputs))


@pytest.mark.parametrize("arch", ["sm_80", pytest.param("sm_70", marks=pytest.mark.slow)])
def test_combined_sums_of_codes_are_those_of_their_definition(sim_module: Callable[..., Any], arch: str) -> None:
    """By tiles of tensor cores and by `dp4a`, with a group for each sum and with several sums in turns."""
    every = codes(LAYOUT)
    geometries = [emit_kernel(case.spec, arch).geometry.block for case in every]
    assert {block[1] for block in geometries} >= {1, 2, 3, 4}  # 1: five experts, 3: nine
    assert 5 * 32 in {block[0] for block in geometries}
    module = sim_module([case.spec for case in every], arch)
    for case in every:
        for chosen in routings(case):
            result, inputs = run(module, case, chosen)
            check(case, result, case.expected(chosen, inputs))


def test_the_order_of_blocks_changes_no_bit(sim_module: Callable[..., Any]) -> None:
    every = cases(LAYOUT)
    module = sim_module([case.spec for case in every], "sm_80")
    for case in (every[2], every[6]):
        chosen = routings(case)[0]
        first = run(module, case, chosen)[0].tobytes()
        assert all(run(module, case, chosen, seed=seed)[0].tobytes() == first for seed in (1, 2))


def test_an_expert_that_does_not_exist_gives_nan_in_its_row_alone(sim_module: Callable[..., Any]) -> None:
    every, of_codes = cases(LAYOUT), codes(LAYOUT)
    module = sim_module([case.spec for case in (*every, *of_codes)], "sm_80")
    turns = next(case for case in of_codes if case.body.top == 9)
    for case, chosen, wrong in (
        (every[0], [4, 9], [1]), (every[5], [1, 2, 0, 3, -1, 3], [2]), (of_codes[0], [2**31, 4], [0]),
        (of_codes[0], [4, -(2**62)], [1]), (of_codes[5], [1, 2, 0, 3, -(2**31), 3], [2]),
        (of_codes[5], [4, 1, 1, 1, 1, 1], [0]), (turns, [*range(8), 12], [0]),
    ):  # fmt: skip
        result, _ = run(module, case, chosen)
        assert np.flatnonzero(np.isnan(result).any(1)).tolist() == wrong
        assert np.isnan(result[wrong]).all()


def test_a_token_of_a_large_mixture_keeps_its_warps() -> None:
    """Mixtral's and Qwen3-MoE's shapes: the groups of a block share its warps and its shared memory."""
    mixtral = make(LAYOUT, "nf4", 1, 32, 64, rows=1, repeat=2)
    assert emit_kernel(mixtral.spec, "sm_90a").geometry.block[1] == 2
    eight = make(LAYOUT, "nf4", 8, 2048, 768, rows=8, top=8, dtype="bf16")
    geometry = emit_kernel(eight.spec, "sm_90a").geometry
    assert geometry.grid == (128, 1, 1) and geometry.block == (64, 8, 1)
    assert geometry.shared <= 110 * 1024


def test_no_form_spills(nvrtc: Callable[[Sequence[KernelSpec], str], dict[str, Any]]) -> None:
    some = [
        make(LAYOUT, name, 4, n, 512, rows=rows, repeat=2 - bool(top), top=top, dtype=dtype).spec
        for name in ("nf4", "q4_K", "int8", "panels")
        for dtype in ("f32", "bf16") for n, rows, top in ((64, 1, 0), (32, 2, 2), (32, 8, 8))
    ]  # fmt: skip
    some += [
        make(LAYOUT, name, 4, n, 2048, rows=rows, repeat=2 - bool(top), top=top, codes=True).spec
        for name in ("int8", "q4_K", "q6_K", "int4") for n, rows, top in ((64, 1, 0), (32, 2, 2), (32, 8, 8))
    ]  # fmt: skip
    for arch in ("sm_75", "sm_90a", "sm_120"):
        table = nvrtc([spec for spec in some if arch != "sm_75" or spec.operands[0].dtype != "bf16"], arch)
        assert not [name for name, each in table.items() if each.uses_local_memory], arch


def test_too_many_experts_of_a_row_are_refused() -> None:
    with pytest.raises(KernelSelectionError, match="at most 8 experts of a row, not 16"):
        emit_kernel(make(LAYOUT, "nf4", 20, 32, 64, rows=16, top=16).spec, "sm_90a")
    with pytest.raises(KernelSelectionError, match="at most 64 pairs"):
        emit_kernel(make(LAYOUT, "nf4", 20, 32, 64, rows=72, top=8).spec, "sm_90a")
