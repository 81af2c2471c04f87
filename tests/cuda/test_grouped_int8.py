"""Int8 rows times the codes of chosen experts on the device, to the bit what formats/integer_product.py says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from grouped_int8_cases import Case
from kernel_cases import same_bits

from qcompiler.kernels.cuda.emit import emit_kernel
from qcompiler.kernels.cuda.weights import LAYOUT

FEW = [
    Case("int8", 5, 19, 101, rows=2, repeat=2, layout=LAYOUT),  # experts begin inside of panels
    Case("q4_K", 3, 16, 512, rows=3, index="i32", dtype="bf16", layout=LAYOUT),
]
ANY = [
    Case("int4", 3, 35, 96, repeat=2, layout=LAYOUT), Case("q6_K", 2, 72, 256, index="i32", layout=LAYOUT),
    Case("mxfp4", 4, 19, 96, dtype="f16", layout=LAYOUT),
]  # fmt: skip


def check(module: Any, case: Case, chosen: list[int], **options: Any) -> None:
    operands = case.operands(chosen)
    out = operands[-1][:, : case.n]
    symbols = [len(operands[0])] if isinstance(case.rows, str) else []
    given = [operands[0][:, : operands[0].shape[1] - 16], operands[1], operands[2][:: 1 if case.index == "i64" else 3]]
    (found,) = module.run(case.name, [*given, out], symbols, **options)
    assert same_bits(found, case.expected(operands[0], chosen)), (case, chosen[:8])


def routings(case: Case, count: int) -> list[list[int]]:
    rng, last = np.random.default_rng(count), case.experts - 1
    return [[int(e) for e in rng.integers(0, last + 1, count)], [last] * count]


@pytest.mark.parametrize("arch", ["sm_80", pytest.param("sm_70", marks=pytest.mark.slow)])
def test_few_pairs_have_the_bits_of_their_definition(sim_module: Callable[..., Any], arch: str) -> None:
    module = sim_module([case.spec for case in FEW], arch)
    for case in FEW:
        assert isinstance(case.rows, int)
        for chosen in routings(case, case.rows * case.repeat):
            check(module, case, chosen)


@pytest.mark.parametrize("arch", ["sm_80", pytest.param("sm_70", marks=pytest.mark.slow)])
def test_any_number_of_pairs_has_the_bits_of_its_definition(sim_module: Callable[..., Any], arch: str) -> None:
    module = sim_module([case.spec for case in ANY], arch)
    for case in ANY:
        for chosen in routings(case, 40 * case.repeat):
            check(module, case, chosen)


def test_a_pair_without_an_expert_is_nan_and_no_other_changes(sim_module: Callable[..., Any]) -> None:
    module = sim_module([case.spec for case in (*FEW, *ANY)], "sm_80")
    check(module, FEW[0], [4, 5, -1, 0])
    check(module, ANY[0], [0, 3, 2, -1, 1, 2])


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_75", "sm_90a"])
def test_every_architecture_compiles_them_without_spills(nvrtc: Callable[..., Any], arch: str) -> None:
    specs = [case.spec for case in (*FEW, *ANY)]
    resources = nvrtc(specs, arch)
    for spec in specs:
        assert emit_kernel(spec, arch).engine == "mma"
        assert resources[spec.name].spill_stores == 0, (spec.name, resources[spec.name])
